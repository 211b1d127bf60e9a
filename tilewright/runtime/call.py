"""The hot path: what happens between calling an op and the launches of a plan.

A plan may be replayed for a call that is like the one it was recorded from in all that the op's host code and its validation
read. Two tests say so. A guard, for calls with tensors alone: torch's own C++ check against one of the last few kinds of
call. A key, for every other call: types, sizes, strides, dtypes, device, alignment, numbers and, where gradients are wanted,
of which tensors. What neither knows goes the long way, `dispatch`, which validates, chooses an implementation and records.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.declaration import Declaration, is_foreign
from ..core.flat import given_tensors
from ..core.outs import outs_of, with_outs
from ..core.private import guard, levels, modes, transforms
from . import register
from .choose import forced
from .key import Key
from .plan import Plan
from .run import Runner
from .tape import differentiate, taped

RECENT = 4  # kinds of call that an op remembers by guard
_tracing = torch.compiler.is_dynamo_compiling


def public(op: Runner) -> Callable[..., Any]:
    """The public function of an op: plain tensors and no mode active go straight to a plan, from there to the tape if gradients
    are wanted."""
    recent: tuple = ()

    @functools.wraps(op.reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _tracing():
            return register.call(op, op.signature.bind(args, kwargs))
        if not kwargs and forced.get() is None and levels._current_level < 0:
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
        """By the plan of the call's key. A plan of a call that wants gradients gives all results."""
        if modes() or transforms() or levels._current_level >= 0:
            return dispatch(op, args, kwargs)
        key = Key()
        key.parts += kwargs
        out = kwargs.get("out")
        rest = kwargs.values() if out is None else [v for n, v in kwargs.items() if n != "out"]
        if not key.add(args) or not key.add(rest) or not (out is None or key.add_out(out)):
            return dispatch(op, args, kwargs)
        graded = [t.requires_grad for t in key.slots] if torch.is_grad_enabled() else ()
        parts = (*key.parts, *graded) if True in graded else tuple(key.parts)
        found = op.plans.get(parts)
        if found is None:
            return dispatch(op, args, kwargs, parts, key.slots)
        plan, restore, written, whole, chosen = found
        if written:
            op.validate(op.signature.bind(args, kwargs))  # whether they overlap depends on addresses
            for at in written:
                torch.autograd.graph.increment_version(key.slots[at])
        elif not whole and not kwargs and parts[0] is None and len(key.slots) == len(args) and key.aligned:
            remember(key.slots, plan, restore)
        results = plan(key.slots, key.addresses)
        if restore is not None:
            results = restore(results)
        if out is not None:
            return with_outs(results, outs_of(op, kwargs))  # the caller's own objects
        return taped(op, op.signature.bind(args, kwargs), results, chosen) if whole else results

    def remember(slots: list[Tensor], plan: Plan, restore: Callable | None) -> None:
        nonlocal recent
        check = guard(slots)
        if check is not None:
            graded = any(t.requires_grad for t in slots)
            recent = ((check, len(slots), graded, plan, restore), *recent[: RECENT - 1])

    function.op, function.__name__, function.__qualname__ = op, op.name, op.name
    function.__signature__ = signature_of(op)
    return function


def dispatch(op: Runner, args: tuple, kwargs: Mapping[str, Any], key: tuple | None = None, slots: Any = None) -> Any:
    """A call that no plan answered. The plan it makes, over `slots`, is kept under `key` unless that is None."""
    values = op.signature.bind(args, kwargs)
    tensors = given_tensors(values)
    if op.signature.lists:
        key = slots = None  # an empty list is part of a key as well as numbers are; one of tensors is not
    if levels._current_level >= 0:
        if forced.get() == "reference":
            op.signature.validate(values)
            return op.public(op.reference(**op.arguments(values)))  # torch differentiates it, in any mode
        return register.constant_call(op, values)
    if any(is_foreign(t) for t in tensors) or modes() or transforms():
        if op.sharded is not None and any(hasattr(t, "device_mesh") for t in tensors):
            return op.sharded(**values)
        return register.call(op, values)
    op.validate(values)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return differentiate(op, values, key, slots)
    return op.record(values, key, op.slots(values) if slots is None else slots, whole=False)[0]


def signature_of(op: Declaration) -> inspect.Signature:
    """The reference's with `out`, less the results that the caller does not get."""
    signature = inspect.signature(op.reference)
    count = len(op.results) - op.hidden
    if op.hidden or op.writes:
        signature = signature.replace(
            return_annotation="Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
        )
    if not op.result_rows:
        return signature.replace(return_annotation="None")
    one = "Tensor | Quantized | None" if "out_format" in op.signature.names else "Tensor | None"
    kind = "list[Tensor] | None" if op.signature.listed else one
    kind = kind if count == 1 else f"tuple[{', '.join([one] + ['Tensor | None'] * (count - 1))}] | None"
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    return signature.replace(parameters=[*signature.parameters.values(), out])
