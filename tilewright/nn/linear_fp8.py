"""A linear layer in blockwise FP8: y = x @ weight.T + bias.

    y  = codes(x, 1x128) @ codes(weight, 128x128).T        dx = codes(dy, 1x128) @ codes(weight, 128x128)
    dW = codes(dy, 128x1).T @ codes(x, 128x1), along tokens

Factors are e4m3 codes, each rounded once; sums are fp32, rounded once to the dtype of x, or of the weight. A weight and its
transpose have the same codes, since its blocks are square.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.draw import Draw
from ..core.format import Format, Quantized
from ..core.tensor import cdiv, name_of, rows
from ..formats.fp8 import fp8
from ..gemm.operands import values
from ..gemm.scaled_mm import product
from ..op import Bars, Cost, Gradient, Op, Out, Sharding, Triton, single, upcast
from ..ops.quantise.quantize import quantize
from ..runtime.accumulate import Accumulating
from ..runtime.choose import forced

BLOCK = 128
CODES = {ways: fp8("1x128", ways=ways) for ways in ("row", "col", "both")}
WEIGHTS = {ways: fp8("128x128", ways=ways) for ways in ("row", "col", "both")}
ROWS, SQUARES = "BlockWise1x128", "BlockWise128x128"
# Of dy, as its codes are for the gradients of the input and of the weight
WAYS = {(True, True): "both", (True, False): "row", (False, True): "col"}
OP = "linear_fp8"


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_codes: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_codes_t: Tensor | None = None,
    *,
    keep: Literal["codes", "input"] = "codes",
) -> tuple[Tensor, Tensor, Tensor]:
    """`x @ weight.T + bias` for `x` [..., in] and `weight` [out, in], as `torch.nn.functional.linear` has them; all products,
    those of the backward too, are of e4m3 codes.

    The weight is quantised in each call, or given as codes too: `data`, `scale` and `data_t` of
    `quantize(weight, fp8("128x128", ways="both"))`. `keep` is what the backward finds of `x`: its column-wise "codes", or the
    "input" itself, which it then quantises. The gradients are the same, bit for bit.
    """
    y = Emulated.apply(x, weight, known_weight(weight, weight_codes, weight_scale))
    if bias is not None:
        y = y + upcast(bias)
    return y.to(x.dtype), *zeros_for_codes(x, keep)


def through_codes(x: Tensor, format: Format) -> Tensor:
    """The matrix that the codes of x stand for, which is what a product multiplies; in float64 if that is its dtype."""
    return format.quantize(x.detach(), torch.float32).dequantize().to(upcast(x).dtype)


def known_weight(weight: Tensor, codes: Tensor | None, scale: Tensor | None) -> Tensor:
    """The weight that products multiply: what its codes stand for."""
    return through_codes(weight, WEIGHTS["row"]) if codes is None else values(codes, scale, SQUARES)


def times(a: Tensor, b: Tensor) -> Tensor:
    """a @ b in the wider of their dtypes."""
    dtype = torch.promote_types(a.dtype, b.dtype)
    return a.to(dtype) @ b.to(dtype)


class Emulated(torch.autograd.Function):
    """The layer without its bias, as the reference computes it: products multiply what the codes stand for."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, known: Tensor) -> Tensor:
        ctx.save_for_backward(x, known)
        ctx.dtype = weight.dtype
        return times(through_codes(rows(x), CODES["row"]), known.t()).reshape(*x.shape[:-1], known.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, known = ctx.saved_tensors
        flat = rows(dy)
        dx = times(through_codes(flat, CODES["row"]), known)
        dweight = times(through_codes(flat, CODES["col"]).t(), through_codes(rows(x), CODES["col"]))
        return dx.to(x.dtype).reshape(x.shape), dweight.to(ctx.dtype), None


def zeros_for_codes(x: Tensor, keep: str) -> tuple[Tensor, Tensor]:
    """Zeros with the shapes and dtypes of the column-wise codes of x, as bytes, and of their scales; empty where the input is
    kept instead."""
    size = x.shape[-1] if keep == "codes" else 0
    count = x.numel() // x.shape[-1] if size else 0
    codes = torch.zeros(size, count, dtype=torch.uint8, device=x.device)  # torch's own checks of ops sum all results
    return codes, torch.zeros((count + BLOCK - 1) // BLOCK, size, dtype=torch.float32, device=x.device)


def inputs(draw: Draw) -> dict:
    out = draw.dim("columns", (64, 33, 130))
    made = {
        "x": draw.tensor("tokens", "hidden"),
        "weight": draw.tensor(out, "hidden", scale=0.1),
        "bias": draw.maybe("bias", lambda: draw.tensor(out)),
        "keep": draw.option("keep", "codes", "input"),
    }
    if draw.option("kept", False, True):
        q = WEIGHTS["both"].quantize(made["weight"])
        made |= {"weight_codes": q.data, "weight_scale": q.scale, "weight_codes_t": q.data_t}
    return made


# ---- the three products ----------------------------------------------------------------------------------------------


def multiply(
    a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype, squares: bool, **more: Any
) -> Tensor:
    """a [M, K] times b [N, K] transposed; scales are laid out as `scaled_mm` has them."""
    recipe = SQUARES if squares else ROWS
    given = {"a": a, "b": b.t(), "scale_a": scale_a, "scale_b": scale_b, "recipe_a": ROWS, "recipe_b": recipe}
    return product.run(product.signature.bind((), {**given, "out_dtype": name_of(dtype), **more}))


def coded(x: Tensor, ways: str) -> Quantized:
    return quantize.run({"x": x, "out_format": CODES[ways], "offsets": None})


def weight_way(a: SimpleNamespace, back: bool) -> tuple[Tensor, Tensor]:
    """(codes [columns of the result, inner], their scales) of the weight or, with `back`, of its transpose."""
    if a.weight_codes is not None:
        return (a.weight_codes_t, a.weight_scale.t()) if back else (a.weight_codes, a.weight_scale)
    q = quantize.run({"x": a.weight, "out_format": WEIGHTS["col" if back else "row"], "offsets": None})
    return (q.data_t, q.scale_t) if back else (q.data, q.scale)


def data_gradient(a: SimpleNamespace, dy: Quantized, dtype: torch.dtype) -> Tensor:
    return multiply(dy.data, dy.scale.t(), *weight_way(a, True), dtype, True)


def weight_gradient(dy: Quantized, codes: Tensor, scale: Tensor, dtype: torch.dtype, **more: Any) -> Tensor:
    return multiply(dy.data_t, dy.scale_t.t(), codes, scale.t(), dtype, False, **more)


# ---- forward and backward --------------------------------------------------------------------------------------------


def forward(
    x, weight, bias, weight_codes, weight_scale, weight_codes_t, *, keep, needs: frozenset
) -> tuple[Tensor, ...]:
    a = SimpleNamespace(
        weight=weight, weight_codes=weight_codes, weight_scale=weight_scale, weight_codes_t=weight_codes_t
    )
    wanted = keep == "codes" and (not needs or "weight" in needs)  # a frozen weight has no gradient to keep codes for
    q = coded(rows(x), "both" if wanted else "row")
    y = multiply(q.data, q.scale.t(), *weight_way(a, False), x.dtype, True, bias=bias)
    kept = (q.data_t.view(torch.uint8), q.scale_t.contiguous()) if wanted else zeros_for_codes(x, "input")
    return y.reshape(*x.shape[:-1], weight.shape[0]), *kept


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    needs, flat = saved.needs, rows(dy)
    dx = dweight = dbias = None
    ways = WAYS.get(("x" in needs, "weight" in needs))
    q = None if ways is None else coded(flat, ways)
    if "x" in needs:
        dx = data_gradient(saved, q, saved.x.dtype).reshape(saved.x.shape)
    if "weight" in needs:
        codes, scale = saved.codes.view(torch.float8_e4m3fn), saved.codes_scale
        if not codes.numel():
            made = coded(rows(saved.x), "col")
            codes, scale = made.data_t, made.scale_t
        dweight = weight_gradient(q, codes, scale, saved.weight.dtype)
    if "bias" in needs:
        dbias = flat.sum(0, dtype=torch.float32).to(saved.bias.dtype)
    return dx, dweight, dbias


def check(x, weight, bias, weight_codes, weight_scale, weight_codes_t, *, keep) -> None:
    check_codes(OP, weight, weight_codes, weight_scale, weight_codes_t)


def check_codes(op: str, weight: Tensor, codes: Tensor | None, scale: Tensor | None, codes_t: Tensor | None) -> None:
    """Raise unless `op` was given all the codes of a weight, or none of them."""
    there = [t is not None for t in (codes, scale, codes_t)]
    if any(there) and not all(there):
        raise ValueError(f"{op}: weight_codes, weight_scale and weight_codes_t are given together")
    if all(there):
        least = tuple(cdiv(size, BLOCK) for size in weight.shape)
        if tuple(scale.shape) != least:
            raise ValueError(f"{op}: weight_scale must be {list(least)}, got {list(scale.shape)}")


def shape_only(given: Mapping[str, Any]) -> tuple[str, ...]:
    """The arguments that the backward reads no numbers of: x where kernels go on from its codes. The reference needs it."""
    kernels = given["x"].is_cuda and forced.get() != "reference"
    return ("x",) if given["keep"] == "codes" and kernels else ()


def flops(x, weight, **_) -> int:
    return 2 * x.numel() * weight.shape[0]


linear_fp8 = Op(
    OP, reference, inputs, Triton(forward, backward, single), cost=Cost(flops=flops), composite=True, planned=True,
    sibling="scaled_mm",
    where={
        "x": "float[... hidden]", "weight": "float[columns hidden]", "bias": "float[columns]",
        "weight_codes": "codes[columns hidden]", "weight_scale": "float32[out_blocks in_blocks]",
        "weight_codes_t": "codes[hidden columns]",
    },
    results={"y": "x[... columns]"}, hidden=("codes", "codes_scale"),
    gradient=Gradient(
        of=("x", "weight", "bias"), shape_only=shape_only,
        saves=("x", "weight", "bias", "weight_codes", "weight_scale", "weight_codes_t", "codes", "codes_scale"),
    ),
    out=Out(contiguous=("y",)), check=check, sharding=Sharding(("...", "columns", "hidden"), once=("bias",)),
    bars=Bars("F", gradient="F", steps=True),
)  # fmt: skip


# ---- a gradient that is added to a buffer ----------------------------------------------------------------------------


def linear_fp8_main_grad(
    x: Tensor,
    weight: Tensor,
    main_grad: Tensor,
    bias: Tensor | None = None,
    weight_codes: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_codes_t: Tensor | None = None,
) -> Tensor:
    """`linear_fp8` whose backward adds the gradient of `weight` to `main_grad`, in the product's own launch.

    `main_grad` is float32 of the shape of `weight`, which itself gets no gradient; see `embedding_main_grad` for what becomes
    of Megatron's attributes. `x` is kept and quantised again in the backward.
    """
    given = (x, weight, bias, weight_codes, weight_scale, weight_codes_t)
    return accumulating(main_grad, dict(zip(NAMES, given)))


NAMES = ("x", "weight", "bias", "weight_codes", "weight_scale", "weight_codes_t")


def reference_accumulate(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    main_grad: Tensor,
    weight_codes: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_codes_t: Tensor | None = None,
    *,
    data: bool = True,
    add: bool = True,
) -> tuple[Tensor, Tensor]:
    """The backward of `linear_fp8`: gives `dy @ weight`, or nothing without `data`, and adds `dy.T @ x` to `main_grad` if `add`."""
    flat, dx = rows(dy), x.new_empty((*x.shape[:-1], 0))
    if data:
        known = known_weight(weight, weight_codes, weight_scale)
        dx = times(through_codes(flat, CODES["row"]), known).to(x.dtype).reshape(x.shape)
    if add:
        made = times(through_codes(flat, CODES["col"]).t(), through_codes(rows(x), CODES["col"]))
        main_grad = (main_grad + made).to(main_grad.dtype)
    return dx, main_grad


def inputs_accumulate(draw: Draw) -> dict:
    drawn = inputs(draw)
    made = {n: drawn[n] for n in ("x", "weight", "weight_codes", "weight_scale", "weight_codes_t") if n in drawn}
    out = drawn["weight"].shape[0]
    return {
        "dy": draw.tensor("tokens", out),
        **made,
        "main_grad": draw.tensor(out, "hidden", dtype=torch.float32),
        "data": draw.option("data", True, False),
        "add": draw.option("add", True, False),
    }


def forward_accumulate(
    dy, x, weight, main_grad, weight_codes, weight_scale, weight_codes_t, *, data, add, needs: frozenset
) -> Tensor:
    a = SimpleNamespace(
        weight=weight, weight_codes=weight_codes, weight_scale=weight_scale, weight_codes_t=weight_codes_t
    )
    dx = torch.empty((*x.shape[:-1], 0), dtype=x.dtype, device=x.device)
    if not (data or add):
        return dx
    q = coded(rows(dy), WAYS[data, add])
    if data:
        dx = data_gradient(a, q, x.dtype).reshape(x.shape)
    if add:
        p = coded(rows(x), "col")
        weight_gradient(q, p.data_t, p.scale_t, torch.float32, c=main_grad, beta=1.0, out=main_grad)
    return dx


def check_accumulate(dy, x, weight, main_grad, weight_codes, weight_scale, weight_codes_t, *, data, add) -> None:
    check_codes("linear_fp8_accumulate", weight, weight_codes, weight_scale, weight_codes_t)


def flops_accumulate(dy, x, *, data, add, **_) -> int:
    return 2 * dy.numel() * x.shape[-1] * (data + add)


def add_gradient(saved: SimpleNamespace, dy: Tensor, main_grad: Tensor, needs: frozenset) -> dict:
    data, add, found = "x" in needs, "weight" in needs, {}
    if data or add:
        codes = saved.weight_codes, saved.weight_scale, saved.weight_codes_t
        dx = linear_fp8_accumulate(dy, saved.x, saved.weight, main_grad, *codes, data=data, add=add)
        found["x"] = dx if data else None
    if "bias" in needs:
        found["bias"] = rows(dy).sum(0, dtype=torch.float32).to(saved.dtypes["bias"])
    return found


linear_fp8_accumulate = Op(
    "linear_fp8_accumulate", reference_accumulate, inputs_accumulate, Triton(forward_accumulate, None, single),
    cost=Cost(flops=flops_accumulate), composite=True, sibling=OP, internal=True,
    where={
        "dy": "float[... columns]", "x": "float[... hidden]", "weight": "float[columns hidden]",
        "main_grad": "float32[columns hidden]", "weight_codes": "codes[columns hidden]",
        "weight_scale": "float32[out_blocks in_blocks]", "weight_codes_t": "codes[hidden columns]",
    },
    results={"dx": lambda a: "x[... hidden]" if a.data else "x[... 0]"}, writes=("main_grad",), check=check_accumulate,
    out=Out(contiguous=("dx",)), bars=Bars("F", steps=True),
)  # fmt: skip
accumulating = Accumulating(
    linear_fp8, "weight", add_gradient, ("x", "weight", *NAMES[3:]), kinds=("float32",), keep="input"
)
