"""Softmax attention with an exact, memory-linear double backward."""

from flashbob.api import explain, sdpa_bob
from flashbob.huggingface import register_attention

__version__ = "0.1.0"
__all__ = ["__version__", "explain", "register_attention", "sdpa_bob"]
