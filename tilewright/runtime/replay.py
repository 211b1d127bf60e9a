"""`Plan`: a recorded run as one function, which makes it again with the tensors of a later call.

What a plan is, is known when it is made. So its function is one of a few closures over all that does not change: launchers and what
they are called with, allocations, where results are.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, Protocol

import torch
from torch import Tensor

from ..core.memory import span
from ..core.nest import picker
from ..core.private import empty_strided_cuda, raw_stream
from .launch import STREAM, Place, Places, Sent

MADE = object()  # in the place of what fills an allocation: a launch makes it


class Recorded(Protocol):
    """A run, as `plan.Recorder` saw it."""

    slots: list[Tensor]  # inputs, then what was adopted, then allocations
    inputs: int  # and adopted
    adopted: list[tuple[Tensor, Callable[[], None]]]
    allocations: list[tuple[Place, Any]]  # and what fills them, or MADE
    launches: list[tuple[Any, Places]]
    before: list[int]  # of each launch: how many allocations there were

    def place(self, tensor: Tensor) -> Place | None: ...


class Plan:
    """A recorded run.

    `function(tensors)` makes it again with the tensors of a later call, and gives the results: one tensor, or a tuple of tensors
    and None. Where these tensors are not aligned to 16 bytes as those of the recorded run were, or memory that is written meets
    other memory, it gives None and has done nothing. `function(tensors, True)` does not ask whether memory meets.
    """

    def __init__(self, recorder: Recorded, results: Place | list[Place | None], written: Sequence[int] = ()) -> None:
        given = recorder.slots[: recorder.inputs - len(recorder.adopted)]
        self.inputs = len(given)  # which calls give
        self.launches = len(recorder.launches)
        self.pairs = _pairs(given, written)
        wrong = 0 if any(t.data_ptr() & 15 for t in given) else 15  # bits of an address
        allocate = [_allocator(recorder, place, fill) for place, fill in recorder.allocations]
        gives = _giver(recorder, results)
        if self.launches == 1 and given and not recorder.adopted and None not in allocate:
            made = [recorder.place(slot) for slot in recorder.slots[recorder.inputs :]]
            # Two are codes and scales, and None stands in the place of offsets
            as_made = made[0] if len(made) == 1 else [*made, None] if made else []
            simple = len(made) <= 2 and results == as_made
            sent = _straight(recorder) or _bound(recorder)
            function = _only_launch(sent, wrong, self.pairs, self.inputs, allocate, None if simple else gives)
        else:
            adopted = [(tensor, tensor.data_ptr(), before) for tensor, before in recorder.adopted]
            function = _in_stages(_stages(recorder, results, allocate), wrong, self.pairs, adopted, gives)
        self.function = _on_device(recorder.slots[0].device, function)

    def apart(self, addresses: Sequence[int]) -> bool:
        """Whether, of inputs at these addresses, those that are written share memory with no other."""
        return not _meet(addresses, self.pairs)


# ---------------------------------------------------------------- the function of a plan

Function = Callable[..., Any]
# A written input, another; between which distances of the first from the second they share memory
Pairs = Sequence[tuple[int, int, int, int]]
Stages = Sequence[tuple[list[Callable], list[Callable], list[int]]]


def _only_launch(
    sent: Sent, wrong: int, pairs: Pairs, inputs: int, allocate: list[Callable], gives: Callable | None
) -> Function:
    """The function of a plan that is a single launch: most small ops. The host's time is all that such a call costs, so what is
    done twice, once or not at all is no loop. Without `gives` the result is the one allocation, two and None, or nothing."""
    (raw, device, _, at, grid, rest), stream = sent, raw_stream
    x, y, z = grid or (0, 0, 0)
    read = _reader(sent.args, at[:inputs], wrong)
    pairs = [(at[one], at[other], *between) for one, other, *between in pairs]
    each = [*zip(at[inputs:], allocate)]
    alone, pair = (len(each) == count and gives is None for count in (1, 2))
    (one_at, make_one), (two_at, make_two) = (*each, (0, None), (0, None))[:2]

    def function(tensors: Sequence[Tensor], meeting: bool = False) -> Any:
        args = read(tensors)
        if args is None:
            return None
        if pairs and not meeting:
            for one, other, before, after in pairs:  # `_meet`, without a call
                if before < args[one] - args[other] < after:
                    return None
        slots = tensors
        if alone:
            result = make_one()
            args[one_at] = result.data_ptr()
            if grid is None:
                slots = (*tensors, result)
        elif pair:
            one, two = make_one(), make_two()
            args[one_at], args[two_at] = one.data_ptr(), two.data_ptr()
            result = one, two, None
            if grid is None:
                slots = (*tensors, *result)
        elif gives is not None:
            slots = [*tensors]
            for at, make in each:
                tensor = make()
                args[at] = tensor.data_ptr()
                slots.append(tensor)
            slots.append(None)
            result = gives(slots)
        else:
            result = ()
        if grid is None:
            raw(slots, args)
        elif rest:
            raw(x, y, z, stream(device), *rest, args)
        else:
            args[STREAM] = stream(device)
            raw(*args)
        return result

    return function


def _reader(template: list[Any], at: Sequence[int], wrong: int) -> Callable[[Sequence[Tensor]], list[Any] | None]:
    """A function that puts the addresses of tensors at these places in a copy of `template`; None if one has a bit that is wrong.
    Up to three are read one by one: a loop takes the host longer than all else that is done here."""

    def read_one(tensors: Sequence[Tensor]) -> list[Any] | None:
        one = tensors[0].data_ptr()
        if one & wrong:
            return None
        args = template.copy()
        args[first] = one
        return args

    def read_two(tensors: Sequence[Tensor]) -> list[Any] | None:
        x, y = tensors
        one, two = x.data_ptr(), y.data_ptr()
        if (one | two) & wrong:
            return None
        args = template.copy()
        args[first], args[second] = one, two
        return args

    def read_three(tensors: Sequence[Tensor]) -> list[Any] | None:
        x, y, z = tensors
        one, two, three = x.data_ptr(), y.data_ptr(), z.data_ptr()
        if (one | two | three) & wrong:
            return None
        args = template.copy()
        args[first], args[second], args[third] = one, two, three
        return args

    def read_any(tensors: Sequence[Tensor]) -> list[Any] | None:
        args, low = template.copy(), 0
        for place, tensor in zip(at, tensors):
            args[place] = address = tensor.data_ptr()
            low |= address
        return None if low & wrong else args

    first, second, third = (*at, 0, 0)[:3]
    return {1: read_one, 2: read_two, 3: read_three}.get(len(at), read_any)


def _in_stages(stages: Stages, wrong: int, pairs: Pairs, adopted: list, gives: Callable) -> Function:
    """The function of any plan."""

    def function(tensors: Sequence[Tensor], meeting: bool = False) -> Any:
        slots: list[Any] = [*tensors]
        addresses: list[int] = []
        low = 0
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            low |= address
        if low & wrong or (pairs and not meeting and _meet(addresses, pairs)):
            return None
        for tensor, address, before in adopted:
            before()
            slots.append(tensor)
            addresses.append(address)
        for allocations, launches, over in stages:
            for allocate in allocations:
                tensor = allocate()
                slots.append(tensor)
                addresses.append(tensor.data_ptr())
            for launch in launches:
                launch(slots, addresses)
            for slot in over:
                slots[slot] = None
        slots.append(None)
        return gives(slots)

    return function


def _on_device(device: torch.device, function: Function) -> Function:
    """The same from whichever device is the current one."""
    if device.type != "cuda" or torch.cuda.device_count() < 2:
        return function

    def there(tensors: Sequence[Tensor], meeting: bool = False) -> Any:
        if torch.cuda.current_device() == device.index:
            return function(tensors, meeting)
        with torch.cuda.device(device):
            return function(tensors, meeting)

    return there


def _giver(recorder: Recorded, results: Place | list[Place | None]) -> Callable[[list], Any]:
    """A function that takes the results from all slots, after which there is None. One that is a whole allocation (or argument) is
    handed out as it is; a view of one is taken anew."""
    whole = [recorder.place(slot) for slot in recorder.slots]
    if isinstance(results, Place):
        one = results.slot
        return itemgetter(one) if whole[one] == results else lambda slots: results.view(slots[one])
    at = [-1 if p is None else p.slot for p in results]
    if all(p is None or whole[p.slot] == p for p in results):
        return picker(at)
    views = [None if p is None or whole[p.slot] == p else p for p in results]
    return lambda slots: tuple([slots[i] if view is None else view.view(slots[i]) for i, view in zip(at, views)])


def _straight(recorder: Recorded) -> Sent | None:
    """What the only launch of a run sends, if every slot is one of its arguments, once and from its start."""
    launch, places = recorder.launches[0]
    paths = {place.slot: path for path, place in places if place.offset == 0}
    count = len(recorder.slots)
    if not hasattr(launch, "sent") or len(places) != count or set(paths) != set(range(count)):
        return None
    return launch.sent([paths[slot] for slot in range(count)])


def _bound(recorder: Recorded) -> Sent:
    """The only launch of a run as one that is sent slots and, in the place of arguments, the address of each; it has no grid."""
    launch, places = recorder.launches[0]
    count = len(recorder.slots)
    return Sent(launch.bind(places), 0, [None] * count, [*range(count)], None)


def _stages(recorder: Recorded, results: Place | list[Place | None], allocate: list[Callable | None]) -> Stages:
    """(allocations, launches after them, slots that no later one needs): what ends within the run leaves its memory to what
    begins later, as it does when the host code runs."""
    kept = {p.slot for p in ([results] if isinstance(results, Place) else results) if p is not None}
    launch = [launch.bind(places) for launch, places in recorder.launches]
    uses = {place.slot: at for at, (_, places) in enumerate(recorder.launches) for _, place in places}
    temporary = {slot: at for slot, at in uses.items() if slot >= recorder.inputs and slot not in kept}
    stages, done = [], 0
    for count, group in itertools.groupby(range(len(launch)), recorder.before.__getitem__):
        at = [*group]
        over = [slot for slot, use in temporary.items() if use in at]
        stages.append((_left(allocate[done:count]), launch[at[0] : at[-1] + 1], over))
        done = count
    return [*stages, (_left(allocate[done:]), [], [])] if done < len(allocate) else stages


def _left(allocate: Sequence[Callable | None]) -> list[Callable]:
    """The allocations that no launch has made: those of a launch come after it and before all that are asked for later."""
    return [one for one in allocate if one is not None]


def _pairs(given: Sequence[Tensor], written: Sequence[int]) -> Pairs:
    """The inputs whose memory must be apart: each that is written, with every other."""
    sizes = [end - start if t.numel() else 0 for t, (start, end) in zip(given, map(span, given))]
    return [
        (at, other, -sizes[at], sizes[other])
        for at in written
        for other, size in enumerate(sizes)
        if size and sizes[at] and other != at and not (other in written and other < at)
    ]


def _meet(addresses: Sequence[int], pairs: Pairs) -> bool:
    """Whether the memory of a pair does."""
    for one, other, before, after in pairs:  # noqa: SIM110 - a generator takes the host longer
        if before < addresses[one] - addresses[other] < after:
            return True
    return False


def _allocator(recorder: Recorded, place: Place, fill: Any) -> Callable[[], Tensor] | None:
    """A function that makes an allocation again; None of what a launch makes."""
    if fill is MADE:
        return None
    device = recorder.slots[place.slot].device
    shape, stride, dtype = tuple(place.shape), place.stride, place.dtype
    if fill is not None and not recorder.slots[place.slot].is_contiguous():
        return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device).fill_(fill)
    if fill == 0:
        return lambda: torch.zeros(shape, dtype=dtype, device=device)
    if fill is not None:
        return lambda: torch.full(shape, fill, dtype=dtype, device=device)
    if empty_strided_cuda is not None and device.type == "cuda":
        return functools.partial(empty_strided_cuda, shape, stride, dtype)
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)
