"""Exact curvature of language models: Hessian products, and traces, eigenvalues and densities with their errors."""

from curvature.density import SpectralDensity, spectral_density
from curvature.lanczos import LanczosResult, lanczos
from curvature.loss import CausalLMLoss, Loss
from curvature.models import LoadedModel, ModelInfo, load_model
from curvature.operators import HessianOperator, LinearOperator, hvp
from curvature.streaming import Streaming
from curvature.text import TokenWindows, token_windows
from curvature.trace import TraceEstimate, trace

__all__ = [
    "CausalLMLoss",
    "HessianOperator",
    "LanczosResult",
    "LinearOperator",
    "LoadedModel",
    "Loss",
    "ModelInfo",
    "SpectralDensity",
    "Streaming",
    "TokenWindows",
    "TraceEstimate",
    "hvp",
    "lanczos",
    "load_model",
    "spectral_density",
    "token_windows",
    "trace",
]
