"""Post-training quantization that spends bits where the exact Hessian says they matter."""

from quant.allocation import Problem, allocate
from quant.autoround import AutoRoundQuantizer
from quant.candidates import Candidates, round_all
from quant.checkpoint import CheckpointError, Written, untie, write_checkpoint
from quant.choice import InfeasibleError
from quant.expansion import Expansion, expand
from quant.gptq import GptqQuantizer, gptq
from quant.inputs import InputGrams, input_grams
from quant.perplexity import Perplexity, evaluate_perplexity
from quant.pipeline import QuantizedModel, Settings, quantize_model
from quant.plan import Plan, uniform_plan
from quant.relinearization import Relinearization, relinearize
from quant.rounding import QuantizedWeight, round_to_nearest
from quant.scheme import Scheme, schemes
from quant.sensitivity import METRICS, Sensitivity, sensitivity, with_linear
from quant.storage import PackedStorage
from quant.weights import WeightMatrix, find_weights, sharing_groups

__all__ = [
    "METRICS",
    "AutoRoundQuantizer",
    "Candidates",
    "CheckpointError",
    "Expansion",
    "GptqQuantizer",
    "InfeasibleError",
    "InputGrams",
    "PackedStorage",
    "Perplexity",
    "Plan",
    "Problem",
    "QuantizedModel",
    "QuantizedWeight",
    "Relinearization",
    "Scheme",
    "Sensitivity",
    "Settings",
    "WeightMatrix",
    "Written",
    "allocate",
    "evaluate_perplexity",
    "expand",
    "find_weights",
    "gptq",
    "input_grams",
    "quantize_model",
    "relinearize",
    "round_all",
    "round_to_nearest",
    "schemes",
    "sensitivity",
    "sharing_groups",
    "uniform_plan",
    "untie",
    "with_linear",
    "write_checkpoint",
]
