"""The key of a call: all that an op's host code and its validation read, so that a plan under an equal key may be replayed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from ..core.declaration import PLAIN
from ..core.format import Format, Quantized
from ..core.target import pretended
from .choose import forced

NUMBERS = {float, int, bool, str, type(None), frozenset, torch.dtype}  # and sets of names
SEVERAL = {list, tuple, torch.Size}
STRIDED = torch.strided


class Key:
    """The key of a call and, in the order of the call, its tensors and their addresses."""

    def __init__(self, name: tuple[str, ...] = ()) -> None:
        """`name`: of whose call it is, where several share their plans."""
        self.parts: list[Any] = [*name, forced.get(), pretended.get()]
        self.free = self.parts[-2] is self.parts[-1] is None  # nothing is forced or pretended
        self.slots: list[Tensor] = []
        self.addresses: list[int] = []

    def add(self, values: Iterable[Any]) -> bool:
        """Take values in; False if one cannot be part of a key: a subclass, a list of tensors, a generator, a tensor
        that has no address."""
        parts, slots, addresses = self.parts, self.slots, self.addresses
        for value in values:
            kind = type(value)
            if kind not in PLAIN:
                if kind in NUMBERS:
                    parts += kind, value if value or kind is not float else str(value)  # 0.0 is equal to -0.0
                    continue
                if kind is Quantized:
                    if not self._add_quantized(value):
                        return False
                    continue
                if not isinstance(value, Format):
                    if kind in SEVERAL and self._add_numbers(value):
                        continue
                    return False
                parts.append(value.key)
                value = value.tensor
                if value is None:
                    continue
            if value.layout is not STRIDED or value.is_neg() or value.is_meta:
                return False  # there is no address (a view of a meta tensor has one, of nothing), or other numbers lie there
            address = value.data_ptr()
            order = value.is_contiguous() or value.stride()
            parts += value.shape, value.dtype, value.get_device(), not address & 15, order
            slots.append(value)
            addresses.append(address)
        return True

    def _add_quantized(self, value: Quantized) -> bool:
        """Take in what a quantised value stores, under its format; not where it carries a gradient."""
        if value.requires_grad and torch.is_grad_enabled():
            return False
        inner = value._inner
        self.parts += value.key, value.shape, value.dtype, tuple(inner)
        return self.add(inner.values())

    def _add_numbers(self, values: Any) -> bool:
        """Take several numbers in, by what they are now and of which types: the list can be changed, and 1 is equal to True."""
        if values and type(values[0]) not in NUMBERS:
            return False  # tensors, of which there may be thousands
        kinds = tuple(map(type, values))
        if not NUMBERS.issuperset(kinds):
            return False
        self.parts += tuple, tuple([value or str(value) for value in values]), kinds
        return True

    def add_out(self, out: Any) -> bool:
        """Take in what was given for results. What is an argument too is told by its place: a plan knows tensors by identity."""
        if type(out) in (tuple, list):
            self.parts.append(len(out))
            return all(self.add_out(one) for one in out)
        if isinstance(out, Quantized):
            self.parts += out.format.key, out.shape, out.dtype
            return all(self.add_out(piece) for piece in out.tensors())
        for at, known in enumerate(self.slots):
            if out is known:
                self.parts += "on", at
                return True
        return self.add((out,))

    @property
    def aligned(self) -> bool:
        return not any(address & 15 for address in self.addresses)
