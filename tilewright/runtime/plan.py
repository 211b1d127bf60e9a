"""Plans: what one run of an op's host code allocated and launched, replayed without running that code again.

An op's `forward` is a pure function of shapes, strides, dtypes and numbers: it allocates, takes views and launches. `Recorder`
watches one run of it through the dispatcher, which sees every torch call; if nothing else happened, the run becomes a `Plan`
keyed by exactly those inputs, and the next call costs one allocation per result and one raw launch per kernel. If anything
else did happen (a copy of a strided argument, say) there is no plan, and the host code runs every time.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..core.flat import flattened
from ..core.memory import same_storage
from ..core.nest import leaves
from ..core.private import DispatchMode, no_modes
from .launch import Place, Places
from .replay import MADE, Plan

aten = torch.ops.aten
ALLOCATES = {
    aten.empty.memory_format: None,  # what the memory is filled with
    aten.empty_strided.default: None,
    aten.empty_like.default: None,
    aten.new_empty.default: None,
    aten.new_empty_strided.default: None,
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.full.default: ...,  # its second argument, which is a number of the host's
}
_local = threading.local()


class Fill:
    """Memory of the caller's in the place of an allocation that host code asked to be filled."""

    def __init__(self, tensor: Tensor, value: float) -> None:
        self.tensor, self.value = tensor, value

    def first(self) -> None:
        with no_modes():
            self.tensor.fill_(self.value)

    def bind(self, places: Places) -> Callable:
        (_, place), value, self.tensor = places[0], self.value, None

        def replay(slots: list[Tensor], addresses: list[int]) -> None:
            place.view(slots[place.slot]).fill_(value)

        return replay


class Call:
    """A call of torch's own that does nothing but fill memory that it is given, such as a library's product: a function of tensors,
    of which some may be None."""

    def __init__(self, function: Callable[..., Any], tensors: Sequence[Tensor | None]) -> None:
        self.function, self.tensors = function, tensors
        # Of these tensors: where each is and of which slot, those that are a slot as it is, and those that are a view of one
        self.whole: list[tuple[int, int]] = []
        self.views: list[tuple[int, int, Callable[[Tensor], Tensor]]] = []

    @staticmethod
    def now(function: Callable[..., Any], *tensors: Tensor | None) -> None:
        """Call it, as a step of the run that is recorded, if there is one."""
        call, recorder = Call(function, tensors), Recorder.active()
        if recorder is not None:
            call.step(recorder)
        if recorder is None or not recorder.compile_only:
            call.first()

    def step(self, recorder: Recorder, results: Sequence[Tensor] = ()) -> None:
        """Make this a step of the run, which allocates these results."""
        recorder.launch(self, [*self.tensors], results)
        for at, tensor in enumerate(self.tensors):
            place = None if tensor is None else recorder.place(tensor)
            if place is None:
                continue
            slot = recorder.slots[place.slot]
            # Not by identity: what `torch.empty` gives is another object here than what the recorder saw
            if place == recorder.place(slot):
                self.whole.append((at, place.slot))
            else:
                self.views.append((at, place.slot, place.viewer(slot, tensor)))

    def first(self) -> None:
        with no_modes():
            self.function(*self.tensors)

    def bind(self, places: Places) -> Callable:
        call = self.caller()
        return lambda slots, addresses: call(slots)

    def caller(self) -> Callable[[Sequence[Tensor]], Any]:
        """The call as a function of slots."""
        function, whole, views, count = self.function, self.whole, self.views, len(self.tensors)
        read = sorted({slot for _, slot, *_ in (*whole, *views)})
        self.tensors = ()  # no tensor is kept alive

        def call(slots: Sequence[Tensor]) -> Any:
            given: list[Tensor | None] = [None] * count
            for at, slot in whole:
                given[at] = slots[slot]
            for at, slot, view in views:
                given[at] = view(slots[slot])
            if torch.is_grad_enabled():
                for slot in read:
                    if slots[slot].requires_grad:  # without one autograd has nothing to record, and asking costs less
                        with torch.no_grad():
                            return function(*given)
            return function(*given)

        return call


