"""The tape: the backward of a call behind its results, one autograd function for every op."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..core.declaration import Declaration, Triton
from ..core.flat import as_tuple, mapped, wants_grad
from ..core.nest import picker
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
        results, becomes = op.apart(op.by_reference(op.arguments(values)))
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
    which of them and of the results are saved, which results carry gradients; and the last kinds of backward, by guard."""

    def __init__(self, op: Runner, values: Mapping[str, Any], names: list[str], known: Known) -> None:
        self.op, self.chosen, self.names = op, known.implementation, names
        tensors, count, slots = op.signature.tensors, len(op.results), len(names)
        self.scalars = {n: None if n in tensors or n == "out" else v for n, v in values.items()}
        self.hollow = [at for at, n in enumerate(names) if n in (op.shape_only(values) if op.shape_only else ())]
        arguments = [at for at, n in enumerate(names) if n in op.saves or at in self.hollow]
        arguments.sort(
            key=lambda at: tensors.index(names[at])
        )  # as `keep` has them: checkpointing pairs what calls save by order
        self.saved = [names[at] for at in arguments]  # and then the results of `op.saved_results`
        # Of slots and all results after them. The tape has those alone that carry gradients: autograd asks nothing of others
        self.saves = picker([*arguments, *[at + slots + count for at in op.saved_results.values()]])
        self.graded = op.graded(values)
        public = count - op.hidden
        self.carries = picker(self.graded) if len(self.graded) > 1 else itemgetter(*self.graded)
        self.alone = public == 1 and self.graded == (0,)  # the one result that the caller gets carries the gradient
        # Of all results and those on the tape after them
        self.public = picker([self.graded.index(at) + count if at in self.graded else at for at in range(public)])
        self.recent: tuple[tuple, ...] = ()

    @staticmethod
    def of(op: Runner, values: Mapping[str, Any], slots: Sequence[Tensor], known: Known) -> Step | None:
        """None where there are more tensors in a call than arguments that are one each."""
        given = {id(values[n]): n for n in op.signature.tensors if values[n] is not None}
        names = [given.get(id(slot)) for slot in slots]
        formats = values.get("out_format") is not None
        return None if formats or None in names or not op.graded_results else Step(op, values, names, known)

    def taped(self, slots: Sequence[Tensor], results: Any) -> Any:
        """What the caller gets of all results of a replay over `slots`."""
        flat = results if type(results) is tuple else (results,)
        made = _tape_step(self, flat, *slots)
        if self.alone:
            return made
        found = self.public((*flat, *(made if type(made) is tuple else (made,))))
        return found[0] if len(found) == 1 else found

    def gradients(self, ctx: Any, grads: tuple) -> tuple:
        """A gradient for each argument of the tape, or None."""
        saved, flags = ctx.saved_tensors, ctx.needs_input_grad
        given = (*saved, *grads)
        for check, wanted, function, restore, by_slot in self.recent:
            if wanted == flags and check(*given):
                found = function(given)
                if found is None:
                    break  # guards do not see alignment
                return by_slot((*(found if restore is None else restore(found)), None))
        if all(g is None for g in grads):
            return (None,) * len(flags)
        token = forced.set(None)  # as it was: autograd may run this in a thread of its own
        try:
            return self._long_way(saved, grads, flags)
        finally:
            forced.reset(token)

    def _long_way(self, saved: tuple, grads: tuple, flags: tuple[bool, ...]) -> tuple:
        """By key or by host code; a plan under that key is remembered."""
        op, tape = self.op, len(flags) - len(self.names)
        kept = dict(zip(self.saved, saved))
        values = {n: kept.get(n, v) for n, v in self.scalars.items()}
        results = dict(zip(op.saved_results, saved[len(self.saved) :]))
        needs = frozenset(itertools.compress(self.names, flags[tape:]))
        order = {n: at for at, n in enumerate(op.differentiable) if n in needs}
        by_slot = picker([*[-1] * tape, *[order.get(n, -1) for n in self.names]])  # of gradients and None after them
        given = [None if g is None else g.resolve_neg() for g in grads]
        key, _, known = op.backward_known(values, results, given, needs, self.chosen)
        if known is not None and key.aligned and [*map(id, key.slots)] == [*map(id, (*saved, *grads))]:
            check = guard(key.slots)
            if check is not None:
                plan, restore = known
                self.recent = ((check, flags, plan.function, restore, by_slot), *self.recent[: STEPS - 1])
        return by_slot((*op.run_backward(values, results, given, needs, self.chosen), None))


class _StepTape(torch.autograd.Function):
    """The tape of a call that is like others, over the tensors that were given and the results that carry gradients alone."""

    @staticmethod
    def forward(ctx: Any, step: Step, flat: tuple[Tensor, ...], *tensors: Tensor) -> Any:
        if step.hollow:
            tensors = tuple(hollow(t) if at in step.hollow else t for at, t in enumerate(tensors))
        ctx.save_for_backward(*step.saves(tensors + flat))
        ctx.step = step
        ctx.set_materialize_grads(False)
        return step.carries(flat)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple:
        return _step_once(ctx, *grads) if torch.is_grad_enabled() else ctx.step.gradients(ctx, grads)


_step_once = once_differentiable(lambda ctx, *grads: ctx.step.gradients(ctx, grads))
_tape_step = apply_of(_StepTape)
