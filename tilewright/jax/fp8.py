"""FP8 with one scale for a tensor: codes q = e4m3(x / scale), and products y = scale_x * scale_w * (q_x @ q_w).

Codes are those of `tilewright.quantize(x, fp8("tensor", scale=scale))`, bit for bit: x times the rounded reciprocal of the scale,
to nearest even, saturating; what is not finite becomes NaN, 0x7F. That holds for scales from 2^-126 to 2^126, whose reciprocals
are normal numbers: XLA may take smaller ones for 0. The backward of a product is that of y = x @ w, in bf16:

    dx = dy @ w.T        dw = x.T @ dy

On a GPU, XLA may multiply codes in Triton kernels of its own. These leave sums in the tensor cores, which have 14 bits for them:
1.4e-3 off at K 4096 (docs/measured.md). They know no dot algorithm of FP8, so that a product which names one is cuBLASLt's: here
the one with sums in fp32. cuBLASLt takes the scale too. It wants sizes that are multiples of 16, and of one row XLA (that of jax
0.11) does not compile a product by an algorithm at all: zeros are put around the codes.
"""

from __future__ import annotations

import functools
import importlib.metadata
import importlib.util
import math
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import triton
from jax import Array, lax
from jax.experimental.layout import Layout, with_layout_constraint

from ..core.triton_versions import age
from ..formats.given import given_codes

E4M3 = jnp.float8_e4m3fn
LARGEST = 448.0
FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)
TILE = {"ROWS": 32, "COLS": 128}
BY_ROWS = (((1,), (1,)), ((), ()))  # dimensions that are summed over, and none that are batches
IN_FP32 = lax.DotAlgorithmPreset.ANY_F8_ANY_F8_F32  # codes are multiplied as they are, and summed in full
MULTIPLE = 16  # of all sizes, which cuBLASLt wants
# From this many results on, the product stores bf16 itself, for fp32 would be written and read once more. XLA does not divide
# products of so many along K, so that none is rounded before it is summed and scaled.
MANY = 1 << 22
MULTIPLIES = (8, 9)  # the compute capability from which tensor cores multiply FP8


def quantize_fp8(x: Array, scale: Array | float) -> Array:
    """The e4m3 codes of `x` with a dequantisation scale, one fp32 number: x ~ code * scale. No gradient passes."""
    x = jnp.asarray(x)
    check_float("quantize_fp8", "x", x)
    return codes_of(lax.stop_gradient(x), one_scale("quantize_fp8", "scale", scale))


def gemm_fp8(x: Array, w: Array, scale_x: Array | float, scale_w: Array | float) -> Array:
    """`x` [..., K] times `w` [K, N], both as e4m3 codes with a dequantisation scale each; the gradients are those of x @ w in bf16.

    A factor may be codes already, which `quantize_fp8` gave; it has no gradient then. The result has the dtype of `x`, of `w` where
    `x` is codes, and is bfloat16 where both are. Scales have no gradients.
    """
    x, w = jnp.asarray(x), jnp.asarray(w)
    for name, value in (("x", x), ("w", w)):
        if value.dtype != E4M3:
            check_float("gemm_fp8", name, value)
    if x.ndim < 1:
        raise ValueError("gemm_fp8: x must be [..., K], got a number")
    if w.ndim != 2 or w.shape[0] != x.shape[-1]:
        raise ValueError(f"gemm_fp8: w must be [K, N] with K = {x.shape[-1]}, as x is {[*x.shape]}, got {[*w.shape]}")
    scales = one_scale("gemm_fp8", "scale_x", scale_x), one_scale("gemm_fp8", "scale_w", scale_w)
    y = product(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]), w, *map(lax.stop_gradient, scales))
    return y.reshape(*x.shape[:-1], w.shape[1])


def check_float(function: str, name: str, value: Array) -> None:
    if value.dtype not in FLOATS:
        raise ValueError(f"{function}: {name} must be bfloat16, float16, float32 or float64, got {value.dtype}")


def one_scale(function: str, name: str, value: Array | float) -> Array:
    """A scale as a number in fp32."""
    given = jnp.asarray(value)
    if given.size != 1 or not jnp.issubdtype(given.dtype, jnp.floating):
        raise ValueError(f"{function}: {name} must be one float32 number, got {[*given.shape]} of {given.dtype}")
    return given.reshape(()).astype(jnp.float32)


# ---- codes -----------------------------------------------------------------------------------------------------------


