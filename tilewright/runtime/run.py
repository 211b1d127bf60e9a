"""`Runner`: a declaration that can be run. It replays the plan of a call that was made before, else records one.

What it gives are all results, those for the backward included, and no autograd: the tape is `tape.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.declaration import Declaration, Triton
from ..core.flat import as_tuple, flattened, mapped, plain_tensors, taken_apart
from ..core.format import Quantized
from ..core.nest import picker
from ..core.outs import apart, outs_of, stored, with_outs
from ..core.private import count_write
from .choose import implementation
from .key import Key
from .plan import Plan, Recorder, own

# `flops` up to which a composite becomes a plan. While one is recorded no memory is given back, which is much in large calls; there
# the host, which takes 1 to 3 ms, waits for the device anyway
LIGHT = 2e12
PLANS = 4096  # plans kept per op and direction; dropped all at once when full, so memory stays bounded
_compile_only: ContextVar[bool] = ContextVar("compile_only", default=False)


@contextmanager
def compiling_only() -> Iterator[None]:
    """Compile kernels, and launch none of them."""
    token = _compile_only.set(True)
    try:
        yield
    finally:
        _compile_only.reset(token)


def compiles_only() -> bool:
    return _compile_only.get()


@dataclass(eq=False)
class Known:
    """What is kept of a recorded run: its plan, what makes results of those that the plan gives (None: nothing has to), which
    slots it writes, whether it gives all results or the caller's, whether the caller gets the memory that it gave for results and
    no more, and the implementation that ran, whose backward is this call's. `kind` and `step` are how `front.py` and `tape.py`
    know a call like this one."""

    plan: Plan
    restore: Callable | None
    written: tuple[int, ...] = ()
    whole: bool = False
    stored: bool = False
    implementation: Triton | None = None
    kind: Any = None
    step: Any = None

    def __post_init__(self) -> None:
        self.plain = not (self.written or self.whole)  # the caller gets what the plan gives, restored
        self.writes = picker(self.written)  # of slots


def planned(recorder: Recorder, results: Any, written: tuple[int, ...] = ()) -> tuple[Plan, Callable | None] | None:
    """(the plan of a run that gave these results, what makes them of those that the plan gives or None); None if it is no plan."""
    restore = None
    if isinstance(results, Quantized):
        restore, results = results.maker(), (*results.tensors(), results.offsets)
    elif any(isinstance(r, Quantized) for r in as_tuple(results)):
        pieces, restore = taken_apart(results)
        results = tuple(pieces)
    plan = recorder.plan(results if isinstance(results, Tensor) else as_tuple(results), written)
    return None if plan is None else (plan, restore)


def known_of(
    recorder: Recorder,
    results: Any,
    outs: tuple,
    written: tuple[int, ...],
    whole: bool = False,
    implementation: Triton | None = None,
) -> Known | None:
    """What is known after a run that gave these results, some of them in the memory `outs`; None if it is no plan."""
    # A value in groups is told where they end, though it is the caller's
    grouped = any(isinstance(r, Quantized) and r.offsets is not None for r in as_tuple(results))
    given = bool(outs) and all(out is not None for out in outs) and not grouped
    stored = not whole and (given or results is None)
    found = planned(recorder, () if stored else results, written)
    return None if found is None else Known(*found, written, whole, stored, implementation)


def _overwritten(grads: tuple) -> tuple:
    """The gradients of a replay that wrote over arguments: new tensors over that memory, whose versions are counted as host code
    counts them."""
    count_write([g for g in grads if g is not None])
    return tuple(None if g is None else g.detach() for g in grads)


class Runner(Declaration):
    """See the module."""

    def __init__(self, *args: Any, **said: Any) -> None:
        super().__init__(*args, **said)
        self.plans: dict[tuple, Known] = {}
        self.backward_plans: dict[tuple, tuple[Plan, Callable | None]] = {}
        self.unplannable: set[tuple] = (
            set()
        )  # keys of calls that made no plan: composite ones, or with memory for results

    def implementation(self, values: Mapping[str, Any], device: torch.device | None = None) -> Triton | None:
        """The implementation for these arguments; None is the reference."""
        return implementation(self, values, device)

    def run(self, values: dict[str, Any], needs: frozenset = frozenset()) -> Any:
        """All results for validated arguments. `needs`: whose gradients are known to be wanted."""
        return self.run_chosen(values, needs)[0]

    def run_chosen(self, values: dict[str, Any], needs: frozenset = frozenset()) -> tuple[Any, Triton | None]:
        """(all results for validated arguments, the implementation that made them)."""
        outer = Recorder.active()
        one = self.implementation(values) if outer is not None and outer.watch else None
        if one is not None:  # a step of that op's plan
            results = self._forward(one, values, needs)
            return results if one.out else stored(results, outs_of(self, values)), one
        key = Key()
        keyed = self.planned and key.add((*(values[n] for n in self.signature.names), needs))
        keyed = keyed and key.add_out(values.get("out"))
        parts = ("all results", *key.parts) if keyed else None
        known = self.plans.get(parts) if keyed else None
        if known is None or _compile_only.get():
            return self.record(values, parts, key.slots if keyed else self.slots(values), whole=True, needs=needs)
        results = known.plan.function(key.slots, True)
        count_write(known.writes(key.slots))
        results = results if known.restore is None else known.restore(results)
        return with_outs(results, outs_of(self, values)), known.implementation

    def record(
        self,
        values: dict[str, Any],
        key: tuple | None,
        slots: list[Tensor],
        whole: bool,
        needs: frozenset = frozenset(),
    ) -> tuple[Any, Triton | None]:
        """Run the host code and give (results, the implementation); keep the plan of it under `key`, over `slots`, the call's
        tensors in the order in which later calls will give theirs. `whole`: give all results, not only the caller's."""
        with torch.no_grad():
            one = self.implementation(values)
            if one is None:
                results = self.run_reference(values)
                return results if whole else self.public(results), None
            watch = self._may_become_plan(key, values)
            given = outs_of(self, values)
            outs = () if one.out else given
            twice = watch and key not in self.unplannable and not (self.composite and self.writes)
            instead = self._instead(one, values, needs, slots, outs) if outs and twice else {}
            with Recorder(slots, _compile_only.get(), watch, instead) as recorder:
                results = self._forward(one, values, needs)
            if outs:
                results = self._stored(results, outs, instead, recorder)
            written = self._written(values, slots)
            known = None
            if key is not None and not recorder.compile_only:
                gets = results if whole else self.public(results)
                known = known_of(recorder, gets, given, written, whole, one)
            # What host code saw as a view is the caller's own, as it is when the plan gives it
            theirs = {id(t) for t in (*slots, *flattened(values.get("out")))}
            results = mapped(lambda t: t if t is None or id(t) in theirs else own(t), results)
            if known is not None:
                self.keep(key, known)
            elif watch and not recorder.compile_only and (self.composite or outs):
                self.remember_no_plan(key)
            count_write([slots[at] for at in written])
            if self.signature.listed and values.get("out") is not None:
                count_write(values["out"])
            return results if whole else self.public(results), one

    def run_backward(
        self,
        values: Mapping[str, Any],
        results: Mapping[str, Tensor],
        grads: list[Tensor | None],
        needs: frozenset,
        chosen: Triton | None = None,
        **extra: Any,
    ) -> tuple:
        """Gradients for `differentiable`, None where not needed. `chosen` is the forward's implementation; without it, as in a
        registered backward, one is chosen from what was saved. `extra` is passed on (a composite's `grad_format`)."""
        outer = Recorder.active()
        nested = outer is not None and outer.watch
        key, parts, known = (None, None, None)
        if not nested:
            key, parts, known = self.backward_known(values, results, grads, needs, chosen, **extra)
        if known is not None and not _compile_only.get():
            plan, restore = known
            grads = plan.function(key.slots)
            return grads if restore is None else restore(grads)
        with torch.no_grad():
            together = {**values, **results}
            one = chosen or self.implementation(together, next(g.device for g in grads if g is not None))
            saved = SimpleNamespace(**together, needs=needs)
            if one is None:
                return self.reference_backward(saved, grads)
            if nested:
                return one.backward(saved, *grads, **extra)  # a step of that op's plan
            slots = plain_tensors({**together, **dict(enumerate(grads))}) if key is None else key.slots
            watch = self._may_become_plan(parts, values)
            with Recorder(slots, _compile_only.get(), watch) as recorder:
                out = one.backward(saved, *grads, **extra)
            made = planned(recorder, tuple(out)) if key is not None and not recorder.compile_only else None
            if made is not None:
                if len(self.backward_plans) >= PLANS:
                    self.backward_plans.clear()
                self.backward_plans[parts] = (made[0], _overwritten) if values.get(self.overwrites) else made
            elif watch and not recorder.compile_only and self.composite:
                self.remember_no_plan(parts)
            return tuple(out)

    def backward_known(
        self,
        values: Mapping[str, Any],
        results: Mapping[str, Tensor],
        grads: list[Tensor | None],
        needs: frozenset,
        chosen: Triton | None = None,
        **extra: Any,
    ) -> tuple[Key | None, tuple | None, tuple[Plan, Callable | None] | None]:
        """(the key of a backward, what it is made of, its plan and what makes gradients of what that gives, if something has to),
        None where there is none."""
        key, name = Key(), None if chosen is None else chosen.name
        given = (*values.values(), *results.values(), *grads, needs, name, *extra.values())
        if not self.planned or not key.add(given):
            return None, None, None
        parts = tuple(key.parts)
        return key, parts, self.backward_plans.get(parts)

    def slots(self, values: Mapping[str, Any]) -> list[Tensor]:
        """What a recorder watches: nothing in an op over lists, which makes no plan and may have thousands of tensors."""
        return [] if self.signature.lists else plain_tensors(values)

    def _forward(self, one: Triton, values: Mapping[str, Any], needs: frozenset) -> Any:
        more = {"out": values.get("out")} if one.out else {}
        made = one.forward(**self.arguments(values), **more, **({"needs": needs} if self.composite else {}))
        return made if self.results else ()

    def _instead(
        self, one: Triton, values: Mapping[str, Any], needs: frozenset, slots: list[Tensor], outs: tuple
    ) -> dict[int, tuple[int, Tensor]]:
        """What the caller's memory stands in for, found by a run that launches nothing. Host code that writes arguments by other
        means than launches is not run for that: it would write them twice."""
        with Recorder(slots, compile_only=True) as first:
            results = as_tuple(self._forward(one, values, needs))
        pairs = [(r, o) for r, o in zip(results, outs) if o is not None]
        flat = [(here, there) for r, o in pairs for here, there in zip(flattened(r), flattened(o))]
        return first.stored_in([here for here, _ in flat], [there for _, there in flat])

    def _stored(self, results: Any, outs: tuple, instead: Mapping[int, tuple[int, Tensor]], recorder: Recorder) -> Any:
        """The results with the caller's memory among them; what no allocation was, such as a part of one, is copied there."""
        for there, here in apart(results, outs, {t.data_ptr() for _, t in instead.values()}):
            recorder.foreign = recorder.foreign or "a copy of a result to memory that was given for it"
            if not recorder.compile_only:
                there.copy_(here)
        return with_outs(results, outs)

    def _may_become_plan(self, key: tuple | None, values: Mapping[str, Any]) -> bool:
        """Whether a run is watched; a composite is not tried twice, for watching costs more than its launches."""
        if key is None and self.signature.generators:
            return False  # what a generator gives is no step of a plan, and host code that asks it must run once
        if not self.composite:
            return True
        may = self.planned and key is not None and key not in self.unplannable
        return may and self.cost.flops(**self.arguments(values)) < LIGHT

    def keep(self, key: tuple, known: Known) -> None:
        if len(self.plans) >= PLANS:
            self.plans.clear()
        self.plans[key] = known

    def remember_no_plan(self, key: tuple | None) -> None:
        """Keep in mind that a call made no plan. A composite is then not watched again, and one with memory for results is not run
        twice, but copied."""
        if key is not None:
            if len(self.unplannable) >= PLANS:
                self.unplannable.clear()
            self.unplannable.add(key)

    def _written(self, values: Mapping[str, Any], inputs: list[Tensor]) -> tuple[int, ...]:
        """Which of the inputs this call writes."""
        if self.signature.lists or (values.get("out") is None and not self.writes):
            return ()
        written = [piece for piece in flattened(values.get("out")) if piece is not None]
        written += [values[name] for name in self.writes if values[name] is not None]
        return tuple(i for i, t in enumerate(inputs) if any(t is w for w in written))
