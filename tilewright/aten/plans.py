"""Plans: what a call of a replaced operator allocates and launches, made again for a later call that is like it.

A run of a form is a few allocations, which it says to `own`, and a few launches, which it makes by `launch`. A `Run` keeps both.
If every tensor of every launch is an argument, an allocation or a view of one, the run becomes a plan: one function of a later
call's tensors and numbers. Nothing watches the dispatcher: a call that is like none before costs little more than its run.

Numbers that reach a kernel are slots, not parts of a key. On the way to a launch such a number is of a class that knows which of
the call's arguments it is.

Kernels of these engines specialise on no integer. A launch finds its variant by dtypes and alignment of tensors, the constants and
whether an integer needs 64 bits, and hands addresses and numbers to Triton's compiled launcher itself.
"""

from __future__ import annotations

import contextlib
import functools
import math
import struct
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.debug import can_read
from ..core.memory import span
from ..core.private import empty_strided_cuda, raw_stream
from ..core.target import INTERPRETING
from ..core.tensor import name_of
from ..runtime.kernel import Kernel, collecting
from ..runtime.launch import STREAM, Place, Sent
from ..runtime.plan import Recorder
from .row import Declined

LEAST, MOST = -(2**31), 2**31 - 1  # integers that an int32 holds


class _Thread(threading.local):
    run: Run | None = None  # the one that this thread is inside


thread = _Thread()


# ---- numbers ---------------------------------------------------------------------------------------------------------


class Whole(int):
    """An int that is the call's argument `at`."""

    at: int


class Fraction(float):
    """A float that is the call's argument `at`."""

    at: int


class Bits(int):
    """A number of the call as the int64 that a kernel takes: which argument it is, and what makes the one of the other."""

    at: int
    convert: Callable[[Any], int]


def slot(value: float, at: int) -> Whole | Fraction:
    made = Fraction(value) if isinstance(value, float) else Whole(value)
    made.at = at
    return made


_bits_of_float, _int_of_bits = struct.Struct("d").pack, struct.Struct("q").unpack


def float_bits(value: float) -> int:
    return _int_of_bits(_bits_of_float(value))[0]


def int_bits(value: float) -> int:
    if isinstance(value, float) and not value.is_integer() or not -(2**63) <= value < 2**63:
        raise Declined("a number that no int64 is", lasting=False)
    return int(value)


@functools.cache
def cast_to(dtype: torch.dtype) -> Callable[[float], int]:
    """What makes the int64 that a kernel takes of a number that aten casts to this dtype first, on the host: fractions of integers
    are cut off, and a number that the dtype cannot hold is refused."""
    if dtype == torch.bool:
        return lambda value: int(value != 0)
    if dtype.is_floating_point:
        most = torch.finfo(dtype).max

        def held(value: float) -> int:
            if most < abs(value) < math.inf:
                raise Declined(f"a number that no {name_of(dtype)} is", lasting=False)
            return float_bits(value)

        return held
    info = torch.iinfo(dtype)

    def cut(value: float) -> int:
        # Of integers, but not of fractions, torch lets negative ones wrap around to unsigned ones
        least = -info.max if isinstance(value, int) and not info.min else info.min
        if not least <= value <= info.max:
            raise Declined(f"a number that no {name_of(dtype)} is", lasting=False)
        return int(value) % (info.max + 1) if not info.min else int(value)

    return cut


def bits_of(value: float, compute: torch.dtype) -> int:
    """A number as the int64 that a kernel takes, which computes in this dtype."""
    return converted(value, int_bits if compute == torch.int64 else float_bits)


def cast_bits(value: float, dtype: torch.dtype) -> int:
    """The same of a number that aten casts to this dtype first."""
    return converted(value, cast_to(dtype))


def converted(value: float, convert: Callable[[Any], int]) -> int:
    bits = convert(value)
    if type(value) in (Whole, Fraction):
        bits = Bits(bits)
        bits.at, bits.convert = value.at, convert
    return bits


# ---- runs ------------------------------------------------------------------------------------------------------------


class Step(NamedTuple):
    """A launch of a run: its tensors and the numbers after its sizes; `args`, which its launcher was given if that is called
    directly; and a call of the kernel with other tensors and numbers."""

    tensors: Sequence[Tensor | None]
    numbers: Sequence[int]
    sent: Sent | None
    args: list[Any]
    grid: tuple[int, int, int]
    call: Callable[[Sequence[Tensor | None], Sequence[int]], None]