def reciprocal(scale: Array) -> Array:
    """RN(1 / scale). XLA's division on a GPU may be off by a few steps of the last bit, which `mended` takes back."""
    return mended(scale, 1.0 / scale)


def mended(scale: Array, guess: Array) -> Array:
    """RN(1 / scale) from a guess that is at most three steps off, by the remainder in integers.

    With the scale's mantissa a in (2^23, 2^24), that of the reciprocal is the integer next to 2^47 / a, which is never half-way
    between two. For a guess g, 2^47 - a * g is small: its lowest 32 bits, which integers that wrap give, are all of it. Where the
    reciprocal is no normal number the guess is taken as it is.
    """
    bits, guessed = (lax.bitcast_convert_type(t, jnp.int32) for t in (scale, guess))
    sign, exponent, low = bits & -0x80000000, (bits >> 23) & 0xFF, bits & 0x7FFFFF
    base = (253 - exponent) << 23  # of the reciprocal, unless the scale is a power of two
    a, g = low | 0x800000, (guessed & 0x7FFFFFFF) - base + 0x800000
    rest = 2 * -(a * g)  # twice the remainder, for 2^48 is 0 in 32 bits
    step = sum((rest > n * a).astype(jnp.int32) - (rest < -n * a).astype(jnp.int32) for n in (1, 3, 5))
    found = jnp.where(low == 0, (254 - exponent) << 23, base + g + step - 0x800000)
    normal = (exponent >= 1) & (exponent <= 252)
    return jnp.where(normal, lax.bitcast_convert_type(found | sign, jnp.float32), guess)


def codes_by_xla(x: Array, scale: Array, transposed: bool = False) -> Array:
    x = x.astype(jnp.float32)
    v = x * reciprocal(scale)
    v = jnp.where(jnp.isfinite(x) & (v == v), v, jnp.nan)  # one NaN, whose sign is not set
    # Without the barrier XLA leaves out a conversion to FP8 and back, as more precise than what was asked for: seen on an H200
    codes = lax.optimization_barrier(lax.clamp(-LARGEST, v, LARGEST).astype(E4M3))
    if codes.ndim > 1:
        # Or XLA transposes, where a product wants codes by columns, what they are made from, once for each time that it is named
        codes = with_layout_constraint(codes, Layout(tuple(range(codes.ndim))))
    return codes.T if transposed else codes


@functools.cache
def launches_triton() -> bool:
    """Whether jax-triton is there and made for this Triton: each of its releases takes one, the lowest that it asks for."""
    if importlib.util.find_spec("jax_triton") is None:
        return False
    try:
        wanted = importlib.metadata.requires("jax-triton") or []
    except importlib.metadata.PackageNotFoundError:
        return False
    lowest = next((found[1] for line in wanted if (found := re.match(r"triton\s*>=\s*([\d.]+)", line))), None)
    return lowest is not None and age(lowest)[:2] == age(triton.__version__)[:2]


@functools.cache
def launched(transposed: bool) -> Callable[[Array, Array], Array]:
    """`codes_by_triton` for `jax.vmap` too, which jax-triton does not know: a batch of tensors with one scale is a tensor, and any
    other is left to XLA."""

    @jax.custom_batching.custom_vmap
    def codes(x: Array, scale: Array) -> Array:
        return codes_by_triton(x, scale, transposed)

    @codes.def_vmap
    def together(size: int, batched: list[bool], x: Array, scale: Array) -> tuple[Array, bool]:
        if not (batched[1] or transposed):
            return codes(x, scale), True
        axes = [0 if one else None for one in batched]
        return jax.vmap(functools.partial(codes_by_xla, transposed=transposed), axes)(x, scale), True

    return codes


