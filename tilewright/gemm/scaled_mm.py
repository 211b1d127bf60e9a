"""Products of scaled codes: y = act((code_a * scale_a) @ (code_b * scale_b) + bias + beta * c), in every format.

Sums are fp32, or int32 of integer codes, which are exact. Where scales change along the inner dimension, the sum of each block,
times both scales, is added up in fp32; where they do not, they multiply the sum once. `operands.py` has the formats.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.draw import Draw
from ..core.format import Format, Quantized, store
from ..core.target import Target
from ..core.tensor import cdiv, name_of
from ..op import Bars, Cost, Op, Out, Triton
from ..runtime.front import fronted
from . import few, library, portable
from .hopper import few as hopper_few
from .hopper import few_int4 as hopper_few_int4
from .hopper import plain as hopper_plain
from .hopper import scaled_mm as hopper
from .hopper import wgrad as hopper_wgrad
from .operands import BLOCKS, DTYPES, FLOATS, SCALES, OutDtype, Recipe, inner_of, kind_of, operand, scale_shape, values

LARGE = 2**18  # elements of `b`
Act = Literal["silu", "gelu_tanh", "gelu_erf", "relu"]
# "auto" is the faster of those that take the arguments, "triton" the first that is no library's; others name one of `product`'s
Backend = Literal[
    "auto", "triton", "cublaslt", "hopper_few_int4", "hopper_few", "few", "hopper", "hopper_plain", "hopper_wgrad", "portable"
]  # fmt: skip
# The gelus as torch has them, but without 1 + tanh and 1 + erf, which leave nothing of a small result.
ACTS = {
    "silu": torch.nn.functional.silu,
    "gelu_tanh": lambda y: y * torch.sigmoid(1.5957691216057308 * (y + 0.044715 * y**3)),
    "gelu_erf": lambda y: y * torch.erfc(y * -0.7071067811865476) * 0.5,
    "relu": torch.relu,
}


def reference(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    recipe_a: Recipe | None = None,
    recipe_b: Recipe | None = None,
    *,
    shared_a: Tensor | None = None,
    shared_b: Tensor | None = None,
    zero_b: Tensor | None = None,
    bias: Tensor | None = None,
    act: Act | None = None,
    c: Tensor | None = None,
    beta: float = 0.0,
    out_dtype: OutDtype = "bfloat16",
    accumulate: Literal["full", "fast"] = "full",
    backend: Backend = "auto",
    out_format: Format | None = None,
) -> Tensor:
    """`a` [M, K] times `b` [K, N], either as codes with scales, laid out as `gemm/operands.py` says, rounded once to `out_dtype` or
    into `out_format`. `scale_b` and `zero_b` are those of `b`'s transpose.

    `accumulate="fast"` leaves sums of FP8 codes in the tensor cores, which keep about 14 bits of each addition on Hopper. `out` may
    be `c`. `backend` is as in `scaled_mm`, which is easier to call: it takes `Quantized` operands, and scales as torch has them.
    """
    wide_a, wide_b = values(a, scale_a, recipe_a, shared_a), values(b.t(), scale_b, recipe_b, shared_b, zero_b).t()
    exact = torch.float64 in (wide_a.dtype, wide_b.dtype)
    y = wide_a.double() @ wide_b.double() if exact else wide_a @ wide_b
    if bias is not None:
        y = y + bias.to(y.dtype)
    if c is not None and beta != 0.0:
        y = y + beta * c.to(y.dtype)
    if act is not None:
        y = ACTS[act](y)
    # No operand is fp32 or float64 but where the reference is its own oracle, which wants the sum as it is
    lifted = any(t.dtype in (torch.float32, torch.float64) for t in (a, b))
    lifted = lifted or any(t is not None and t.dtype == torch.float64 for t in (scale_a, scale_b, bias, c))
    return y if lifted and out_format is None else store(y, out_format, DTYPES[out_dtype])


# Codes of a and b, and their recipes: what is there to try and what a library of products is asked for
PAIRS: dict[str, tuple[str, str, str | None, str | None]] = {
    "fp8_block": ("e4m3", "e4m3", "BlockWise1x128", "BlockWise128x128"),
    "fp8_block_left": ("e4m3", "e4m3", "BlockWise128x128", "BlockWise1x128"),
    "fp8_block_both": ("e4m3", "e4m3", "BlockWise1x128", "BlockWise1x128"),
    "fp8_row": ("e4m3", "e4m3", "RowWise", "RowWise"),
    "fp8_tensor": ("e5m2", "e4m3", "TensorWise", "TensorWise"),
    "int8_row": ("int8", "int8", "RowWise", "RowWise"),
    "int8_block": ("int8", "int8", "BlockWise1x128", "BlockWise128x128"),
    "int4_row": ("int4", "int4", "RowWise", "RowWise"),
    "int4_weight": ("float", "int4", None, "BlockWise1x128"),
    "mxfp8": ("e4m3", "e4m3", "BlockWise1x32", "BlockWise1x32"),
    "mxfp4": ("e2m1", "e2m1", "BlockWise1x32", "BlockWise1x32"),
    "nvfp4": ("e2m1", "e2m1", "BlockWise1x16", "BlockWise1x16"),
}


def inputs(draw: Draw) -> dict:
    rows, inner, columns = draw.dim("tokens"), draw.dim("hidden"), draw.dim("columns", (64, 33, 130))
    pair = draw.option("pair", *PAIRS)
    kind_a, kind_b, recipe_a, recipe_b = PAIRS[pair]
    if "int4" in (kind_a, kind_b) or "e2m1" in (kind_a, kind_b):
        inner = max(2, inner // 2 * 2)
    a, scale_a = draw_operand(draw, kind_a, recipe_a, rows, inner)
    b, scale_b = draw_operand(draw, kind_b, recipe_b, columns, inner)
    shared = (
        [draw.uniform(1, low=0.5, high=2.0, dtype=torch.float32) for _ in range(2)] if pair == "nvfp4" else [None, None]
    )
    zero = None
    if pair == "int4_weight" and draw.option("zero_b", True, False):
        zero = draw.integers(*scale_b.t().shape, low=-8, high=8).to(torch.float32).t()
    out_dtype = draw.option("out_dtype", *DTYPES)
    return {
        "a": a, "b": b.t(), "scale_a": scale_a, "scale_b": scale_b, "recipe_a": recipe_a, "recipe_b": recipe_b,
        "shared_a": shared[0], "shared_b": shared[1], "zero_b": zero,
        "bias": draw.maybe("bias", lambda: draw.tensor(columns)),
        "act": draw.option("act", None, "silu"),
        "c": draw.maybe("c", lambda: draw.tensor(rows, columns, dtype=DTYPES[out_dtype])),
        "beta": draw.option("beta", 0.0, 0.5),
        "out_dtype": out_dtype,
    }  # fmt: skip


def draw_operand(draw: Draw, kind: str, recipe: str | None, rows: int, inner: int) -> tuple[Tensor, Tensor | None]:
    """Codes [rows, inner] of a kind, drawn from all of its range, and their scales."""
    if kind == "float":
        floats = draw.dtype if draw.dtype in FLOATS else torch.bfloat16
        return draw.tensor(rows, inner, dtype=floats), None
    if kind in ("int4", "e2m1"):
        codes = draw.integers(rows, cdiv(inner, 2), high=256, dtype=torch.uint8)
    elif kind == "int8":
        codes = draw.integers(rows, inner, low=-127, high=128, dtype=torch.int8)
    else:
        codes = draw.tensor(
            rows, inner, dtype=getattr(torch, {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[kind]), scale=20.0
        )
    shape = scale_shape(recipe, rows, inner)
    by_block = recipe == "BlockWise1x128"  # scales of a block side by side, as formats have them
    scale = draw.uniform(*(shape[::-1] if by_block else shape), low=0.01, high=0.1, dtype=torch.float32)
    scale = scale.t() if by_block else scale
    return codes, scale.to(SCALES.get(recipe, torch.float32))


def check(a, b, scale_a, scale_b, recipe_a, recipe_b, *, shared_a, shared_b, zero_b, c, out_format, **_) -> None:
    """Raise where operands, scales and recipes do not go together, which shapes and dtypes alone do not say."""
    sides = (("a", a, scale_a, recipe_a, shared_a), ("b", b.t(), scale_b, recipe_b, shared_b))
    for name, codes, scale, recipe, shared in sides:
        kind = kind_of(codes, recipe)
        if (scale is None) != (recipe is None) or (kind != "float" and recipe is None):
            raise ValueError(
                f"scaled_mm: {name} as codes needs scale_{name} and recipe_{name}, as plain numbers neither"
            )
        if recipe is None:
            continue
        if kind == "float":
            raise TypeError(f"scaled_mm: {name} must be codes where recipe_{name} is given, got {codes.dtype}")
        wanted, dtype = scale_shape(recipe, codes.shape[0], inner_of(codes)), SCALES.get(recipe, torch.float32)
        if scale.shape != wanted or scale.dtype != dtype:
            raise ValueError(
                f"scaled_mm: scale_{name} must be {dtype} of shape {list(wanted)} for {recipe},"
                f" got {scale.dtype} of {list(scale.shape)}"
            )
        if shared is not None and recipe != "BlockWise1x16":
            raise ValueError(f"scaled_mm: shared_{name} belongs to BlockWise1x16, not to {recipe}")
    if inner_of(a) != inner_of(b.t()):
        raise ValueError(f"scaled_mm: a has {inner_of(a)} columns, b {inner_of(b.t())} rows: they must agree")
    integers = [kind_of(a, recipe_a) in ("int8", "int4"), kind_of(b.t(), recipe_b) in ("int8", "int4")]
    if integers[0] and not integers[1]:
        raise TypeError(f"scaled_mm: b must be integer codes as a is, got {b.dtype}")
    if kind_of(a, recipe_a) == "float" == kind_of(b.t(), recipe_b):
        raise TypeError("scaled_mm: neither a nor b has codes: use matmul")
    if zero_b is not None and (
        recipe_b not in BLOCKS or zero_b.shape != scale_b.shape or kind_of(b.t(), recipe_b) != "int4"
    ):
        raise ValueError("scaled_mm: zero_b is one number for each scale of int4 codes")
    if c is not None and c.dtype not in DTYPES.values():
        raise TypeError(f"scaled_mm: c must be one of {', '.join(DTYPES)}, got {str(c.dtype).removeprefix('torch.')}")


def flops(a, b, **_) -> int:
    return 2 * a.shape[0] * inner_of(a) * b.shape[1]


def with_large_b(fits: Callable[[Target, SimpleNamespace], bool]) -> Callable[[Target, SimpleNamespace], bool]:
    """The predicate `fits`, narrowed to calls whose `b` is so large that all SMs are needed to read it.

    Kernels for few rows split the reading of `b` over the whole chip, which costs more than it saves where `b` is small.
    """
    return lambda target, a: a.b.numel() >= LARGE and fits(target, a)


product = Op(
    "scaled_mm", reference, inputs,
    Triton(library.forward, None, library.fits, "cublaslt", library=True, out=True),
    Triton(hopper_few_int4.forward, None, with_large_b(hopper_few_int4.fits), "hopper_few_int4", out=True),
    Triton(hopper_few.forward, None, with_large_b(hopper_few.fits), "hopper_few", out=True),
    Triton(few.forward, None, with_large_b(few.fits), "few", out=True),
    Triton(hopper.forward, None, hopper.fits, "hopper", out=True),
    Triton(hopper_plain.forward, None, hopper_plain.fits, "hopper_plain", out=True),
    Triton(hopper_wgrad.forward_dense, None, hopper_wgrad.fits_dense, "hopper_wgrad", out=True),
    Triton(portable.forward, None, portable.fits, "portable", out=True),
    asks="backend", where={
        "a": "operand[tokens inner_a]", "b": "operand[inner_b columns]", "scale_a": "scale[rows_a blocks_a]",
        "scale_b": "scale[rows_b blocks_b]", "shared_a": "float32[1]", "shared_b": "float32[1]",
        "zero_b": "float32[rows_b blocks_b]", "bias": "float[columns]", "c": "float[tokens columns]",
    },
    results={"out": lambda a: f"{a.out_dtype}[tokens columns]"},
    check=check, cost=Cost(flops=flops), out=Out(lies_on={"out": ("c",)}),
    bars=Bars("F", whole=True, coarse=lambda values: values["accumulate"] == "fast"),
)  # fmt: skip


@fronted(product)
def scaled_mm(
    a: Tensor | Quantized,
    b: Tensor | Quantized,
    scale_a: Tensor | list[Tensor] | None = None,
    scale_b: Tensor | list[Tensor] | None = None,
    *,
    recipe_a: Any = None,
    recipe_b: Any = None,
    bias: Tensor | None = None,
    act: Act | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    out_format: Format | None = None,
    accumulate: Literal["full", "fast"] = "full",
    c: Tensor | None = None,
    beta: float = 0.0,
    out: Tensor | Quantized | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """act(a @ b + bias + beta * c) of scaled codes, in fp32 and rounded once: to `out_dtype`, or into `out_format`.

    Operands are `Quantized`, or codes with scales whose layout `recipe_a` and `recipe_b` name: scales and names are those of
    `torch.nn.functional.scaled_mm`, lists of two for NVFP4. Bytes (uint8) are two int4 codes each, or e2m1 codes where a scale is
    for 16 or 32 of them. `b` is [K, N]: for a weight [N, K] that is `weight.t()`, also of a `Quantized`. bf16 or fp16 `a` may meet
    integer or FP8 `b`: the weight alone is quantised. Sizes are arbitrary; both storage orders of `b` work, K contiguous is faster.

    `backend="auto"` takes the faster of cuBLASLt and our kernels by recorded measurements (`tilewright explain scaled_mm` says
    which and why), "triton" a kernel of ours, any other name that implementation or raises; in a compiled function too. On a CPU
    "auto" is the reference, and a name needs the interpreter.
    """
    first, second = operand("scaled_mm", "a", a, scale_a, recipe_a), operand("scaled_mm", "b", b, scale_b, recipe_b)
    name = name_of(out_dtype)
    return product.function(
        first.codes, second.codes.t(), first.scale, second.scale, first.recipe, second.recipe, shared_a=first.shared,
        shared_b=second.shared, zero_b=second.zero, bias=bias, act=act, c=c, beta=beta, out_dtype=name,
        accumulate=accumulate, backend=backend, out_format=out_format, out=out,
    )  # fmt: skip
