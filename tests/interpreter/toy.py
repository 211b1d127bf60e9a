"""Toy ops around one kernel, for tests of what stands between a call and its launches."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator

import torch
import triton.language as tl
from torch import Tensor

import tilewright as tw
from tilewright.core.draw import Draw
from tilewright.core.tensor import cdiv
from tilewright.op import OPS, Op, Triton
from tilewright.runtime.kernel import kernel

_count = itertools.count()


@kernel(grid=lambda a: (cdiv(a.M, 8),), tokens=("M",))
def affine(
    X, Z, Y, M, N, stride_xm, stride_xn, stride_zm, stride_zn, stride_ym, stride_yn, factor, BLOCK: tl.constexpr
):
    """Y = factor * X + Z, and onto what Y holds if factor is negative."""
    row = tl.program_id(0).to(tl.int64) * 8 + tl.arange(0, 8)[:, None]
    col = tl.arange(0, BLOCK)[None, :].to(tl.int64)
    inside = (row < M) & (col < N)
    y = factor * tl.load(X + row * stride_xm + col * stride_xn, inside, 0.0)
    if Z is not None:
        y += tl.load(Z + row * stride_zm + col * stride_zn, inside, 0.0)
    if factor < 0:
        y += tl.load(Y + row * stride_ym + col * stride_yn, inside, 0.0)
    tl.store(Y + row * stride_ym + col * stride_yn, y, inside)


def launch(x: Tensor, z: Tensor | None, y: Tensor, factor: float) -> None:
    z_stride = (0, 0) if z is None else z.stride()
    affine(x, z, y, *x.shape, *x.stride(), *z_stride, *y.stride(), factor, BLOCK=64)


def reference(x: Tensor, z: Tensor | None = None, factor: float = 2.0) -> Tensor:
    """factor * x + z."""
    return factor * x + (0 if z is None else z)


def inputs(draw: Draw) -> dict:
    return dict(x=draw.tensor("tokens", "hidden"))


class Counted:
    """Host code, and how often it ran."""

    def __init__(self, forward: Callable) -> None:
        self.forward, self.runs = forward, 0

    def __call__(self, **values):
        self.runs += 1
        return self.forward(**values)


def plain(x, z, factor):
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    launch(x, z, y, factor)
    return y


@contextlib.contextmanager
def toys() -> Iterator[Callable[..., tuple[Op, Counted]]]:
    """A function that declares a toy op around a forward; it gives the op and its counted host code."""
    made: list[str] = []

    def declare(forward: Callable = plain, backward: Callable | None = None, **settings) -> tuple[Op, Counted]:
        name = f"plan_toy{next(_count)}"
        counted = Counted(forward)
        where = {"x": "float32[m n]", "z": "float32[m n]"}
        made.append(name)
        said = {"results": {"out": "float32[m n]"}, **settings}
        return Op(name, reference, inputs, Triton(counted, backward), where=where, **said), counted

    with tw.force("triton"):
        yield declare
    for name in made:
        del OPS[name]


def pair(rows: int = 5, columns: int = 7, seed: int = 0) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=source), torch.randn(rows, columns, generator=source)
