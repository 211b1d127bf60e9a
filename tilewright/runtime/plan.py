"""Plans: what one run of an op's host code allocated and launched, replayed without running that code again.

An op's `forward` is a pure function of shapes, strides, dtypes and numbers: it allocates, takes views and launches. `Recorder`
watches one run of it through the dispatcher, which sees every torch call; if nothing else happened, the run becomes a `Plan`
keyed by exactly those inputs, and the next call costs one allocation per result and one raw launch per kernel. If anything
else did happen (a copy of a strided argument, say) there is no plan, and the host code runs every time.
"""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.nest import Path, leaves, mapped
from ..core.private import DispatchMode, empty_strided_cuda, no_modes, raw_stream

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


class Place(NamedTuple):
    """A recorded tensor: bytes `offset` past the start of slot `slot`, seen through this shape."""

    slot: int
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype

    def view(self, base: Tensor) -> Tensor:
        """The recorded view, taken of the slot's tensor in a later call."""
        start = base.storage_offset() * base.element_size() + self.offset
        out = torch.empty(0, dtype=self.dtype, device=base.device)
        return out.set_(base.untyped_storage(), start // self.dtype.itemsize, self.shape, self.stride)

    def seen(self, base: Tensor) -> Tensor:
        """The same where nobody asks whether it is a view: torch may know it as one, which costs less."""
        if base.dtype != self.dtype:
            return self.view(base)
        return base.as_strided(self.shape, self.stride, base.storage_offset() + self.offset // self.dtype.itemsize)


Places = Sequence[tuple[Path, Place]]  # of a launch's tensors: where among its arguments, and which


class Launch(Protocol):
    """A step of a run."""

    def first(self) -> None:
        """Make it."""

    @property
    def bind(self) -> Callable[[Places], Callable[[list[Tensor], list[int]], None]] | None:
        """A function that makes it again with a later call's tensors and their addresses; None where only a run can."""


class HostLaunch:
    """A launch through the interpreter: it wants tensors, not addresses."""

    def __init__(self, jit: Any, grid: tuple, ordered: list) -> None:
        self.jit, self.grid, self.ordered = jit, grid, ordered

    def first(self) -> None:
        with no_modes():  # the interpreter's own torch calls are no part of what the op did
            self.jit[self.grid](*self.ordered)

    def bind(self, places: Places) -> Callable:
        found = dict(places)

        def replay(slots: list[Tensor], addresses: list[int]) -> None:
            def filled(path: Path, value: Any) -> Any:
                return found[path].view(slots[found[path].slot]) if path in found else value

            self.jit[self.grid](*mapped(filled, template))

        template = mapped(lambda _, value: None if isinstance(value, Tensor) else value, tuple(self.ordered))
        self.ordered = []  # no tensor is kept alive
        return replay


class PublicLaunch:
    """A launch through Triton's own call: any version, scratch memory, profiler hooks. Never replayed."""

    def __init__(self, compiled: Any, grid: tuple, ordered: list) -> None:
        self.compiled, self.grid, self.ordered = compiled, (*grid, 1, 1)[:3], ordered

    def first(self) -> None:
        self.compiled[self.grid](*self.ordered)

    bind = None


class CudaLaunch:
    """A launch through Triton 3.6's compiled launcher, given addresses as integers (which skips a driver query each)."""

    HEAD = 13  # launcher arguments before the kernel's own

    def __init__(self, compiled: Any, grid: tuple, ordered: list) -> None:
        run = compiled.run
        self.raw, self.device = run.launch, torch.cuda.current_device()
        head = [*(*grid, 1, 1)[:3], 0, compiled.function, run.launch_cooperative_grid, run.launch_pdl]
        self.args = [*head, None, None, compiled.packed_metadata, None, None, None, *ordered]

    def trial(self) -> None:
        """Have the launcher read its arguments, and launch nothing: an empty grid does not reach the driver."""
        self.raw(0, *self.args[1:3], raw_stream(self.device), *self.args[4:])

    def first(self) -> None:
        args = list(self.args)
        args[3] = raw_stream(self.device)
        self.raw(*args)

    def bind(self, places: Places) -> Callable:
        raw, device, stream = self.raw, self.device, raw_stream
        template = [None if isinstance(a, Tensor) else a for a in self.args]
        moves, descriptors, inside = [], [], {}
        for (at, *inner), place in places:
            value = self.args[at + self.HEAD]
            if inner:
                inside.setdefault(at, {})[tuple(inner)] = place
            elif isinstance(value, Tensor):
                moves.append((at + self.HEAD, place.slot, place.offset))
            else:
                template[at + self.HEAD] = None
                fields = {name: held for name, held in vars(value).items() if name != "base"}  # no tensor is kept alive
                descriptors.append((at + self.HEAD, place, type(value), fields))
        tuples = [(at + self.HEAD, _addresses_in(self.args[at + self.HEAD], found)) for at, found in inside.items()]
        for at, _ in tuples:
            template[at] = None  # here neither

        def replay(slots: list[Tensor], addresses: list[int]) -> None:
            args = template.copy()
            args[3] = stream(device)
            for at, slot, offset in moves:
                args[at] = addresses[slot] + offset
            for at, made in tuples:
                args[at] = made(addresses)
            for at, place, kind, fields in descriptors:
                base = slots[place.slot]
                args[at] = descriptor = kind.__new__(kind)
                descriptor.__dict__.update(fields, base=place.view(base) if place.offset else base)
            raw(*args)

        return replay

    def simple(self, inputs: Sequence[Path], output: Path, allocate: Callable[[], Tensor]) -> Callable | None:
        """The function of `Plan.simple`: arguments are single tensors, the result is one allocation."""
        if any(len(path) > 1 for path in (*inputs, output)) or any(hasattr(a, "base") for a in self.args):
            return None
        (x, y, z, _, *rest), own = self.args[: self.HEAD], self.args[self.HEAD :]
        template = [None if isinstance(a, Tensor) else a for a in own]
        ins = [path[0] for path in inputs]
        return simple_launch(self.raw, (x, y, z), self.device, rest, template, ins, output[0], allocate, spread=True)


def simple_launch(
    raw: Callable,
    grid: tuple[int, int, int],
    device: int,
    rest: Sequence[Any],
    template: list[Any],
    inputs: Sequence[int],
    output: int,
    allocate: Callable[[], Tensor],
    spread: bool,
) -> Callable[[tuple[Tensor, ...]], Tensor | None]:
    """The function of `Plan.simple` by a compiled launcher, `raw(*grid, stream, *rest, ...)`. The kernel's arguments follow one by
    one (`spread`) or in a list: a copy of `template`, with addresses at these places."""
    (x, y, z), stream = grid, raw_stream

    def simple(tensors: tuple[Tensor, ...]) -> Tensor | None:
        args = template.copy()
        low = 0
        for at, tensor in zip(inputs, tensors):
            address = tensor.data_ptr()
            low |= address
            args[at] = address
        if low & 15:
            return None
        result = allocate()
        args[output] = result.data_ptr()
        raw(x, y, z, stream(device), *rest, *(args if spread else (args,)))
        return result

    if len(inputs) != 2:
        return simple
    one, other = inputs

    def pair(tensors: tuple[Tensor, ...]) -> Tensor | None:
        """The same for two arguments: without the loop Python's own part takes a seventh less."""
        first, second = tensors
        a, b = first.data_ptr(), second.data_ptr()
        if (a | b) & 15:
            return None
        result = allocate()
        args = template.copy()
        args[one], args[other], args[output] = a, b, result.data_ptr()
        raw(x, y, z, stream(device), *rest, *(args if spread else (args,)))
        return result

    return pair


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
        self.whole: set[int] = set()  # which of them are slots as they are

    @staticmethod
    def now(function: Callable[..., Any], *tensors: Tensor | None) -> None:
        """Call it, as a step of the run that is recorded, if there is one."""
        call, recorder = Call(function, tensors), Recorder.active()
        if recorder is not None:
            recorder.launch(call, [*tensors])
            call.whole = {at for at, t in enumerate(tensors) if any(t is slot for slot in recorder.slots)}
        if recorder is None or not recorder.compile_only:
            call.first()

    def first(self) -> None:
        with no_modes():
            self.function(*self.tensors)

    def bind(self, places: Places) -> Callable:
        function, found = self.function, dict(places)
        count = len(self.tensors)
        self.tensors = ()  # no tensor is kept alive
        slot_of = [(at, found[at,].slot) for at in sorted(self.whole)]
        views = [(at, found[at,]) for at in range(count) if (at,) in found and at not in self.whole]

        def replay(slots: list[Tensor], addresses: list[int]) -> None:
            given: list[Tensor | None] = [None] * count
            with torch.no_grad():
                for at, slot in slot_of:
                    given[at] = slots[slot]
                for at, place in views:
                    given[at] = place.seen(slots[place.slot])
                function(*given)

        return replay


class Recorder(DispatchMode):
    """Watches one run of host code over `inputs`; slots are the inputs, then the allocations in order. Without `watch` there is
    no plan, torch calls cost what they do elsewhere, and memory is free again when the host code lets go of it. `instead` has, by
    their number, tensors over inputs' memory that host code gets in the place of what it asks to be allocated."""

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
        self.allocations: list[tuple[Place, float | None]] = []
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
        elif func.is_view and isinstance(out, Tensor) and id(args[0]) in self._places:
            self._know(out, self._places[id(args[0])][1].slot)
        else:
            self.foreign = self.foreign or str(func)
        return out

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

    def launch(self, launch: Any, ordered: list) -> None:
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

    def stored_in(
        self, results: Sequence[Tensor | None], outs: Sequence[Tensor | None]
    ) -> dict[int, tuple[int, Tensor]]:
        """Of a run without the caller's memory: which allocations it can stand in for, `instead` of a second run. Left out are
        results that are no allocation of their own, or a part of one."""
        slot_of = {id(t): slot for slot, t in enumerate(self.slots[: self.inputs])}
        found: dict[int, tuple[int, Tensor]] = {}
        for result, out in zip(results, outs):
            place = None if result is None or out is None else self.place(result)
            # Kernels may take it for granted that what they allocated is aligned
            if place is None or place.slot < self.inputs or id(out) not in slot_of or out.data_ptr() % 16:
                continue
            seen = _as_allocated(out, place, self.slots[place.slot])
            number = place.slot - self.inputs
            if seen is not None and number not in found:
                found[number] = slot_of[id(out)], seen
        return found

    def plan(self, results: list[Tensor | None]) -> Plan | None:
        """The recorded run as a plan giving `results`, or None with `foreign` saying why not."""
        places = [None if r is None else self.place(r) for r in results]
        if any(p is None and r is not None for p, r in zip(places, results)):
            self.foreign = self.foreign or "a result that was not allocated here"
        return None if self.foreign else Plan(self, places)


class Plan:
    """A recorded run. Calling it with a later call's tensors and their addresses gives the flat results."""

    def __init__(self, recorder: Recorder, results: list[Place | None]) -> None:
        self._adopted = [(tensor, tensor.data_ptr(), before) for tensor, before in recorder.adopted]
        self.inputs = recorder.inputs - len(self._adopted)  # which calls give
        self._allocate = [_allocator(recorder, place, fill) for place, fill in recorder.allocations]
        self._launch = [launch.bind(places) for launch, places in recorder.launches]
        self._stages = self._in_stages(recorder, {p.slot for p in results if p is not None})
        # A result that is a whole allocation (or argument) is handed out as it is; a view of one is taken anew.
        whole = [recorder.place(s) for s in recorder.slots]
        self._results = [None if p is None else (p.slot, None if whole[p.slot] == p else p) for p in results]
        self._whole = all(r is None or r[1] is None for r in self._results)
        self.single = len(results) == 1 and results[0] is not None and self._results[0][1] is None
        device = recorder.slots[0].device
        self._elsewhere = device if device.type == "cuda" and torch.cuda.device_count() > 1 else None
        self.simple = None if self._adopted else self._simple(recorder)

    def __call__(self, slots: list[Tensor], addresses: list[int]) -> Any:
        for tensor, address, before in self._adopted:
            before()
            slots.append(tensor)
            addresses.append(address)
        if self._elsewhere is not None and torch.cuda.current_device() != self._elsewhere.index:
            with torch.cuda.device(self._elsewhere):
                return self._run(slots, addresses)
        return self._run(slots, addresses)

    def _run(self, slots: list[Tensor], addresses: list[int]) -> Any:
        for allocations, launches, over in self._stages:
            for allocate in allocations:
                tensor = allocate()
                slots.append(tensor)
                addresses.append(tensor.data_ptr())
            for launch in launches:
                launch(slots, addresses)
            for slot in over:
                slots[slot] = None
        if self.single:
            return slots[self._results[0][0]]
        if self._whole:
            return [None if r is None else slots[r[0]] for r in self._results]
        return [None if r is None else slots[r[0]] if r[1] is None else r[1].view(slots[r[0]]) for r in self._results]

    def _in_stages(self, recorder: Recorder, kept: set[int]) -> list[tuple[list[Callable], list[Callable], list[int]]]:
        """(allocations, launches after them, slots that no later one needs): what ends within the run leaves its memory to what
        begins later, as it does when the host code runs."""
        uses = {place.slot: at for at, (_, places) in enumerate(recorder.launches) for _, place in places}
        temporary = {slot: at for slot, at in uses.items() if slot >= recorder.inputs and slot not in kept}
        stages, made = [], 0
        for count, group in itertools.groupby(range(len(self._launch)), recorder.before.__getitem__):
            at = [*group]
            over = [slot for slot, use in temporary.items() if use in at]
            stages.append((self._allocate[made:count], self._launch[at[0] : at[-1] + 1], over))
            made = count
        return [*stages, (self._allocate[made:], [], [])] if made < len(self._allocate) else stages

    def _simple(self, recorder: Recorder) -> Callable[[tuple[Tensor, ...]], Tensor | None] | None:
        """The plan of most small ops in as few steps as Python allows: one allocation, which is the result, and one launch
        that takes every argument once. The function gives None when an argument is not aligned to 16 bytes."""
        launches, count = recorder.launches, recorder.inputs
        if not (self.single and len(launches) == len(self._allocate) == 1 and self._elsewhere is None):
            return None
        launch, places = launches[0]
        paths = {place.slot: path for path, place in places if place.offset == 0}
        if not hasattr(launch, "simple") or len(places) != count + 1 or set(paths) != set(range(count + 1)):
            return None
        if self._results[0][0] != count:
            return None
        return launch.simple([paths[i] for i in range(count)], paths[count], self._allocate[0])


def _addresses_in(value: tuple, places: dict[Path, Place]) -> Callable[[list[int]], tuple]:
    """A function that makes a tuple argument of a later call: its tensors become addresses."""
    fixed, moves, nested = list(value), [], []
    for at, item in enumerate(value):
        if isinstance(item, tuple):
            inner = {path[1:]: place for path, place in places.items() if path[0] == at}
            if inner:
                nested.append((at, _addresses_in(item, inner)))
        elif (at,) in places:
            fixed[at] = None  # no tensor is kept alive
            moves.append((at, places[at,].slot, places[at,].offset))

    def made(addresses: list[int]) -> tuple:
        parts = fixed.copy()
        for at, slot, offset in moves:
            parts[at] = addresses[slot] + offset
        for at, inner in nested:
            parts[at] = inner(addresses)
        return tuple(parts)

    return made


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


def _allocator(recorder: Recorder, place: Place, fill: float | None) -> Callable[[], Tensor]:
    """A function that makes an allocation again."""
    device = recorder.slots[place.slot].device
    shape, stride, dtype = tuple(place.shape), place.stride, place.dtype
    if fill == 0:
        return lambda: torch.zeros(shape, dtype=dtype, device=device)
    if fill is not None:
        return lambda: torch.full(shape, fill, dtype=dtype, device=device)
    if empty_strided_cuda is not None and device.type == "cuda":
        return functools.partial(empty_strided_cuda, shape, stride, dtype)
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)
