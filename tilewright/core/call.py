"""The hot path: what happens between calling an op and the launches of a plan.

A plan may be replayed for a call that is like the one it was recorded from in all that the op's host code and its validation
read. Two tests say so. A guard, for calls with tensors alone: torch's own C++ check against one of the last few kinds of
call. A key, for every other call: types, sizes, strides, dtypes, device, alignment, numbers and, where gradients are wanted,
of which tensors. What neither knows goes the long way, `Op.dispatch`, which validates, chooses an implementation and records.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import Parameter

from . import register
from .format import Format
from .plan import Plan, guard
from .target import _pretended

if TYPE_CHECKING:
    from .op import Op

PLAIN = {Tensor, Parameter}
NUMBERS = {float, int, bool, str, type(None), frozenset}  # and sets of names
STRIDED = torch.strided
RECENT = 4  # kinds of call that an op remembers by guard
forced: ContextVar[str | None] = ContextVar("forced", default=None)
modes = torch._C._len_torch_dispatch_stack
transforms = torch._C._are_functorch_transforms_active
_tracing = torch.compiler.is_dynamo_compiling


class Key:
    """The key of a call and, in the order of the call, its tensors and their addresses."""

    def __init__(self) -> None:
        self.parts: list[Any] = [forced.get(), _pretended.get()]
        self.slots: list[Tensor] = []
        self.addresses: list[int] = []

    def add(self, values: Iterable[Any]) -> bool:
        """Take values in; False if one cannot be part of a key: a subclass, a list, a tensor that has no address."""
        parts, slots, addresses = self.parts, self.slots, self.addresses
        for value in values:
            kind = type(value)
            if kind not in PLAIN:
                if kind in NUMBERS:
                    parts += kind, value
                    continue
                if not isinstance(value, Format):
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

    @property
    def aligned(self) -> bool:
        return not any(address & 15 for address in self.addresses)


def public(op: Op) -> Callable[..., Any]:
    """The public function of an op: plain tensors and no mode active go straight to a plan, from there to the tape (`Op.taped`)
    if gradients are wanted."""
    recent: tuple = ()

    @functools.wraps(op.reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _tracing():
            return register.call(op, op.signature.bind(args, kwargs))
        if not kwargs and forced.get() is None:
            for check, count, graded, plan, restore in recent:
                if count == len(args) and check(*args):
                    if graded and torch.is_grad_enabled():
                        break
                    if plan.simple is not None:
                        result = plan.simple(args)
                        if result is None:
                            break  # the guards do not see alignment
                        return result
                    addresses = [t.data_ptr() for t in args]
                    if any(address & 15 for address in addresses):
                        break
                    results = plan([*args], addresses)
                    return results if restore is None else restore(results)
        return keyed(args, kwargs)

    def keyed(args: tuple, kwargs: dict[str, Any]) -> Any:
        """By the plan of the call's key. `whole`: it gives all results, for it is of a call that wants gradients."""
        if modes() or transforms():
            return op.dispatch(args, kwargs)
        key = Key()
        key.parts += kwargs
        if not key.add(args) or not key.add(kwargs.values()):
            return op.dispatch(args, kwargs)
        graded = [t.requires_grad for t in key.slots] if torch.is_grad_enabled() else ()
        parts = (*key.parts, *graded) if True in graded else tuple(key.parts)
        found = op.plans.get(parts)
        if found is None:
            return op.dispatch(args, kwargs, parts, key.slots)
        plan, restore, written, whole = found
        if written:
            op.validate(op.signature.bind(args, kwargs))  # whether arguments overlap depends on their addresses
            for at in written:
                torch.autograd.graph.increment_version(key.slots[at])
        elif not whole and not kwargs and parts[0] is None and len(key.slots) == len(args) and key.aligned:
            remember(key.slots, plan, restore)
        results = plan(key.slots, key.addresses)
        if restore is not None:
            results = restore(results)
        return op.taped(op.signature.bind(args, kwargs), results) if whole else results

    def remember(slots: list[Tensor], plan: Plan, restore: Callable | None) -> None:
        nonlocal recent
        check = guard(slots)
        if check is not None:
            graded = any(t.requires_grad for t in slots)
            recent = ((check, len(slots), graded, plan, restore), *recent[: RECENT - 1])

    function.op, function.__name__, function.__qualname__ = op, op.name, op.name
    function.__signature__ = _signature(op)
    return function


def _signature(op: Op) -> inspect.Signature:
    """The reference's, less the results that the caller does not get."""
    signature = inspect.signature(op.reference)
    kept = len(op.results) - op.aux
    if op.aux:
        signature = signature.replace(
            return_annotation="Tensor" if kept == 1 else f"tuple[{', '.join(['Tensor'] * kept)}]"
        )
    return signature
