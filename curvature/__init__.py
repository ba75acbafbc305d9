"""Exact curvature of language models: Hessian products, and traces, eigenvalues and densities with their errors."""

from curvature.attention_heads import fused_groups, head_groups
from curvature.block_traces import BlockTraces, block_traces
from curvature.checks import CheckError, check_operator
from curvature.condition import Condition, condition_number
from curvature.deflated_trace import hutchpp, xtrace
from curvature.density import SpectralDensity, spectral_density
from curvature.diagonal import DiagonalEstimate, diagonal
from curvature.distributed import Processes
from curvature.eigenpairs import Eigenpairs, eigenpairs
from curvature.fisher import FisherOperator
from curvature.frobenius import FrobeniusEstimate, frobenius_norm
from curvature.ggn import GGNOperator
from curvature.groups import BlockDiagonalOperator, Group, GroupOperator, groups_by, layer_groups
from curvature.lanczos import LanczosResult, lanczos
from curvature.layer_spectra import SpectraDistances, layer_spectra, spectra_distances
from curvature.loss import CausalLMLoss, Loss
from curvature.models import LoadedModel, ModelInfo, load_model
from curvature.operators import HessianOperator, LinearOperator, hvp
from curvature.state import RunState
from curvature.streaming import Streaming
from curvature.text import TokenWindows, token_windows
from curvature.trace import TraceEstimate, trace

__all__ = [
    "BlockDiagonalOperator",
    "BlockTraces",
    "CausalLMLoss",
    "CheckError",
    "Condition",
    "DiagonalEstimate",
    "Eigenpairs",
    "FisherOperator",
    "FrobeniusEstimate",
    "GGNOperator",
    "Group",
    "GroupOperator",
    "HessianOperator",
    "LanczosResult",
    "LinearOperator",
    "LoadedModel",
    "Loss",
    "ModelInfo",
    "Processes",
    "RunState",
    "SpectraDistances",
    "SpectralDensity",
    "Streaming",
    "TokenWindows",
    "TraceEstimate",
    "block_traces",
    "check_operator",
    "condition_number",
    "diagonal",
    "eigenpairs",
    "frobenius_norm",
    "fused_groups",
    "groups_by",
    "head_groups",
    "hutchpp",
    "hvp",
    "lanczos",
    "layer_groups",
    "layer_spectra",
    "load_model",
    "spectra_distances",
    "spectral_density",
    "token_windows",
    "trace",
    "xtrace",
]