class Run:
    """A run of host code, in its thread: inside it torch's operators are torch's own."""

    def __init__(self) -> None:
        self.made: list[Tensor] = []
        self.steps: list[Step] = []
        self.again = True  # whether a later call can be made from it
        self.guarded = True  # whether it depends on nothing but what torch's guards see
        self.flat = 0  # elements a program, of a launch over elements one by one in tensors that lie alike

    def __enter__(self) -> Run:
        self.outer, thread.run = thread.run, self
        return self

    def __exit__(self, *error: object) -> None:
        thread.run = self.outer


def own(tensor: Tensor) -> Tensor:
    """Say that memory was allocated, and hand it back."""
    run = thread.run
    if run is not None:
        run.made.append(tensor)
    return tensor


def only_now() -> None:
    """Say that this run does what no plan does, such as resize an argument."""
    if thread.run is not None:
        thread.run.again = False


def look_at(indices: Tensor, check: Callable[[], None]) -> None:
    """Check what indices are, if that was asked for: then host code does at every call's, which no plan would."""
    if can_read(indices):
        only_now()
        check()


def by_key_alone() -> None:
    """Say that this run read what guards do not see: torch's default dtype."""
    if thread.run is not None:
        thread.run.guarded = False


def one_by_one(program: int) -> None:
    """Say that the next launch goes over elements one by one, so many a program, in tensors of one shape without gaps: how many
    there are, its only size, is all that it depends on."""
    if thread.run is not None:
        thread.run.flat = program


# ---- launches --------------------------------------------------------------------------------------------------------


class Variant(NamedTuple):
    """A compiled kernel: what its launcher is given, None if that is not called directly; where in it sizes begin; and what its
    grid is computed from. `how` is kept alive, for variants know it by its id."""

    sent: Sent | None
    sizes: int
    index: dict[str, int]
    constants: Sequence[Any]
    how: Any


class Named:
    """A kernel's arguments as attributes, for its grid."""

    __slots__ = ("index", "values")

    def __init__(self, index: dict[str, int], values: Sequence[Any]) -> None:
        self.index, self.values = index, values

    def __getattr__(self, name: str) -> Any:
        return self.values[self.index[name]]


class Heard(Recorder):
    """Hears of the launch that a kernel makes. It is no dispatch mode, for it does not `watch`."""

    def __init__(self) -> None:
        super().__init__([], watch=False)
        self.said: tuple[Any, list] | None = None

    def launch(self, launch: Any, ordered: list) -> None:
        self.said = launch, ordered


_variants: dict[tuple, Variant] = {}


def launch(
    kernel: Kernel,
    tensors: Sequence[Tensor | None],
    sizes: Sequence[int],
    numbers: Sequence[int] = (),
    how: Any = None,
    **constants: Any,
) -> None:
    """Launch a kernel whose arguments are tensors, then integers that are never specialised, then numbers of 64 bits, then
    constants, `how` being HOW."""
    call = functools.partial(_call, kernel, sizes, how, constants)
    if INTERPRETING or collecting():
        call(tensors, numbers)
        _keep(Step(tensors, numbers, None, [], (0, 0, 0), call))
        return
    kinds = tuple([None if t is None else (t.dtype, not t.data_ptr() & 15) for t in tensors])
    wide = None if max(sizes) <= MOST and min(sizes) >= LEAST else tuple([LEAST <= n <= MOST for n in sizes])
    device = next(t for t in tensors if t is not None).get_device()
    key = (kernel, device, kinds, wide, id(how), *constants.values())
    variant = _variants.get(key)
    if variant is None:
        with Heard() as heard:  # Triton compiles, if it must
            call(tensors, numbers)
        if heard.said is None:  # of no programs
            return
        variant = _variants[key] = _variant(kernel, *heard.said, len(tensors) + len(sizes) + len(numbers), how)
        args, grid = _filled(kernel, variant, tensors, sizes, numbers)
    else:
        args, grid = _filled(kernel, variant, tensors, sizes, numbers)
        if 0 in grid:
            return
        if variant.sent is None:
            call(tensors, numbers)
        else:
            with _on(variant.sent.device):
                _send(variant.sent, grid, args)
    _keep(Step(tensors, numbers, variant.sent, args, grid, call))


