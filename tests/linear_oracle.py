"""A linear layer in blockwise FP8 by its definition: blocks quantised one at a time, products in float64."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from tests import fp8_oracle


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def stands_for(x: Tensor, down: int, across: int) -> Tensor:
    """The numbers, in float64, that the e4m3 codes of x in blocks of `down` by `across` stand for."""
    wide, table = x.detach().float().numpy(), fp8_oracle.decode_table("e4m3")
    made = np.empty(wide.shape)
    for r in range(0, wide.shape[0], down):
        for c in range(0, wide.shape[1], across):
            block = slice(r, r + down), slice(c, c + across)
            codes, scale = fp8_oracle.quantize_block(wide[block], "e4m3", True, "te")
            made[block] = table[codes] * np.float64(scale)
    return torch.from_numpy(made)


def layer(x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor) -> dict[str, Tensor]:
    """y and all gradients, for x [tokens, in] and dy [tokens, out]."""
    w = stands_for(weight, 128, 128)
    return {
        "y": stands_for(x, 1, 128) @ w.t() + bias.detach().double(),
        "x": stands_for(dy, 1, 128) @ w,
        "weight": stands_for(dy, 128, 1).t() @ stands_for(x, 128, 1),
        "bias": dy.double().sum(0),
    }


def outcome(function, x: Tensor, weight: Tensor, bias: Tensor, dy: Tensor, **options) -> dict[str, Tensor]:
    """What a call gives, laid out as `layer` has it."""
    leaves = {n: t.detach().requires_grad_() for n, t in (("x", x), ("weight", weight), ("bias", bias))}
    y = function(*leaves.values(), **options)
    found = torch.autograd.grad(y, list(leaves.values()), dy.reshape(y.shape))
    return {"y": y.detach(), **dict(zip(leaves, found))}


def off(found: dict[str, Tensor], exact: dict[str, Tensor]) -> dict[str, float]:
    """Relative RMS errors."""
    flat = {n: t.double().reshape(exact[n].shape) for n, t in found.items()}
    return {n: float((t - exact[n]).norm() / exact[n].norm()) for n, t in flat.items()}
