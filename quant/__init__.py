"""Post-training quantization that spends bits where the exact Hessian says they matter."""
