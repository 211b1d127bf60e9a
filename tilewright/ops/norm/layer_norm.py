"""Layer norm over the last dimension, modulated if that is wanted: y = ((x - mean) * rstd * weight + bias) * (1 + scale) + shift,
rstd = 1 / sqrt(mean((x - mean)**2) + eps).

`add_layer_norm` first adds to a residual: h = residual + gate * x, rounded once and returned, and y is the norm of that h.
The kernels are those of `modulated_norm.py`, and the backward with its formulas that of `modulated_norm_backward.py`.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core.draw import Draw
from ...core.format import Format, store
from ...core.signature import at_least
from ...op import Gradient, Op, Out, Sharding, Triton, single, upcast
from .modulated_norm import Norm, normalised, resume
from .modulated_norm_backward import added_gradients, gradients


def reference(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    out_format: Format | None = None,
) -> Tensor:
    """Bring each row of `x` to mean 0 and variance 1, then `* weight + bias`, then `* (1 + scale) + shift`; all in fp32, rounded
    once. What is None is left out.

    `scale` and `shift` have the shape of `x` or broadcast to it over leading dimensions: numbers for each row, for each of a batch
    ([batch, 1, hidden]) or one vector. They are read as they lie, so that thirds of one tensor need not be copied. `out_format`
    gives a `Quantized` result.
    """
    return normalise(x, weight, bias, eps, scale, shift, out_format)


def normalise(x, weight, bias, eps, scale, shift, out_format) -> Tensor:
    wide = upcast(x)  # once: autograd would round a gradient for each use of x itself
    wide = wide - wide.mean(-1, keepdim=True)
    y = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * upcast(weight)
    y = y if bias is None else y + upcast(bias)
    y = y if scale is None else y * (1 + upcast(scale))
    y = y if shift is None else y + upcast(shift)
    return store(y, out_format, x.dtype)


def reference_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    out_format: Format | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(h), h) with h = residual + gate * x, the new residual; `gate` broadcasts as `scale` and `shift` do, and without
    one h = residual + x. h may be stored over `residual`: `out=(y, residual)`."""
    added = upcast(x) if gate is None else upcast(gate) * upcast(x)
    h = (upcast(residual) + added).to(x.dtype)
    return normalise(h, weight, bias, eps, scale, shift, out_format), h


def inputs(draw: Draw) -> dict[str, Any]:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    # Numbers for each row, for each of a batch of equal lengths, or for all rows
    over = draw.option("over", "rows", "batch", "all")
    batch = next(n for n in (5, 3, 2, 1) if tokens % n == 0)
    lead = (batch, tokens // batch) if over == "batch" else (tokens,)
    spans = {"rows": (tokens, hidden), "batch": (batch, 1, hidden), "all": (hidden,)}
    return {
        "x": draw.tensor(*lead, hidden, shift=0.5),
        "weight": draw.maybe("weight", lambda: draw.tensor("hidden", scale=0.5, shift=1.0)),
        "bias": draw.maybe("bias", lambda: draw.tensor("hidden", scale=0.5)),
        "eps": draw.option("eps", 1e-5, 1e-6),
        "scale": draw.maybe("scale", lambda: draw.tensor(*spans[over], scale=0.5)),
        "shift": draw.maybe("shift", lambda: draw.tensor(*spans[over], scale=0.5)),
    }


def inputs_add(draw: Draw) -> dict[str, Any]:
    made = inputs(draw)
    lead, over = made["x"].shape[:-1], draw.options["over"]
    span = {"rows": lead, "batch": (lead[0], 1), "all": ()}[over]
    made["residual"] = draw.tensor(*lead, "hidden")
    made["gate"] = draw.maybe("gate", lambda: draw.tensor(*span, "hidden", scale=0.5, shift=1.0))
    return made


# ---------------------------------------------------------------- host


def forward(x, weight, bias, eps, *, scale, shift, out_format) -> Tensor:
    return normalised(x, None, None, weight, bias, scale, shift, None, Norm(eps, True), out_format)


def forward_add(x, residual, weight, bias, eps, *, scale, shift, gate, out_format) -> tuple[Tensor, Tensor]:
    h = torch.empty_like(x, memory_format=torch.contiguous_format)
    return normalised(x, residual, gate, weight, bias, scale, shift, h, Norm(eps, True), out_format), h


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    needs = {"h" if n == "x" else n for n in saved.needs}
    operands = (saved.weight, saved.bias, saved.scale, saved.shift, None)
    made = gradients(saved.x, None, *operands, dy, None, Norm(saved.eps, True), needs)
    return made.h, made.weight, made.bias, made.scale, made.shift


def backward_add(saved: SimpleNamespace, dy: Tensor | None, dh: Tensor | None) -> tuple:
    made = added_gradients(saved, saved.bias, dy, dh, Norm(saved.eps, True))
    return made.x, made.h, made.weight, made.bias, made.scale, made.shift, made.gate


def read_backward(values: dict[str, Any]) -> tuple[str, ...]:
    """The arguments of whose the backward reads shape and dtype: what only enters sums."""
    return ("shift", *(("bias",) if values["scale"] is None else ()))


def read_backward_add(values: dict[str, Any]) -> tuple[str, ...]:
    return (*read_backward(values), *(("x",) if values["gate"] is None else ()))


WHERE = {
    "x": "float[... hidden]", "weight": "float[hidden]", "bias": "float[hidden]", "scale": "float[...? hidden]",
    "shift": "float[...? hidden]", "eps": at_least(0.0),
}  # fmt: skip

add_layer_norm = Op(
    "add_layer_norm", reference_add, inputs_add, Triton(forward_add, backward_add, single),
    where={**WHERE, "residual": "x[... hidden]", "gate": "float[...? hidden]"},
    results=dict.fromkeys(("y", "h"), "x[... hidden]"), out=Out(contiguous=("y", "h"), lies_on={"h": ("residual",)}),
    sharding=Sharding(),
    gradient=Gradient(
        of=("x", "residual", "weight", "bias", "scale", "shift", "gate"), through=("y", "h"),
        saves=("x", "weight", "bias", "scale", "gate", "h"), shape_only=read_backward_add, resume=resume,
    ),
)  # fmt: skip
layer_norm = Op(
    "layer_norm", reference, inputs, Triton(forward, backward, single), where=WHERE, results={"out": "x[... hidden]"},
    out=Out(contiguous=("out",)), sharding=Sharding(),
    gradient=Gradient(of=("x", "weight", "bias", "scale", "shift"), shape_only=read_backward),
)  # fmt: skip