class Made(Call):
    """A call of torch's own that allocates what it gives, such as a library's attention: a function of tensors that gives a tuple
    of tensors, of the same shapes, strides and dtypes for tensors that are alike. They are slots of the plan from then on."""

    @staticmethod
    def of(
        function: Callable[..., tuple[Tensor, ...]],
        tensors: Sequence[Tensor | None],
        like: Callable[[], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """What the function gives, as a step of the run that is recorded, if there is one. `like` allocates the same, for a run
        that launches nothing."""
        recorder = Recorder.active()
        with no_modes():
            launches = recorder is None or not recorder.compile_only
            results = tuple(own(t) for t in (function(*tensors) if launches else like()))
        if recorder is not None:
            Made(function, tensors).step(recorder, results)
        return results

    def bind(self, places: Places) -> Callable:
        make = self.caller()

        def replay(slots: list[Tensor], addresses: list[int]) -> None:
            for t in make(slots):
                slots.append(own(t))
                addresses.append(t.data_ptr())

        return replay


def own(t: Tensor) -> Tensor:
    """A tensor that torch does not know as a view, over the same memory: what a caller gets may be changed in place."""
    return Place(0, 0, t.shape, t.stride(), t.dtype).view(t) if t._is_view() else t


class Recorder(DispatchMode):
    """Watches one run of host code over `inputs`; slots are the inputs, then the allocations in order. Without `watch` there is
    no plan, torch calls cost what they do elsewhere, and memory is free again when the host code lets go of it. `instead` has, by
    their number, tensors over inputs' memory that host code gets in the place of what it asks to be allocated. A run that launches
    nothing, `compile_only`, writes no input either."""

    def __init__(
        self,
        inputs: list[Tensor],
        compile_only: bool = False,
        watch: bool = True,
        instead: Mapping[int, tuple[int, Tensor]] | None = None,
    ) -> None:
        super().__init__()
        self.compile_only, self.watch, self.instead, self.asked = compile_only, watch, instead or {}, 0
        self.inputs = len(inputs)
        self.slots: list[Tensor] = list(inputs)
        self.allocations: list[tuple[Place, Any]] = []  # and what fills them, or MADE
        self.launches: list[tuple[Any, Places]] = []
        self.before: list[int] = []  # of each launch: how many allocations there were
        self.foreign: str | None = None if watch else "nobody watched"
        self.adopted: list[tuple[Tensor, Callable[[], None]]] = []
        self._places: dict[int, tuple[Tensor, Place]] = {}  # by id; the tensor is kept alive so that ids stay unique
        if not watch:
            return
        # A plan finds arguments by identity: with one given twice, later calls with two would both read the last.
        if len({id(t) for t in inputs}) < len(inputs):
            self.foreign = "an argument that was given twice"
        for slot, tensor in enumerate(inputs):
            self._know(tensor, slot)

    @staticmethod
    def active() -> Recorder | None:
        return getattr(_local, "recorder", None)

    def __enter__(self) -> Recorder:
        self._outer, _local.recorder = self.active(), self
        return super().__enter__() if self.watch else self

    def __exit__(self, *error: Any) -> None:
        _local.recorder = self._outer
        if self.watch:
            super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.compile_only and func._schema.is_mutable:
            written = self._written(func, args, kwargs or {})
            if any(same_storage(t, slot) for t in written for slot in self.slots[: self.inputs]):
                self.foreign = self.foreign or str(func)
                return written[0] if len(written) == 1 else tuple(written)
        out = func(*args, **(kwargs or {}))
        if func in ALLOCATES and not out.is_meta:  # what only has a shape is no step of a run
            fill = ALLOCATES[func]
            fill = args[1] if fill is ... else fill
            slot, tensor = self.instead.get(self.asked, (len(self.slots), None))
            self.asked += 1
            if tensor is not None:
                self._know(tensor, slot)
                if fill is not None:
                    step = Fill(tensor, fill)
                    self.launch(step, [tensor])
                    if not self.compile_only:
                        step.first()
                return tensor
            self.slots.append(out)
            self._know(out, slot)
            self.allocations.append((self._places[id(out)][1], fill))
        elif (
            func.is_view and isinstance(out, Tensor) and id(args[0]) in self._places
            and same_storage(out, args[0])  # in inference mode `to`, `contiguous` and `reshape` come here, as views too
        ):  # fmt: skip
            self._know(out, self._places[id(args[0])][1].slot)
        else:
            self.foreign = self.foreign or str(func)
        return out

    @staticmethod
    def _written(func: Any, args: tuple, kwargs: Mapping[str, Any]) -> list[Tensor]:
        """The tensors that a torch call would write, which are what it gives."""
        given = {argument.name: value for argument, value in zip(func._schema.arguments, args)} | dict(kwargs)
        said = [a.name for a in func._schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        return [t for name in said for t in flattened(given.get(name)) if isinstance(t, Tensor)]

    def adopt(self, tensor: Tensor, before: Callable[[], None]) -> None:
        """Know memory that host code keeps for later calls, such as a table: the plan holds it, and calls `before` at each
        replay."""
        if not self.watch:
            return
        if len(self.slots) != self.inputs:
            self.foreign = self.foreign or "kept memory that was asked for after an allocation"
            return
        self.slots.append(tensor)
        self._know(tensor, self.inputs)
        self.inputs += 1
        self.adopted.append((tensor, before))

    def _know(self, tensor: Tensor, slot: int) -> None:
        offset = tensor.data_ptr() - self.slots[slot].data_ptr() if tensor.numel() else 0
        place = Place(slot, offset, tensor.shape, tensor.stride(), tensor.dtype)
        self._places[id(tensor)] = tensor, place

    def place(self, tensor: Tensor) -> Place | None:
        known = self._places.get(id(tensor))
        return known[1] if known else None

    def launch(self, launch: Any, ordered: list, results: Sequence[Tensor] = ()) -> None:
        """Know a step of the run, which allocates these results itself."""
        if not self.watch:
            return
        bases = [(at, getattr(v, "base", v)) for at, v in leaves(ordered)]  # a tensor descriptor has a base
        places = [(at, self.place(base)) for at, base in bases if isinstance(base, Tensor)]
        if launch.bind is None:
            self.foreign = self.foreign or f"a launch that cannot be replayed ({type(launch).__name__})"
        elif any(place is None for _, place in places):
            self.foreign = self.foreign or "a tensor that is neither an argument nor allocated here"
        self.launches.append((launch, places))
        self.before.append(len(self.allocations))
        for tensor in results:
            self.slots.append(tensor)
            self._know(tensor, len(self.slots) - 1)
            self.allocations.append((self._places[id(tensor)][1], MADE))
            self.asked += 1

    def stored_in(
        self, results: Sequence[Tensor | None], outs: Sequence[Tensor | None]
    ) -> dict[int, tuple[int, Tensor]]:
        """Of a run without the caller's memory: which allocations it can stand in for, `instead` of a second run. Left out are
        results that are no allocation of their own, a part of one, or one that a step makes."""
        slot_of = {id(t): slot for slot, t in enumerate(self.slots[: self.inputs])}
        found: dict[int, tuple[int, Tensor]] = {}
        for result, out in zip(results, outs):
            place = None if result is None or out is None else self.place(result)
            # Kernels may take it for granted that what they allocated is aligned
            if place is None or place.slot < self.inputs or id(out) not in slot_of or out.data_ptr() % 16:
                continue
            seen = _as_allocated(out, place, self.slots[place.slot])
            number = place.slot - self.inputs
            if seen is not None and number not in found and self.allocations[number][1] is not MADE:
                found[number] = slot_of[id(out)], seen
        return found

    def plan(self, results: Tensor | Sequence[Tensor | None], written: Sequence[int] = ()) -> Plan | None:
        """The recorded run as a plan that gives `results` and writes these inputs, or None with `foreign` saying why not."""
        single = isinstance(results, Tensor)
        flat = [results] if single else results
        places = [None if r is None else self.place(r) for r in flat]
        if any(p is None and r is not None for p, r in zip(places, flat)):
            self.foreign = self.foreign or "a result that was not allocated here"
        return None if self.foreign else Plan(self, places[0] if single else places, written)


def _as_allocated(out: Tensor, place: Place, allocated: Tensor) -> Tensor | None:
    """The caller's memory for a result, seen as host code saw the allocation that the result at `place` is a view of."""
    if place.offset or out.numel() != allocated.numel() or place.dtype.itemsize != allocated.dtype.itemsize:
        return None
    out = out if out.dtype == allocated.dtype else out.view(allocated.dtype)
    if (place.shape, place.stride) == (allocated.shape, allocated.stride()):
        return out  # the allocation itself: in whatever strides it is given
    sizes = [(n, s, t) for n, s, t in zip(place.shape, place.stride, out.stride()) if n > 1]
    if all(s == t for _, s, t in sizes):
        return out.as_strided(allocated.shape, allocated.stride(), out.storage_offset())
    if allocated.is_contiguous() and sizes and [s for _, s, _ in sizes] == _dense([n for n, _, _ in sizes]):
        try:
            return out.view(allocated.shape)
        except RuntimeError:  # its strides do not allow that
            return None
    return None


def _dense(sizes: Sequence[int]) -> list[int]:
    """The strides of a contiguous tensor of these sizes."""
    return [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
