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
from ..core.private import apply_of, guard
from .choose import forced
from .results import flatten, saved_results, unflatten
from .run import Known, Runner

STEPS = 4  # kinds of backward that one kind of call remembers by guard


def differentiate(op: Runner, values: dict[str, Any], key: tuple | None, slots: list[Tensor] | None) -> Any:
    """A validated call that wants gradients. Its plan is kept under `key`, so that the next one like it comes to the tape at
    once."""
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
    if key is None:
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
        if given is not None:
            tensors[names.index(name)] = hollow(given)
    ctx.save_for_backward(*tensors, *saved_results(op, flat).values())
    ctx.op = op
    ctx.scalars = {n: None if n in names or n == "out" else v for n, v in values.items()}
    ctx.graded = graded = op.graded(values)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[t for i, t in enumerate(flat) if i not in graded])


def hollow(tensor: Tensor) -> Tensor:
    """Shape and dtype for nothing: one element seen everywhere."""
    return tensor.new_empty_strided(tensor.shape, (0,) * tensor.dim())


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


# ---------------------------------------------------------------- calls that are alike


class Step:
    """What is alike in all calls of one kind that want gradients, so that their tape costs little: whose arguments the slots are,
    which of them and of the results are saved, where gradients arrive; and the last kinds of backward, by guard."""

    def __init__(self, op: Runner, values: Mapping[str, Any], names: list[str], known: Known) -> None:
        self.op, self.chosen, self.names = op, known.implementation, names
        tensors, count = op.signature.tensors, len(op.results)
        self.scalars = {n: None if n in tensors or n == "out" else v for n, v in values.items()}
        self.hollow = [at for at, n in enumerate(names) if n in (op.shape_only(values) if op.shape_only else ())]
        self.arguments = [at for at, n in enumerate(names) if n in op.saves or at in self.hollow]
        self.results = {n: at + count for n, at in op.saved_results.items()}
        self.graded = op.graded(values)
        self.others = [at for at in range(count) if at not in self.graded]
        self.count = count - op.hidden
        self.recent: tuple[tuple, ...] = ()

    @staticmethod
    def of(op: Runner, values: Mapping[str, Any], slots: list[Tensor], known: Known) -> Step | None:
        """None where there are more tensors in a call than arguments that are one each."""
        given = {id(values[n]): n for n in op.signature.tensors if values[n] is not None}
        names = [given.get(id(slot)) for slot in slots[: len(given)]]
        formats = values.get("out_format") is not None
        return None if formats or None in names or len(names) != known.plan.inputs else Step(op, values, names, known)

    def taped(self, slots: list[Tensor], results: Any) -> Any:
        """What the caller gets of all results of a replay over `slots`."""
        flat = results if isinstance(results, tuple) else (results,)
        made = _tape_step(self, flat, *slots[: len(self.names)])
        return made[0] if self.count == 1 else made[: self.count]

    def gradients(self, saved: tuple, grads: list[Tensor | None], flags: tuple[bool, ...]) -> tuple:
        """A gradient for each slot, or None."""
        given = [*saved, *grads]
        for check, wanted, plan, restore in self.recent:
            if wanted == flags and check(*given):
                addresses = [t.data_ptr() for t in given]
                if any(address & 15 for address in addresses):
                    break  # guards do not see alignment
                return self._by_slot(restore(plan(given, addresses)), flags)
        return self._long_way(saved, grads, flags)

    def _long_way(self, saved: tuple, grads: list[Tensor | None], flags: tuple[bool, ...]) -> tuple:
        """By key or by host code; a plan under that key is remembered."""
        op = self.op
        kept = dict(zip([self.names[at] for at in self.arguments], saved))
        values = {n: kept.get(n, v) for n, v in self.scalars.items()}
        results = dict(zip(self.results, saved[len(self.arguments) :]))
        grads = [None if g is None else g.resolve_neg() for g in grads]
        needs = frozenset(itertools.compress(self.names, flags))
        key, _, known = op.backward_known(values, results, grads, needs, self.chosen)
        given = [*saved, *grads]
        if known is not None and key.aligned and [*map(id, key.slots)] == [*map(id, given)]:
            check = guard(given)
            if check is not None:
                self.recent = ((check, flags, *known), *self.recent[: STEPS - 1])
        return self._by_slot(op.run_backward(values, results, grads, needs, self.chosen), flags)

    def _by_slot(self, found: tuple, flags: tuple[bool, ...]) -> tuple:
        by_name = dict(zip(self.op.differentiable, found))
        return tuple([by_name[n] if flag else None for n, flag in zip(self.names, flags)])


class _StepTape(torch.autograd.Function):
    """The tape of a call that is like others, over the tensors that were given alone."""

    @staticmethod
    def forward(ctx: Any, step: Step, flat: tuple[Tensor, ...], *tensors: Tensor) -> tuple:
        if step.hollow:
            tensors = tuple(hollow(t) if at in step.hollow else t for at, t in enumerate(tensors))
        ctx.save_for_backward(*[tensors[at] for at in step.arguments], *[flat[at] for at in step.results.values()])
        ctx.step = step
        ctx.set_materialize_grads(False)
        if step.others:
            ctx.mark_non_differentiable(*[flat[at] for at in step.others])
        return flat

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return _step_once(ctx, *grads) if torch.is_grad_enabled() else _StepTape.run(ctx, *grads)

    @staticmethod
    def run(ctx: Any, *grads: Tensor | None) -> tuple:
        step = ctx.step
        given = [grads[at] for at in step.graded]
        if all(g is None for g in given):
            return (None, None, *[None] * len(step.names))
        token = forced.set(None)  # as it was: autograd may run this in a thread of its own
        try:
            return (None, None, *step.gradients(ctx.saved_tensors, given, ctx.needs_input_grad[2:]))
        finally:
            forced.reset(token)


_step_once = once_differentiable(_StepTape.run)
_tape_step = apply_of(_StepTape)
