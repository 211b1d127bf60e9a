"""Launches, the steps of a run: by the interpreter, by Triton's own call, by the compiled launcher of Triton 3.6. That of 3.7 and
later is `list_launch.py`'s."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from ..core.memory import span
from ..core.nest import Path, mapped, picker
from ..core.private import checked_view, no_modes, raw_stream, strided_view

STREAM = 3  # where a row of a launcher's arguments has it


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

    def viewer(self, base: Tensor, view: Tensor) -> Callable[[Tensor], Tensor]:
        """A function that takes `view`, which has this place, of any tensor like `base`, where nobody asks whether torch knows it
        as a view: that costs less."""
        if base.dtype != self.dtype:
            return self.view
        _, offset, shape, stride, dtype = self
        first, (start, end), (low, high) = offset // dtype.itemsize, span(view), span(base)
        # Padding past the last element another tensor may not have
        make = strided_view if low <= start and end <= high else checked_view
        return lambda base: make(base, shape, stride, first)


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
        args[STREAM] = raw_stream(self.device)
        self.raw(*args)

    def bind(self, places: Places) -> Callable:
        raw, device, stream = self.raw, self.device, raw_stream
        template = [None if isinstance(a, Tensor) else a for a in self.args]
        found = dict(places)
        moves, tuples, descriptors = [], [], []
        values = Values(found)
        for at in dict.fromkeys(path[0] for path in found):
            value = self.args[at + self.HEAD]
            template[at + self.HEAD] = None  # no tensor is kept alive
            if isinstance(value, tuple):
                tuples.append((at + self.HEAD, values.tuple_of(value, (at,))))
            elif isinstance(value, Tensor):
                moves.append((at + self.HEAD, values.index(value, (at,))))
            else:
                fields = {name: held for name, held in vars(value).items() if name != "base"}  # here neither
                descriptors.append((at + self.HEAD, found[at,], type(value), fields))
        shifted, constants = values.shifted, values.constants[::-1]

        def replay(slots: Sequence[Tensor], addresses: list[int]) -> None:
            args = template.copy()
            args[STREAM] = stream(device)
            values = addresses + constants if constants else addresses
            if shifted:
                values = [*[addresses[slot] + offset for slot, offset in shifted], *values]
            for at, index in moves:
                args[at] = values[index]
            for at, made in tuples:
                args[at] = made(values)
            for at, place, kind, fields in descriptors:
                base = slots[place.slot]
                args[at] = descriptor = kind.__new__(kind)
                descriptor.__dict__.update(fields, base=place.view(base) if place.offset else base)
            raw(*args)

        return replay

    def sent(self, paths: Sequence[Path]) -> Sent | None:
        """See `Sent`, with tensors at these paths; None where one is a part of an argument, or there are descriptors."""
        if any(len(path) > 1 for path in paths) or any(hasattr(a, "base") for a in self.args):
            return None
        args = [None if isinstance(a, Tensor) else a for a in self.args]
        return Sent(self.raw, self.device, args, [self.HEAD + path[0] for path in paths], tuple(args[:3]))


class Sent(NamedTuple):
    """What a launch hands to its compiled launcher: `raw(*args)` with the stream at `STREAM`, or `raw(*grid, stream, *rest, args)`
    where there is a `rest`; `raw(slots, args)` where there is no grid. From call to call the addresses of slots change, which
    belong at `at`, and the stream."""

    raw: Callable
    device: int
    args: list[Any]
    at: list[int]
    grid: tuple[int, int, int] | None
    rest: tuple = ()


class Values:
    """What the tuples among a launch's arguments are put together from, in one list: addresses within slots, those of slots, and
    constants, of which the first is the last."""

    def __init__(self, places: dict[Path, Place]) -> None:
        self.places = places
        self.shifted = [(place.slot, place.offset) for place in places.values() if place.offset]
        self.constants: list[Any] = []

    def index(self, value: Any, path: Path) -> int:
        """Where in the list an argument is that has been at this path."""
        place = self.places.get(path)
        if place is None:
            self.constants.append(value)
            return -len(self.constants)
        return self.shifted.index((place.slot, place.offset)) if place.offset else len(self.shifted) + place.slot

    def tuple_of(self, value: tuple, path: Path) -> Callable[[list[Any]], tuple]:
        """A function of the list that makes a tuple like this one, whose tensors become addresses."""
        items = [(item, (*path, at)) for at, item in enumerate(value)]
        nested = [any(other[: len(own)] == own and other != own for other in self.places) for _, own in items]
        if not any(nested):
            return picker([self.index(*item) for item in items])
        makers = [self.tuple_of(*one) if deep else itemgetter(self.index(*one)) for one, deep in zip(items, nested)]
        return lambda values: tuple([make(values) for make in makers])