def _call(kernel: Kernel, sizes: Any, how: Any, constants: dict[str, Any], tensors: Any, numbers: Any) -> None:
    if how is not None:
        constants = {**constants, "HOW": how}
    kernel(*tensors, *sizes, *map(int, numbers), **constants)


def _keep(step: Step) -> None:
    if thread.run is not None:
        thread.run.steps.append(step)


def _variant(kernel: Kernel, made: Any, ordered: list, count: int, how: Any) -> Variant:
    """The variant behind a launch, of a kernel that has so many arguments beside constants."""
    there = [i for i, value in enumerate(ordered[:count]) if value is not None]
    sent = made.sent([(i,) for i in there]) if hasattr(made, "sent") else None
    tensors = sum(isinstance(value, Tensor) for value in ordered)
    index = {name: i for i, name in enumerate(kernel.names)}
    return Variant(sent, 0 if sent is None else sent.at[tensors], index, ordered[count:], how)


def _filled(
    kernel: Kernel, variant: Variant, tensors: Any, sizes: Any, numbers: Any
) -> tuple[list[Any], tuple[int, int, int]]:
    """What the launcher of a variant is given for these arguments, and the grid."""
    grid = (*kernel.grid(Named(variant.index, (*tensors, *sizes, *numbers, *variant.constants))), 1, 1)[:3]
    sent, first = variant.sent, variant.sizes
    if sent is None:
        return [], grid
    args = sent.args.copy()
    for at, tensor in zip(sent.at, [t for t in tensors if t is not None]):
        args[at] = tensor.data_ptr()
    args[first : first + len(sizes) + len(numbers)] = (*sizes, *numbers)
    if not sent.rest:
        args[:3] = grid
    return args, grid


def _send(sent: Sent, grid: tuple[int, int, int], args: list[Any]) -> None:
    if sent.rest:
        sent.raw(*grid, raw_stream(sent.device), *sent.rest, args)
    else:
        args[STREAM] = raw_stream(sent.device)
        sent.raw(*args)


@functools.cache
def _several_devices() -> bool:
    return torch.cuda.device_count() > 1


def _on(device: int) -> Any:
    """A context in which this device is the current one."""
    return torch.cuda.device(device) if _several_devices() else _nothing


_nothing = contextlib.nullcontext()


# ---- plans -----------------------------------------------------------------------------------------------------------

Function = Callable[[Sequence[Tensor], Sequence[Any]], Any]
Moves = list[
    tuple[int, int, int]
]  # of a launch's tensors: where its launcher takes it, which slot it is, from which byte on


class Plan(NamedTuple):
    """`function(tensors, values)` makes a call of these tensors, which are among its values, and gives its result; or None, where
    memory is not aligned as it was or would be read and written: nothing is done then. `guarded`: a call that torch's guard takes
    for the same may take it."""

    function: Function
    guarded: bool
    flat: Function | None = None  # the same for tensors of any other shape that lie alike and are aligned alike


def plan_of(run: Run, given: Sequence[Tensor], written: Sequence[int], numbers: set[int], result: Any) -> Plan | None:
    """The plan of a run with the tensors `given`, each once, of which some are `written`, and numbers at these places; None if a
    later call cannot be made from it."""
    slots = [*given, *run.made]
    results = result if isinstance(result, tuple) else (result,)
    gives = [_place(slots, t) for t in results if t is not None]  # None: a gradient that is not asked for
    places = [[_place(slots, t) for t in step.tensors] for step in run.steps]
    unknown = any(
        p is None and t is not None for own, step in zip(places, run.steps) for p, t in zip(own, step.tensors)
    )
    # A number that no launch was given was read by host code, and no key tells it
    unseen = numbers - {n.at for step in run.steps for n in step.numbers if isinstance(n, Bits)}
    if not run.again or unknown or (run.steps and unseen) or any(p is None or p[1] for p in gives):
        return None
    aligned = not any(t.data_ptr() & 15 for t in given)
    pairs, wrong = _pairs(given, written), 15 if aligned else 0
    allocate = [_allocator(t) for t in run.made]
    places_of = iter(gives)
    at = [None if t is None else next(places_of)[0] for t in results] if isinstance(result, tuple) else gives[0][0]
    function = None
    if len(run.steps) == 1 and len(allocate) <= 1 and isinstance(at, int):
        function = _alone(run.steps[0], places[0], len(given), pairs, allocate, at, wrong)
    if function is None:
        steps = [_step(step, own) for step, own in zip(run.steps, places)]
        function = _several(steps, pairs, allocate, at, wrong)
    flat = _flat(run, places, given, written) if run.flat and len(run.steps) == 1 else None
    device = slots[0].device
    return Plan(_there(device, function), run.guarded and aligned, None if flat is None else _there(device, flat))


