"""Memory with known contents around and inside every buffer, so that a stray read or write shows.

`guarded_allocations(fill)` makes every `torch.empty` of the library lie inside a larger buffer of `fill` bytes; `Fenced`
does it for an argument. The interpreter itself finds an access outside all arguments; these find one that lands in a
neighbour, and work on a GPU as well. `reserve` gives memory of which no more is taken than is written.
"""

from __future__ import annotations

import contextlib
import mmap
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor

PAD = 256  # bytes either side: keeps the alignment that an allocation has
FILLS = (0xFF, 0x00, 0xA5)  # the first is NaN in every float format
NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)
_kept: list[Any] = []


def reserve(count: int, dtype: torch.dtype, device: str) -> Tensor:
    """Memory for `count` elements that is committed page by page."""
    if device != "cpu":
        torch.cuda.empty_cache()  # the last such tensor is kept there, and this one may be of another size
        return torch.empty(count, dtype=dtype, device=device)
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NORESERVE
    memory = mmap.mmap(-1, count * dtype.itemsize, flags=flags)
    _kept.append(memory)
    return torch.frombuffer(memory, dtype=torch.uint8).view(dtype)


class Guard:
    """A buffer whose first and last bytes must stay as they were."""

    def __init__(self, like: Tensor, fill: int, device: torch.device) -> None:
        """`like` gives shape, stride and dtype."""
        span = 1 + sum((n - 1) * s for n, s in zip(like.shape, like.stride())) if like.numel() else 0
        self.inside, self.fill = span * like.element_size(), fill
        self.bytes = _full(PAD + self.inside + PAD, fill, device)
        whole = self.bytes[PAD : PAD + self.inside].view(like.dtype)
        self.tensor = whole.as_strided(like.shape, like.stride(), whole.storage_offset())

    def check(self, label: str) -> None:
        for side, edge in (("before", self.bytes[:PAD]), ("past", self.bytes[PAD + self.inside :])):
            wrong = edge != self.fill
            count, shape = int(wrong.sum()), tuple(self.tensor.shape)
            assert count == 0, f"{label}: {count} bytes {side} a tensor of {shape} were written"


class Fenced(Guard):
    """An argument inside such a buffer, which must not be written at all."""

    def __init__(self, t: Tensor) -> None:
        super().__init__(t.contiguous() if 0 in t.stride() else t, 0xFF if t.is_floating_point() else 0x7F, t.device)
        self.tensor.copy_(t)
        self.before = self.bytes.clone()

    def check(self, label: str) -> None:
        super().check(label)
        wrong = self.bytes != self.before
        assert not bool(wrong.any()), f"{label} was written: {int(wrong.sum())} bytes differ"


class Gaps:
    """The bytes between the elements of a strided tensor."""

    def __init__(self, t: Tensor) -> None:
        self.t = t
        self.bytes = _storage(t)
        own, size = torch.zeros_like(self.bytes, dtype=torch.bool), t.element_size()
        stride = [s * size for s in t.stride()]
        own.as_strided((*t.shape, size), (*stride, 1), t.storage_offset() * size).fill_(True)
        self.between = ~own
        self.before = self.bytes.clone()

    def check(self, label: str) -> None:
        wrong = (_storage(self.t) != self.before) & self.between
        assert not bool(wrong.any()), f"{label}: {int(wrong.sum())} bytes between its elements were written"


def _storage(t: Tensor) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=t.device).set_(t.untyped_storage())


def _full(size: int, fill: int, device: torch.device) -> Tensor:
    return torch.full((size,), fill, dtype=torch.uint8, device=device)


@contextlib.contextmanager
def guarded_allocations(fill: int) -> Iterator[list[Guard]]:
    """Every uninitialised allocation made from Python inside lies in a `Guard`; yields their list."""
    guards: list[Guard] = []
    empty, like, strided = torch.empty, torch.empty_like, torch.empty_strided

    def guard(shape: Tensor, device: Any) -> Tensor:
        guards.append(Guard(shape, fill, torch.device(device)))
        return guards[-1].tensor

    def guarded_empty(*size: Any, device: Any = None, **options: Any) -> Tensor:
        return guard(empty(*size, device="meta", **options), device or torch.get_default_device())

    def guarded_like(t: Tensor, *, device: Any = None, **options: Any) -> Tensor:
        return guard(like(t, device="meta", **options), device or t.device)

    def guarded_strided(size: Any, stride: Any, *, device: Any = None, **options: Any) -> Tensor:
        return guard(strided(size, stride, device="meta", **options), device or torch.get_default_device())

    def guarded_new(t: Tensor, *size: Any, device: Any = None, dtype: Any = None, **options: Any) -> Tensor:
        return guard(empty(*size, device="meta", dtype=dtype or t.dtype, **options), device or t.device)

    with (
        mock.patch.object(torch, "empty", guarded_empty),
        mock.patch.object(torch, "empty_like", guarded_like),
        mock.patch.object(torch, "empty_strided", guarded_strided),
        mock.patch.object(Tensor, "new_empty", guarded_new),
    ):
        yield guards
