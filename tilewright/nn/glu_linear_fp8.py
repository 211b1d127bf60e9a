"""A linear layer in blockwise FP8 of a gated unit's value, of which the backward keeps gate and up alone:
y = h @ weight.T + bias, h = glu(x, up).

    y  = codes(h, 1x128) @ codes(weight, 128x128).T        dh = codes(dy, 1x128) @ codes(weight, 128x128)
    dW = codes(dy, 128x1).T @ codes(h, 128x1), along tokens;  dgate and dup of dh as in `glu`

h is never in memory: `glu` stores the codes of its fp32 value, those along tokens in the backward.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Literal

import torch
from torch import Tensor

from ..core.draw import Draw
from ..core.format import Quantized
from ..core.signature import above
from ..core.tensor import rows
from ..op import Bars, Cost, Gradient, Op, Out, Triton, single, upcast
from ..ops.activation.glu import glu
from ..ops.activation.glu_linear import check_layer, sharding
from ..ops.activation.glu_linear import inputs as unit_inputs
from .linear_fp8 import (
    CODES,
    WAYS,
    WEIGHTS,
    Emulated,
    check_codes,
    coded,
    data_gradient,
    known_weight,
    multiply,
    weight_gradient,
    weight_way,
)

OP = "glu_linear_fp8"


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    up: Tensor | None = None,
    weight_codes: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_codes_t: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
) -> Tensor:
    """`linear_fp8(glu(x, up), weight, bias)`, for whose backward x and up are kept, but nothing of the unit's value.

    The value is quantised as it is in fp32, not rounded to the dtype of `x` before. See `glu` for the options and `linear_fp8`
    for the weight's codes.
    """
    h = glu.reference(upcast(x), None if up is None else upcast(up), act=act, limit=limit, alpha=alpha)
    y = Emulated.apply(h, weight, known_weight(weight, weight_codes, weight_scale))
    if bias is not None:
        y = y + upcast(bias)
    return y.to(x.dtype)


def inputs(draw: Draw) -> dict:
    made = unit_inputs(draw)
    if draw.option("kept", False, True):
        q = WEIGHTS["both"].quantize(made["weight"])
        made |= {"weight_codes": q.data, "weight_scale": q.scale, "weight_codes_t": q.data_t}
    return made


def value(a: SimpleNamespace, ways: str) -> Quantized:
    """The gated unit's value, as the codes of a matrix."""
    given = {"act": a.act, "limit": a.limit, "alpha": a.alpha, "out_format": CODES[ways]}
    return glu.run(glu.signature.bind((rows(a.x), None if a.up is None else rows(a.up)), given))


def forward(*, needs: frozenset, **given) -> Tensor:
    a = SimpleNamespace(**given)
    h = value(a, "row")
    y = multiply(h.data, h.scale.t(), *weight_way(a, False), a.x.dtype, True, bias=a.bias)
    return y.reshape(*a.x.shape[:-1], a.weight.shape[0])


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    needs, flat = saved.needs, rows(dy)
    dx = dweight = dbias = dup = None
    ways = WAYS.get((bool(needs & {"x", "up"}), "weight" in needs))
    q = None if ways is None else coded(flat, ways)
    if needs & {"x", "up"}:
        unit = glu.signature.bind((saved.x, saved.up), {"act": saved.act, "limit": saved.limit, "alpha": saved.alpha})
        dx, dup, _ = glu.run_backward(unit, {}, [data_gradient(saved, q, saved.x.dtype)], needs & {"x", "up"})
    if "weight" in needs:
        h = value(saved, "col")
        dweight = weight_gradient(q, h.data_t, h.scale_t, saved.weight.dtype)
    if "bias" in needs:
        dbias = flat.sum(0, dtype=torch.float32).to(saved.bias.dtype)
    return dx, dweight, dbias, dup


def check(x, weight, bias, up, weight_codes, weight_scale, weight_codes_t, *, act, limit, alpha) -> None:
    check_layer(OP, x, weight, up, act, alpha)
    check_codes(OP, weight, weight_codes, weight_scale, weight_codes_t)


glu_linear_fp8 = Op(
    OP, reference, inputs, Triton(forward, backward, single), composite=True, planned=True, sibling="glu_linear",
    cost=Cost(flops=lambda x, weight, **_: 2 * math.prod(x.shape[:-1]) * weight.numel()),
    where={
        "x": "float[... width]", "weight": "float[columns hidden]", "bias": "float[columns]", "up": "x[... width]",
        "weight_codes": "codes[columns hidden]", "weight_scale": "float32[out_blocks in_blocks]",
        "weight_codes_t": "codes[hidden columns]", "limit": above(0.0),
    },
    results={"y": "x[... columns]"}, gradient=Gradient(of=("x", "weight", "bias", "up")), out=Out(contiguous=("y",)),
    check=check, sharding=sharding,
    # Where h lies between two codes to within fp32's own error, a kernel may take another than the truth does: y feels it too
    bars=Bars("F", gradient="F", steps=True, rounds=("y",)),
)  # fmt: skip