def _place(slots: Sequence[Tensor], t: Any) -> tuple[int, int] | None:
    """(which slot a tensor is, from which byte on): None for what is neither a slot nor a view of only one."""
    if not isinstance(t, Tensor):
        return None
    for at, one in enumerate(slots):
        if one is t:
            return at, 0
    storage = t.untyped_storage()._cdata
    found = [at for at, one in enumerate(slots) if one.untyped_storage()._cdata == storage]
    return (found[0], t.data_ptr() - slots[found[0]].data_ptr()) if len(found) == 1 else None


def _pairs(given: Sequence[Tensor], written: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """A tensor that is written, another, and how many bytes each spans."""
    sizes = [end - start for start, end in map(span, given)]
    return [(i, j, sizes[i], sizes[j]) for i in written for j in range(len(given)) if i != j and sizes[i] and sizes[j]]


def _meet(tensors: Sequence[Tensor], pairs: list[tuple[int, int, int, int]]) -> bool:
    """Whether memory that is written meets other memory."""
    for i, j, size, other in pairs:
        one, two = tensors[i].data_ptr(), tensors[j].data_ptr()
        if one < two + other and two < one + size:
            return True
    return False


def _allocator(t: Tensor) -> Callable[[], Tensor]:
    shape, stride, dtype, device = tuple(t.shape), t.stride(), t.dtype, t.device
    if empty_strided_cuda is not None and device.type == "cuda":
        return functools.partial(empty_strided_cuda, shape, stride, dtype)
    return lambda: torch.empty_strided(shape, stride, dtype=dtype, device=device)


def _alone(
    step: Step, places: list, inputs: int, pairs: list, allocate: list, result: int, wrong: int
) -> Function | None:
    """The function of a single launch by its compiled launcher, most calls by far. The host's time is all that a small one costs,
    so what is done once or not at all is no loop."""
    sent, template, (x, y, z), stream = step.sent, step.args, step.grid, raw_stream
    if sent is None or any(p is not None and p[1] for p in places):
        return None
    moves = [(at, p[0]) for at, p in zip(sent.at, [p for p in places if p is not None])]
    reads = [(at, slot) for at, slot in moves if slot < inputs]
    if len(reads) > 3:
        return None
    count, ((a, i), (b, j), (c, k)) = len(reads), [*reads, (0, 0), (0, 0), (0, 0)][:3]
    make, out = (allocate[0], next(at for at, slot in moves if slot >= inputs)) if allocate else (None, 0)
    numbers, (raw, device, _, _, _, rest) = _numbers(step), sent

    def function(tensors: Sequence[Tensor], values: Sequence[Any]) -> Any:
        args = template.copy()
        if count:
            args[a] = low = tensors[i].data_ptr()
            if count > 1:
                args[b] = address = tensors[j].data_ptr()
                low |= address
                if count > 2:
                    args[c] = address = tensors[k].data_ptr()
                    low |= address
            if low & wrong or (pairs and _meet(tensors, pairs)):
                return None
        for at, index, convert in numbers:
            args[at] = convert(values[index])
        if make is None:
            made = tensors[result]
        else:
            made = make()
            args[out] = made.data_ptr()
        if rest:
            raw(x, y, z, stream(device), *rest, args)
        else:
            args[STREAM] = stream(device)
            raw(*args)
        return made

    return function


def _flat(run: Run, places: list, given: Sequence[Tensor], written: Sequence[int]) -> Function | None:
    """The function of a launch over elements one by one, for any number of them. Its result, if it is new, lies as its tensors do;
    one that is given is the only one that is written."""
    (step,), (own,) = run.steps, places
    sent, template, stream = step.sent, step.args, raw_stream
    if sent is None or any(p is not None and p[1] for p in own) or any(t.shape != given[0].shape for t in run.made):
        return None
    moves = [(at, p[0]) for at, p in zip(sent.at, [p for p in own if p is not None])]
    reads, inputs = [(at, slot) for at, slot in moves if slot < len(given)], len(given)
    out = next((at for at, slot in moves if slot >= inputs), None)
    if len(run.made) != (out is not None) or (out is None) != (len(written) == 1):
        return None
    dtype, device = (run.made[0] if run.made else given[0]).dtype, given[0].device
    size, numbers, raw, rest = sent.at[len(moves)], _numbers(step), sent.raw, sent.rest
    others, program = [i for i in range(inputs) if i not in written], run.flat

    def function(tensors: Sequence[Tensor], values: Sequence[Any]) -> Any:
        first = tensors[0]
        args, count = template.copy(), first.numel()
        for at, slot in reads:
            args[at] = tensors[slot].data_ptr()
        for at, index, convert in numbers:
            args[at] = convert(values[index])
        if out is None:
            made = tensors[written[0]]
            start, end = made.data_ptr(), made.data_ptr() + made.nbytes
            for i in others:
                other = tensors[i]
                if start < other.data_ptr() + other.nbytes and other.data_ptr() < end:
                    return None
        else:
            made = torch.empty(first.shape, dtype=dtype, device=device)
            args[out] = made.data_ptr()
        args[size] = count
        programs = -(-count // program)
        if rest:
            raw(programs, 1, 1, stream(sent.device), *rest, args)
        else:
            args[0] = programs
            args[STREAM] = stream(sent.device)
            raw(*args)
        return made

    return function


def _numbers(step: Step) -> list[tuple[int, int, Callable[[Any], int]]]:
    """The numbers of a launch that are the call's: where the launcher takes them, which argument each is, and what converts it."""
    first = 0 if step.sent is None else step.sent.at[-1] - len(step.numbers) + 1
    return [(first + at, n.at, n.convert) for at, n in enumerate(step.numbers) if isinstance(n, Bits)]


Again = Callable[[Sequence[Tensor], Sequence[Any]], None]


def _step(step: Step, places: list) -> Again:
    """A launch of several, with the slots and values of a later call."""
    numbers, sent, call = _numbers(step), step.sent, step.call
    if sent is not None:
        template, grid = step.args, step.grid
        moves = [(at, *p) for at, p in zip(sent.at, [p for p in places if p is not None])]

        def direct(slots: Sequence[Tensor], values: Sequence[Any]) -> None:
            args = template.copy()
            for at, slot, offset in moves:
                args[at] = slots[slot].data_ptr() + offset
            for at, index, convert in numbers:
                args[at] = convert(values[index])
            _send(sent, grid, args)

        return direct
    seen = [None if p is None else Place(*p, t.shape, t.stride(), t.dtype) for p, t in zip(places, step.tensors)]
    bits = [int(n) for n in step.numbers]

    def plain(slots: Sequence[Tensor], values: Sequence[Any]) -> None:
        own = bits.copy()
        for at, index, convert in numbers:
            own[at] = convert(values[index])
        with Run():
            call([None if p is None else p.view(slots[p.slot]) for p in seen], own)

    return plain


def _several(steps: list[Again], pairs: list, allocate: list, result: int | list[int | None], wrong: int) -> Function:
    """The function of any run."""

    def function(tensors: Sequence[Tensor], values: Sequence[Any]) -> Any:
        for t in tensors:
            if t.data_ptr() & wrong:
                return None
        if pairs and _meet(tensors, pairs):
            return None
        slots = [*tensors, *[make() for make in allocate]]
        for step in steps:
            step(slots, values)
        if isinstance(result, int):
            return slots[result]
        return tuple([None if at is None else slots[at] for at in result])

    return function


def _there(device: torch.device, function: Function) -> Function:
    """The same from whichever device is the current one."""
    if device.type != "cuda" or not _several_devices():
        return function

    def there(tensors: Sequence[Tensor], values: Sequence[Any]) -> Any:
        if torch.cuda.current_device() == device.index:
            return function(tensors, values)
        with torch.cuda.device(device):
            return function(tensors, values)

    return there
