"""A launch through the compiled launcher of Triton 3.7 and later.

That launcher is one C function for all kernels. It takes a kernel's arguments in one sequence beside annotations that say which
of them are constants or tuples. Given flat, without constants, all that a later call changes are numbers in a list.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.nest import Path
from ..core.private import raw_stream
from .launch import Places, Sent


class ListLaunch:
    """See the module. What this relies on is checked when it is made, and by `trial`."""

    def __init__(self, compiled: Any, grid: tuple, ordered: list) -> None:
        run = compiled.run
        driver = sys.modules[type(run).__module__]
        self.raw, self.device = driver.triton.runtime.driver.active.utils.launch, torch.cuda.current_device()
        self.grid = (*grid, 1, 1)[:3]
        meta = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        args: list[Any] = []  # no tensor is kept alive: addresses, numbers, boxes
        self.at: dict[Path, int] = {}  # of an argument: where among those it is, or its box
        self.makers: dict[Path, Callable[[int], Any]] = {}  # of a descriptor: its box at an address
        for path, value in _kept(tuple(compiled.src.signature.values()), tuple(ordered)):
            self.at[path] = len(args)
            if hasattr(value, "block_shape"):
                make = self.makers[path] = _maker(driver.make_tensordesc_arg, value, next(meta))
                args += [make(value.base.data_ptr()), *value.shape, *value.strides]
            else:
                args.append(value.data_ptr() if isinstance(value, Tensor) else value)
        if len(run.kernel_signature) != len(args):
            raise TypeError(f"the launcher takes {len(run.kernel_signature)} arguments, not {len(args)}")
        settings = run.launch_cooperative_grid, run.launch_pdl, compiled.packed_metadata
        annotations = driver.annotate_arguments(["i32"] * len(args))  # of whatever is no constant and no tuple
        # Function, settings, the launch's metadata, two hooks and two scratch memories (there are none), and what comes
        self.rest = (compiled.function, *settings, None, None, None, None, None, annotations, run.kernel_signature)
        self.args = args

    def trial(self) -> None:
        """Have the launcher read its arguments, and launch nothing: an empty grid does not reach the driver."""
        self.raw(0, 1, 1, raw_stream(self.device), *self.rest, self.args)

    def first(self) -> None:
        self.raw(*self.grid, raw_stream(self.device), *self.rest, self.args)

    def bind(self, places: Places) -> Callable:
        raw, device, stream, rest, (x, y, z) = self.raw, self.device, raw_stream, self.rest, self.grid
        template = self.args
        moves = [(self.at[path], place.slot, place.offset) for path, place in places if path not in self.makers]
        boxes = [
            (self.at[path], place.slot, place.offset, _remembered(self.makers[path]))
            for path, place in places
            if path in self.makers
        ]

        def replay(slots: list[Tensor], addresses: list[int]) -> None:
            args = template.copy()
            for at, slot, offset in moves:
                args[at] = addresses[slot] + offset
            for at, slot, offset, box in boxes:
                args[at] = box(addresses[slot] + offset)
            raw(x, y, z, stream(device), *rest, args)

        return replay

    def sent(self, paths: Sequence[Path]) -> Sent | None:
        """See `Sent`, with tensors at these paths; None where there are boxes."""
        if self.makers:
            return None
        return Sent(self.raw, self.device, self.args, [self.at[path] for path in paths], self.grid, self.rest)


def _kept(types: tuple, values: tuple, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """The arguments that are left at run time, those in tuples too, and where they are."""
    if len(types) != len(values):
        raise TypeError(f"the compiled kernel has {len(types)} arguments, not {len(values)}")
    for at, (kind, value) in enumerate(zip(types, values)):
        if isinstance(kind, tuple):
            yield from _kept(kind, value, (*path, at))
        elif kind != "constexpr":
            yield (*path, at), value


def _maker(make: Callable[..., list], descriptor: Any, meta: Any) -> Callable[[int], Any]:
    """A function that gives the box of a descriptor like this one at an address. Triton makes it of the descriptor; here a
    stand-in has all that is read of one, and keeps no tensor alive."""
    fields = {name: held for name, held in vars(descriptor).items() if name != "base"}
    more = (None,) * (len(inspect.signature(make).parameters) - 2)  # from 3.8 on, the launcher's other arguments

    def made(address: int) -> Any:
        base = SimpleNamespace(data_ptr=lambda: address)
        return make(SimpleNamespace(base=base, **fields), meta, *more)[0]

    return made


def _remembered(make: Callable[[int], Any]) -> Callable[[int], Any]:
    """The same, but the last box again where the address is the same, as a weight's always is."""
    last: tuple[int, Any] = (-1, None)

    def made(address: int) -> Any:
        nonlocal last
        known = last  # another thread may put its own there
        if known[0] != address:
            last = known = address, make(address)
        return known[1]

    return made
