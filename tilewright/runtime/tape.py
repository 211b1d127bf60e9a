"""The tape: the backward of a call behind its results, one autograd function for every op."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.declaration import Declaration, Triton
from ..core.flat import as_tuple, mapped, wants_grad
from ..core.private import apply_of
from .choose import forced
from .results import flatten, saved_results, unflatten
from .run import Runner


def differentiate(op: Runner, values: dict[str, Any], key: tuple | None, slots: list[Tensor] | None) -> Any:
    """A validated call that wants gradients. Its plan is kept under `key`, so that the next one like it comes to `taped` at once:
    unless the backward is to write over an argument, for what validation says of that is not in a key."""
    if values.get("out") is not None:
        raise ValueError(f"{op.name}: out cannot be given when a gradient is wanted")
    bad = [n for n in op.signature.tensors if n not in op.differentiable and wants_grad(values[n])]
    if bad:
        detached = f"{bad[0]}.detach()" if isinstance(values[bad[0]], Tensor) else "detached tensors"
        raise ValueError(f"{op.name}: there is no gradient for {bad[0]}: pass {detached}")
    one = op.implementation(values)
    if one is None:
        results, becomes = op.apart(op.reference(**op.arguments(values)))
        with torch.no_grad():
            for name, value in becomes.items():
                values[name].copy_(value)
        return op.public(mapped(lambda t: t.contiguous(), results))
    if one.backward is None:
        raise RuntimeError(f"{op.name}: implementation {one.name} has no backward; use torch.no_grad()")
    needs = frozenset(n for n in op.differentiable if wants_grad(values[n]))
    if key is None or values.get(op.overwrites):
        return taped(op, values, *op.run_chosen(values, needs))
    return taped(op, values, *op.record(values, key, slots, whole=True, needs=needs))


def taped(op: Runner, values: dict[str, Any], results: Any, chosen: Triton) -> Any:
    """What the caller gets of all results, with the backward of this call, by the same implementation, behind them."""
    tensors = [values[n] for n in op.signature.tensors]
    made = as_tuple(results)  # a bare tensor would be an argument to autograd, and its result a view of it
    return op.public(unflatten(op, values, _tape(op, values, made, chosen, *tensors)))


# ---------------------------------------------------------------- what the backward gets, eager and registered


def keep(ctx: Any, op: Declaration, values: Mapping[str, Any], flat: tuple[Tensor, ...]) -> None:
    """Keep what the backward needs; say which results carry gradients."""
    names = op.signature.tensors
    tensors = [values[n] if n in op.saves else None for n in names]
    for name in () if op.shape_only is None else op.shape_only(values):
        given = values[name]
        if given is not None:  # shape and dtype for nothing: one element seen everywhere
            tensors[names.index(name)] = given.new_empty_strided(given.shape, (0,) * given.dim())
    ctx.save_for_backward(*tensors, *saved_results(op, flat).values())
    ctx.op = op
    ctx.scalars = {n: None if n in names or n == "out" else v for n, v in values.items()}
    ctx.graded = graded = op.graded(values)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[t for i, t in enumerate(flat) if i not in graded])


def kept(op: Declaration, scalars: Mapping[str, Any], saved: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(arguments, in their order, and results) by name from what `keep` kept."""
    tensors = op.signature.tensors
    return {**scalars, **dict(zip(tensors, saved))}, dict(zip(op.saved_results, saved[len(tensors) :]))


def gradients(ctx: Any, grads: tuple, wanted: frozenset, backward: Callable[..., tuple]) -> tuple:
    """Gradients for the tensor arguments, in order; None for those not `wanted`. `backward(ctx, saved, grads, wanted)` makes
    them."""
    op = ctx.op
    tensors = op.signature.tensors
    given = [None if grads[i] is None else grads[i].resolve_neg() for i in ctx.graded]
    if all(g is None for g in given):
        return (None,) * len(tensors)
    found = backward(ctx, ctx.saved_tensors, given, wanted)
    by_name = dict(zip(op.differentiable, found))
    return tuple([by_name[n] if n in wanted else None for n in tensors])


def _run_backward(ctx: Any, saved: Any, grads: list, wanted: frozenset) -> tuple:
    return ctx.op.run_backward(*kept(ctx.op, ctx.scalars, saved), grads, wanted, ctx.chosen)


class _Apply(torch.autograd.Function):
    """The one autograd function: the tape behind results that are there already. They become flat; a quantised one is led by a
    carrier for the gradient."""

    @staticmethod
    def forward(
        ctx: Any, op: Runner, values: dict[str, Any], results: tuple, chosen: Triton, *tensors: Tensor | None
    ) -> tuple:
        flat = flatten(results)
        keep(ctx, op, values, flat)
        ctx.chosen, ctx.forced = chosen, forced.get()
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        # What `once_differentiable` does is needed in a backward that is itself recorded; in others it costs 5 us for nothing
        return _backward_once(ctx, *grads) if torch.is_grad_enabled() else _Apply.run(ctx, *grads)

    @staticmethod
    def run(ctx: Any, *grads: Tensor | None) -> tuple:
        needs = frozenset(itertools.compress(ctx.op.signature.tensors, ctx.needs_input_grad[4:]))
        token = forced.set(ctx.forced)  # autograd may run this in a thread of its own
        try:
            return (None, None, None, None, *gradients(ctx, grads, needs, _run_backward))
        finally:
            forced.reset(token)


_backward_once = once_differentiable(_Apply.run)
_tape = apply_of(_Apply)
