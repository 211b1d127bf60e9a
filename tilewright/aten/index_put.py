"""Values put where indices say, or added there."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import forms, layout, plans, pointwise
from .index_add import Places, add_along, add_rows, keys_of, matrix
from .index_move import Advanced, Named, check_index, check_written, dim_of, indexed, move, without
from .plans import own
from .row import Declined, taken


def any_order() -> None:
    """Leave to aten writes to one place that are to have an order, as deterministic algorithms do."""
    plans.by_key_alone()
    if torch.are_deterministic_algorithms_enabled():
        raise Declined("an order among writes to one place", lasting=False)


def put_values(self: Tensor, found: Advanced, values: Tensor, accumulate: bool) -> None:
    """Put values into an indexed tensor, or add them to it."""
    if self.dtype != values.dtype:
        raise Declined("values of another dtype")
    shape = found.shape
    missing = len(shape) - values.dim()
    if missing < 0 and any(n != 1 for n in values.shape[:-missing]):
        raise Declined("values that do not broadcast")
    values = values.reshape(values.shape[-missing:]) if missing < 0 else values
    if layout.broadcast([shape, values.shape]) != shape:
        raise Declined("values that do not broadcast")
    wide = values.expand(shape)
    if not accumulate:
        any_order()
        move(shape, wide, layout.expanded(wide, shape), self, found.strides, found.named, True, True)
        return
    if not math.prod(shape):
        return
    rank = len(found.common)
    rows = wide.movedim(tuple(range(found.at, found.at + rank)), tuple(range(rank))) if found.at else wide
    steps = layout.contiguous_strides(tuple(self.shape[d] for d in found.dims))
    places = Places(
        tuple(self.shape[d] for d in found.dims), tuple(self.stride(d) for d in found.dims),
        tuple(self.shape[d] for d in found.kept), tuple(self.stride(d) for d in found.kept),
    )  # fmt: skip
    own_strides = [one.strides[found.at : found.at + rank] for one in found.named]
    keys = keys_of(
        found.common, [*zip([one.tensor for one in found.named], own_strides, places.sizes, steps)], True, (), places
    )
    add_rows(self, keys, matrix(rows, math.prod(found.common)), places)


def index_put_(
    self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False, unsafe: bool = False
) -> Tensor:
    taken(self, values)
    check_written(self, values, *[i for i in indices if i is not None])
    put_values(self, indexed(self, indices), values, accumulate)
    return self


def index_put(self: Tensor, indices: Sequence[Tensor | None], values: Tensor, accumulate: bool = False) -> Tensor:
    taken(self, values)
    found = indexed(self, indices)
    out = forms.clone(self)
    put_values(out, indexed(out, restated(found)), values, accumulate)
    return out


def restated(found: Advanced) -> list[Tensor | None]:
    """The indices with those that masks have become, so that no mask is read twice."""
    whole: list[Tensor | None] = [None] * (max(found.dims) + 1)
    for d, one in zip(found.dims, found.named):
        whole[d] = one.tensor
    return whole


def scattered(self: Tensor, dim: int, index: Tensor, src: Tensor) -> int:
    """The dimension of a scatter that is not refused."""
    taken(self, index, src)
    check_index(index, (torch.int64,))
    d = dim_of(dim, self.dim())
    if self.dtype != src.dtype:
        raise Declined("a source of another dtype")
    if index.numel() and not self.dim() == index.dim() == src.dim():
        raise Declined("ranks that are refused")
    for i in range(self.dim() if index.numel() else 0):
        if index.shape[i] > src.shape[i] or (i != d and index.shape[i] > self.shape[i]):
            raise Declined("an index that is larger")
    return d


def scatter_into(x: Tensor, d: int, index: Tensor, src: Tensor, op: str | None) -> None:
    """Put a source where an index says along one dimension, add it there, or multiply by it."""
    if not index.numel():
        return
    if x.dim() == 0:
        x, index, src = x.reshape(1), index.reshape(1), src.reshape(1)
    shape = tuple(index.shape)
    if op is None:
        any_order()
        named = Named(index, index.stride(), x.shape[d], x.stride(d))
        move(shape, src, src.stride(), x, without(x.stride(), d), [named], True, False)
        return
    if op == "multiply" and x.dtype == torch.bool:
        raise Declined("dtype bool")
    for i, n in enumerate(shape):
        src = src.narrow(i, 0, n) if src.shape[i] != n else src
    others = [i for i in range(len(shape)) if i != d]
    if all(index.stride(i) == 0 or shape[i] == 1 for i in others):  # one index for a whole slice
        for i in others:
            x = x.narrow(i, 0, shape[i]) if x.shape[i] != shape[i] else x
        along_d = index[tuple(slice(None) if i == d else 0 for i in range(len(shape)))]
        add_along(x, d, tuple(shape[i] for i in others), along_d, src, 1, op)
        return
    places = Places(tuple(x.shape), x.stride(), (), ())
    steps = layout.contiguous_strides(tuple(x.shape))
    keys = keys_of(shape, [(index, index.stride(), x.shape[d], steps[d])], False, without(steps, d), places)
    add_rows(x, keys, matrix(src, src.numel()), places, 1, op)


@functools.cache
def warn_once() -> None:
    """Have torch say in its own words, once in a process, that a scatter of a tensor that reduces is deprecated."""
    nothing = torch.empty(0, device="cpu")
    nothing.scatter(0, torch.empty(0, dtype=torch.int64, device="cpu"), nothing, reduce="add")


def check_warned() -> None:
    """Leave to aten a call that it warns of, if it is asked to warn of each."""
    plans.by_key_alone()
    if torch.is_warn_always_enabled():
        raise Declined("a warning of each call", lasting=False)
    warn_once()


def that_warns(form: Any) -> Any:
    """Say of a form that it reads whether torch is asked to warn always: part of a plan's key, for no guard sees it."""
    form.settings = torch.is_warn_always_enabled
    return form


def scatter_form(in_place: bool, op: str | None) -> Any:
    """A scatter that puts, adds, or does what it is asked to."""

    def scatter(self: Tensor, dim: int, index: Tensor, src: Tensor, *, reduce: str | None = None) -> Tensor:
        d = scattered(self, dim, index, src)
        if reduce not in (None, "add", "multiply"):
            raise Declined("a reduction that is refused")
        if reduce is not None:
            check_warned()
        if in_place:
            check_written(self, index, src)
            out = self
        else:
            out = own(torch.empty(self.shape, dtype=self.dtype, device=self.device))
            pointwise.run(forms.COPY, {"self": self}, out)
        scatter_into(out, d, index, src, reduce or op)
        return out

    return scatter


FORMS = {
    "index_put_": index_put_, "_index_put_impl_": index_put_, "index_put": index_put,
    "scatter.src": scatter_form(False, None), "scatter_.src": scatter_form(True, None),
    "scatter.reduce": that_warns(scatter_form(False, None)), "scatter_.reduce": that_warns(scatter_form(True, None)),
    "scatter_add": scatter_form(False, "add"), "scatter_add_": scatter_form(True, "add"),
}  # fmt: skip
