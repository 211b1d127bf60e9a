"""Elements taken from a tensor by index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from . import layout
from .index_move import Advanced, Named, check_index, dim_of, indexed, move, without
from .layout import Ints
from .plans import own
from .row import Declined, taken


def index_select(self: Tensor, dim: int, index: Tensor) -> Tensor:
    taken(self, index)
    check_index(index)
    d = dim_of(dim, self.dim())
    if index.dim() > 1 or not self.dim() or (not self.shape[d] and index.numel()):
        raise Declined("an index that is no vector, or nothing to select from")
    shape = (*self.shape[:d], index.numel(), *self.shape[d + 1 :])
    out = own(torch.empty(shape, dtype=self.dtype, device=self.device))
    step = index.stride(0) if index.dim() else 0
    named = Named(index, along(step, self.dim(), d), self.shape[d], self.stride(d))
    move(shape, out, out.stride(), self, without(self.stride(), d), [named], False, False)
    return out


def along(stride: int, rank: int, dim: int) -> Ints:
    return tuple(stride if d == dim else 0 for d in range(rank))


def embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    taken(weight, indices)
    check_index(indices)
    if weight.dim() != 2:
        raise Declined("a table that is no matrix")
    shape = (*indices.shape, weight.shape[1])
    out = own(torch.empty(shape, dtype=weight.dtype, device=weight.device))
    none = (0,) * indices.dim()
    named = Named(indices, (*indices.stride(), 0), weight.shape[0], weight.stride(0))
    move(shape, out, out.stride(), weight, (*none, weight.stride(1)), [named], False, False)
    return out


def gather(self: Tensor, dim: int, index: Tensor, *, sparse_grad: bool = False) -> Tensor:
    taken(self, index)
    check_index(index)
    d = dim_of(dim, self.dim())
    if self.dim() != index.dim() and index.numel():
        raise Declined("an index of another rank")
    if any(index.shape[i] > self.shape[i] for i in range(self.dim()) if i != d and index.numel()):
        raise Declined("an index that is larger")
    shape = tuple(index.shape)
    out = own(torch.empty(shape, dtype=self.dtype, device=self.device))
    if self.dim() == 0:
        self, index = self.reshape(1), index.reshape(1)
    if index.numel():
        named = Named(index, index.stride(), self.shape[d], self.stride(d))
        move(tuple(index.shape), out, out.stride() or (1,), self, without(self.stride(), d), [named], False, False)
    return out


def index(self: Tensor, indices: Sequence[Tensor | None]) -> Tensor:
    taken(self)
    found = indexed(self, indices)
    out = own(torch.empty_strided(found.shape, result_strides(self, found), dtype=self.dtype, device=self.device))
    move(found.shape, out, out.stride(), self, found.strides, found.named, False, True)
    return out


def result_strides(self: Tensor, found: Advanced) -> Ints:
    """How torch's iterator lays the result out: by the strides of the tensor, then by those of indices."""
    views = [self.as_strided(found.shape, found.strides)]
    after = len(found.kept) - found.at
    views += [one.tensor[(..., *[None] * after)] for one in found.named]
    return layout.result_strides(found.shape, views)


FORMS = {"index_select": index_select, "embedding": embedding, "gather": gather, "index.Tensor": index}
