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
from ..core.memory import overlapping, self_overlapping
from ..core.tensor import cdiv, name_of, rows
from ..formats.fp8 import fp8
from ..gemm.operands import values
from ..gemm.scaled_mm import product
from ..op import Bars, Cost, Gradient, Op, Out, Sharding, Triton, force, single, upcast
from ..ops.quantise.quantize import quantize
from ..runtime import register
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
    if not isinstance(main_grad, Tensor):
        raise TypeError(f"{OP}_main_grad: main_grad must be a Tensor, got {type(main_grad).__name__}")
    if main_grad.requires_grad:
        raise ValueError(f"{OP}_main_grad: main_grad requires a gradient: pass main_grad.detach()")
    return torch.ops.tilewright.linear_fp8_main_grad(
        x, weight, main_grad, bias, weight_codes, weight_scale, weight_codes_t
    )


NAMES = ("x", "weight", "bias", "weight_codes", "weight_scale", "weight_codes_t")


def arguments(x: Tensor, weight: Tensor, main_grad: Tensor, *rest: Tensor | None) -> dict[str, Any]:
    """The layer's arguments by name, after they and `main_grad` were checked but for what depends on addresses."""
    given = dict(zip(NAMES, (x, weight, *rest)), keep="input")
    linear_fp8.signature.validate(given)
    if main_grad.dtype != torch.float32:
        raise TypeError(f"{OP}_main_grad: main_grad must be float32, got {name_of(main_grad.dtype)}")
    if main_grad.shape != weight.shape or main_grad.device != weight.device:
        raise ValueError(
            f"{OP}_main_grad: main_grad is {list(main_grad.shape)} on {main_grad.device}, but weight is"
            f" {list(weight.shape)} on {weight.device}"
        )
    return given


def layer(x: Tensor, weight: Tensor, main_grad: Tensor, *rest: Tensor | None) -> Tensor:
    given = arguments(x, weight, main_grad, *rest)
    if self_overlapping(main_grad) or overlapping(main_grad, weight):
        raise ValueError(f"{OP}_main_grad: main_grad shares memory within itself or with weight")
    return linear_fp8.run(given)[0]


def layer_fake(x: Tensor, weight: Tensor, main_grad: Tensor, *rest: Tensor | None) -> Tensor:
    arguments(x, weight, main_grad, *rest)
    return x.new_empty((*x.shape[:-1], weight.shape[0]))


def layer_backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    main_grad: Tensor,
    weight_codes,
    weight_scale,
    weight_codes_t,
    data: bool,
    add: bool,
) -> Tensor:
    """Returns dy @ weight if `data`, and adds dy.T @ x to `main_grad` if `add`."""
    if (
        dy.shape != (*x.shape[:-1], weight.shape[0])
        or x.shape[-1] != weight.shape[1]
        or main_grad.shape != weight.shape
    ):
        shapes = ", ".join(f"{list(t.shape)}" for t in (dy, x, weight, main_grad))
        raise ValueError(f"{OP}_main_grad: dy, x, weight and main_grad do not belong together: {shapes}")
    a = SimpleNamespace(
        x=x, weight=weight, weight_codes=weight_codes, weight_scale=weight_scale, weight_codes_t=weight_codes_t
    )
    flat, dx = rows(dy), x.new_empty(0)
    with torch.no_grad():
        if linear_fp8.implementation(vars(a)) is None:
            if data:
                known = known_weight(weight, weight_codes, weight_scale)
                dx = times(through_codes(flat, CODES["row"]), known).to(x.dtype).reshape(x.shape)
            if add:
                main_grad.add_(times(through_codes(flat, CODES["col"]).t(), through_codes(rows(x), CODES["col"])))
            return dx
        q = coded(flat, WAYS[data, add])
        if data:
            dx = data_gradient(a, q, x.dtype).reshape(x.shape)
        if add:
            p = coded(rows(x), "col")
            weight_gradient(q, p.data_t, p.scale_t, torch.float32, c=main_grad, beta=1.0, out=main_grad)
        return dx


def layer_backward_fake(dy: Tensor, x: Tensor, *rest: Any) -> Tensor:
    return x.new_empty(x.shape if rest[-2] else 0)


def keep_for_backward(ctx: Any, inputs: tuple, output: Tensor) -> None:
    x, weight, main_grad, bias, *codes = inputs
    ctx.save_for_backward(x, weight, *codes)
    ctx.main_grad, ctx.weight = main_grad, weight  # not a saved tensor: other backwards write to it in between
    ctx.bias_dtype = None if bias is None else bias.dtype
    ctx.forced = forced.get()  # autograd may run the backward in a thread of its own


def accumulating_backward(ctx: Any, dy: Tensor) -> tuple:
    from ..ops.embedding.embedding import placeholder

    x, weight, *codes = ctx.saved_tensors
    data, add, _, bias, *_ = ctx.needs_input_grad
    dx = dweight = dbias = None
    if data or add:
        with force(ctx.forced):
            made = torch.ops.tilewright.linear_fp8_main_grad_backward(dy, x, weight, ctx.main_grad, *codes, data, add)
        dx = made if data else None
    if add:
        dweight = placeholder(ctx.weight)
    if bias:
        dbias = rows(dy).sum(0, dtype=torch.float32).to(ctx.bias_dtype)
    return dx, dweight, None, dbias, None, None, None


def register_functions() -> None:
    """Register the layer's functions as ops, so that torch.compile and dispatch modes see what is written, and when."""
    codes = "Tensor? weight_codes, Tensor? weight_scale, Tensor? weight_codes_t"  # no defaults: tracing would drop them
    one = f"linear_fp8_main_grad(Tensor x, Tensor weight, Tensor main_grad, Tensor? bias, {codes}) -> Tensor"
    tensors = f"Tensor dy, Tensor x, Tensor weight, Tensor(a!) main_grad, {codes}"
    back = f"linear_fp8_main_grad_backward({tensors}, bool data, bool add) -> Tensor"
    made = (one, layer, layer_fake), (back, layer_backward, layer_backward_fake)
    for schema, implementation, fake in made:
        name = schema.partition("(")[0]
        register.LIBRARY.define(schema)
        for device in register.DEVICES:
            register.LIBRARY.impl(name, implementation, device)
        torch.library.register_fake(f"tilewright::{name}", fake, lib=register.LIBRARY)
    torch.library.register_autograd(
        "tilewright::linear_fp8_main_grad", accumulating_backward, setup_context=keep_for_backward, lib=register.LIBRARY
    )


register_functions()
