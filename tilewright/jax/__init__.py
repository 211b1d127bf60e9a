"""FP8 for JAX: `quantize_fp8(x, scale)`, and `gemm_fp8(x, w, scale_x, scale_w)`, a product of FP8 codes with gradients in bf16.

It is an extra (`pip install "tilewright[jax]"`): nothing of it is loaded before `tilewright.jax` is asked for.
"""

from __future__ import annotations

try:
    import jax  # noqa: F401
except ImportError as error:
    raise ImportError('tilewright.jax needs JAX: pip install "tilewright[jax]"') from error

from .fp8 import gemm_fp8, quantize_fp8

__all__ = ["gemm_fp8", "quantize_fp8"]
