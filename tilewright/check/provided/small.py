"""The calls behind the rows of an inference step's small operations: what follows a product, copies, casts, softmax.

Truth is torch's own operator, or a formula written out, in float64.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

from ..agreement import BF16, FP16, agrees, normal

ROWS, WIDTH = 7, 203  # an odd number of elements
ACTS = {
    # Not torch's own, whose 1 + tanh leaves nothing of a large negative number, in float64 neither
    "gelu_tanh": lambda a: a * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (a + 0.044715 * a**3)),
    "silu": F.silu,
    "relu": F.relu,
}


def in_place(label: str, over: Tensor, exact: Tensor, x: Tensor, **operands: Any) -> None:
    """The result, stored over one of the operands."""
    y = tw.epilogue(x, **operands, out=over)
    assert y is over, f"{label}: another tensor came back"
    agrees(label, over, exact, "A")


def activation(device: str, act: str, dtype: torch.dtype = FP16, added: bool = False) -> None:
    """act(x), or act(x + b) of a b as large as x, over x."""
    x, b = normal(device, ROWS, WIDTH, dtype=dtype, scale=3.0), normal(device, ROWS, WIDTH, dtype=dtype, seed=1)
    if added:
        in_place("x", x, ACTS[act](x.double() + b.double()), x, add=b, act=act)
    else:
        in_place("x", x, ACTS[act](x.double()), x, act=act)


def residual(device: str, dtype: torch.dtype = BF16, gated: bool = False, biased: bool = False) -> None:
    """residual + x, x + bias, or x * gate, over the residual."""
    x, r, gate = (normal(device, ROWS, WIDTH, dtype=dtype, seed=seed) for seed in range(3))
    bias = normal(device, WIDTH, dtype=dtype, seed=3)
    wide, exact = x.double(), r.double()
    if gated:
        in_place("residual", r, exact + wide * gate.double(), x, gate=gate, residual=r)
    elif biased:
        in_place("residual", r, exact + (wide + bias.double()), x, bias=bias, residual=r)
    else:
        in_place("residual", r, exact + wide, x, residual=r)


def euler_step(device: str) -> None:
    """An fp32 state, moved by fp16 velocities behind a leading row; the step size is read on the device."""
    state, velocity = normal(device, 6, 11, dtype=torch.float32), normal(device, 7, 11, dtype=FP16, seed=1)
    for number in (0.1, -0.25):
        dt = torch.tensor([number], device=device)
        in_place(
            "state", state, state.double() + dt.double() * velocity[1:].double(), velocity[1:], gate=dt, residual=state
        )


def added_bias(device: str) -> None:
    x, b = normal(device, ROWS, WIDTH, dtype=FP16), normal(device, WIDTH, dtype=FP16, seed=1)
    in_place("x", x, x.double() + b.double(), x, bias=b)


def position_embedding(device: str) -> None:
    """A bias and the positions of a view, added to those of two views."""
    x, b, pos = (
        normal(device, 2 * 5, 24, dtype=FP16),
        normal(device, 24, dtype=FP16, seed=1),
        normal(device, 5, 24, dtype=FP16, seed=2),
    )
    exact = x.double().view(2, 5, 24) + (b.double() + pos.double())
    views = x.view(2, -1, 24)
    tw.epilogue(views, bias=b, add=pos, out=views)
    agrees("x", x, exact.view(10, 24), "A")


def patches(device: str) -> None:
    """Patches of 14 x 14 of two images [height, width, channels], each a row of (y, x, channel)."""
    image = normal(device, 2, 42, 28, 3, dtype=FP16)
    found = tw.epilogue(image.unflatten(2, (-1, 14)).unflatten(1, (-1, 14)).permute(0, 1, 3, 2, 4, 5))
    there = [
        image[v, 14 * i : 14 * i + 14, 14 * j : 14 * j + 14].reshape(-1)
        for v in range(2)
        for i in range(3)
        for j in range(2)
    ]
    agrees("rows", found.reshape(12, 588), torch.stack(there).double(), "G")


def cast(device: str) -> None:
    """Nearest, ties to even; what is too large becomes infinite."""
    x = normal(device, ROWS, WIDTH, dtype=torch.float32, scale=100.0)
    x[0, :4] = torch.tensor([65504.0, 65519.0, 65520.0, -1e30])
    agrees("y", tw.epilogue(x, out_dtype=FP16), x.cpu().to(FP16).double(), "G")


def copied(device: str) -> None:
    x, y = normal(device, ROWS, WIDTH), torch.full((ROWS, WIDTH), 7.0, dtype=BF16, device=device)
    tw.epilogue(x, out=y)
    agrees("y", y, x.double(), "G")


def columns(device: str) -> None:
    """A slice of columns, dense."""
    x, a, b = normal(device, ROWS, WIDTH, dtype=FP16), 11, 90
    y = tw.epilogue(x[:, a:b])
    assert y.is_contiguous()
    agrees("y", y, torch.tensor(x.cpu().tolist()).double()[:, a:b], "G")


def filled(device: str) -> None:
    y, minus_inf = normal(device, ROWS, WIDTH, dtype=FP16), torch.full((1, 1), -torch.inf, dtype=FP16, device=device)
    tw.epilogue(minus_inf.expand_as(y), out=y)
    assert bool((y == -torch.inf).all())


def repeated_heads(device: str) -> None:
    """Each head three times, one beside the other."""
    x, n = normal(device, 5, 2, 32), 3
    y = tw.epilogue(x.unsqueeze(2).expand(-1, -1, n, -1))
    agrees("y", y.flatten(1, 2), x.double().repeat_interleave(n, 1), "G")


def softmax(device: str) -> None:
    """Rows over 1024 columns long, in place; one that is masked from end to end gives 0."""
    x = normal(device, 4, 1201, dtype=FP16, scale=4.0)
    x[1, ::3], x[2] = -torch.inf, -torch.inf
    exact = torch.softmax(x.double(), -1).nan_to_num(0.0)
    assert tw.softmax(x, out=x) is x
    agrees("x", x, exact)
    assert bool((x[2] == 0).all())