def codes_by_triton(x: Array, scale: Array, transposed: bool = False) -> Array:
    """The same by our kernel, which jax-triton launches on XLA's stream."""
    import jax_triton

    shape = x.shape[::-1] if transposed else x.shape
    if not x.size:
        return jnp.zeros(shape, E4M3)
    columns = x.shape[-1] if x.ndim else 1
    rows = x.size // columns
    x = x.astype(jnp.float32) if x.dtype == jnp.float64 else x
    fast = "fast" if multiplies_fp8() else ""
    return jax_triton.triton_call(
        x, scale.reshape(1), rows, columns, kernel=given_codes.jit,
        out_shape=jax.ShapeDtypeStruct(shape, E4M3 if fast else jnp.uint8),
        grid=(-(-rows // TILE["ROWS"]) * -(-columns // TILE["COLS"]),), num_warps=4, TRANSPOSED=transposed,
        FORMAT=":".join(filter(None, ("e4m3", "static", "fp32", "te", fast))), **TILE,
    ).view(E4M3)  # fmt: skip


def codes_of(x: Array, scale: Array, transposed: bool = False) -> Array:
    by_xla = functools.partial(codes_by_xla, transposed=transposed)
    if not launches_triton():
        return by_xla(x, scale)
    return lax.platform_dependent(x, scale, cuda=launched(transposed), default=by_xla)


# ---- products --------------------------------------------------------------------------------------------------------


def multiplies_fp8() -> bool:
    """Whether the GPUs here multiply FP8. Where there are none, what is lowered for them is for ones that do."""
    try:
        gpus = jax.devices("cuda")
    except RuntimeError:
        return True
    return all(tuple(map(int, gpu.compute_capability.split("."))) >= MULTIPLIES for gpu in gpus)


def by_cublaslt(x: Array, w: Array, scale: Array, dtype: Any) -> Array:
    """Codes [M, K] and [N, K] in the form that XLA knows for an FP8 product of cuBLASLt with a scale."""
    rows, columns = x.shape[0], w.shape[0]
    x, w = among_zeros(x), among_zeros(w)
    itself = dtype == jnp.bfloat16 and rows * columns >= MANY
    stored = jnp.bfloat16 if itself else jnp.float32
    # As written, what is stored as bf16 is scaled by a bf16 number. XLA gives cuBLASLt the fp32 number from which that came, but of
    # a constant the bf16 one: the barrier hides that it is one
    scale = lax.optimization_barrier(scale).astype(stored)
    y = lax.dot_general(x, w, BY_ROWS, IN_FP32, preferred_element_type=stored) * scale
    y = lax.optimization_barrier(y) if itself else y  # or a factor of the caller's could be drawn into that number
    return y[:rows, :columns].astype(dtype)


def among_zeros(codes: Array) -> Array:
    """The same with zeros after each dimension, up to the next multiple."""
    return jnp.pad(codes, [(0, -size % MULTIPLE) for size in codes.shape])


def in_fp32(x: Array, w: Array, scale: Array, dtype: Any) -> Array:
    """The same of any device's arithmetic: sums and the scale in fp32, one rounding."""
    sums = lax.dot_general(x.astype(jnp.float32), w.astype(jnp.float32), BY_ROWS, lax.Precision.HIGHEST)
    return (sums * scale).astype(dtype)


@jax.custom_vjp
def product(x: Array, w: Array, scale_x: Array, scale_w: Array) -> Array:
    dtype = x.dtype if x.dtype != E4M3 else w.dtype if w.dtype != E4M3 else jnp.dtype(jnp.bfloat16)
    a = x if x.dtype == E4M3 else codes_of(x, scale_x)
    b = w.T if w.dtype == E4M3 else codes_of(w, scale_w, transposed=True)
    plain = functools.partial(in_fp32, dtype=dtype)
    known = multiplies_fp8() and a.size and b.size
    on_gpu = functools.partial(by_cublaslt, dtype=dtype) if known else plain
    return lax.platform_dependent(a, b, scale_x * scale_w, cuda=on_gpu, default=plain)


def product_forward(x: Array, w: Array, scale_x: Array, scale_w: Array) -> tuple[Array, tuple]:
    return product(x, w, scale_x, scale_w), (x, w, scale_x, scale_w)


def product_backward(saved: tuple, dy: Array) -> tuple[Array, ...]:
    x, w, scale_x, scale_w = saved
    dy = dy.astype(jnp.bfloat16)
    by_columns = (((0,), (0,)), ((), ()))
    dx = gradient(dy, in_bf16(w, scale_w), BY_ROWS, x)
    dw = gradient(in_bf16(x, scale_x), dy, by_columns, w)
    return dx, dw, jnp.zeros_like(scale_x), jnp.zeros_like(scale_w)


def in_bf16(value: Array, scale: Array) -> Array:
    wide = value.astype(jnp.float32) * scale if value.dtype == E4M3 else value
    return wide.astype(jnp.bfloat16)


def gradient(a: Array, b: Array, dims: Any, of: Array) -> Array:
    """A product in the dtype of the factor whose gradient it is; codes have none."""
    if of.dtype == E4M3:
        return jnp.zeros_like(of)
    wide = jnp.bfloat16 if of.dtype == jnp.bfloat16 else jnp.float32
    return lax.dot_general(a, b, dims, preferred_element_type=wide).astype(of.dtype)


product.defvjp(product_forward, product_backward)
