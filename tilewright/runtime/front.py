"""The front of every public function: which plan a call takes, if there is one.

A plan may be replayed for a call that is like the one it was recorded from in all that host code and validation read. Two tests
say so. A guard, for the last few kinds of call: torch's own C++ check of all tensors, those inside quantised values and formats
included, beside equal numbers and formats. A key, for every other call: types, sizes, strides, dtypes, device, alignment, numbers
and, where gradients are wanted, of which tensors. What neither knows goes the long way.

`Front` is over an op, or over a function that takes operands apart and calls ops (`fronted`): that becomes one plan too, in which
its views and the launches of the ops that it called are steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.declaration import PLAIN
from ..core.flat import flattened
from ..core.format import Format, Quantized
from ..core.nest import picker
from ..core.outs import outs_of, with_outs
from ..core.private import count_write, guard, levels, modes, transforms
from .choose import forced
from .key import NUMBERS, SEVERAL, Key
from .plan import Recorder
from .run import Known, Runner, compiles_only, known_of

RECENT = 8  # kinds of call that a function remembers by guard, of those that name the same arguments
WAYS = 64  # to name arguments
MISS = object()  # no guard held
_tracing = torch.compiler.is_dynamo_compiling
_address = Tensor.data_ptr


class Kind(NamedTuple):
    """A kind of call that is remembered by guard: how many arguments it has, what takes all tensors from them (None: they are
    nothing else), the guard over these, what takes a plan's slots of them (None: all), whether gradients were recorded (None: no
    tensor has any), which tensors are leaves (None: it does not matter), and what is known of the call."""

    count: int
    take: Callable[[tuple], tuple[Tensor, ...] | None] | None
    check: Callable[..., bool]
    slots: Callable[[tuple], tuple[Tensor, ...]] | None
    recorded: bool | None
    leaves: tuple[bool, ...] | None
    known: Known


def opened(value: Any) -> tuple[tuple, tuple]:
    """Of an argument that holds others, (what is the same in all calls of a kind, what it holds): a format by its canonical string
    and whether it has a scale, a quantised value by that and the names of what it stores, several values by their number."""
    kind = type(value)
    if kind is Quantized:
        inner = value._inner
        return (value.key, *inner), tuple(inner.values())
    if kind in SEVERAL:
        return (len(value),), tuple(value)
    return (value.key, value.tensor is None), () if value.tensor is None else (value.tensor,)


def taking(given: tuple) -> tuple[Callable | None, tuple[Tensor, ...]]:
    """(what takes all tensors from arguments like these, those of these). It gives None for arguments that differ in something else
    than tensors, which are the guard's; it is None itself where there is nothing else. What an argument holds comes after the last
    argument."""
    whole, at = given, 0
    tensors, alike, holding = [], [], []
    while at < len(whole):
        value = whole[at]
        kind = type(value)
        if isinstance(value, Tensor):
            tensors.append(at)
        if kind in NUMBERS:
            alike.append((at, value, functools.partial(_same, kind, value)))
        elif isinstance(value, Format) and value.tensor is None:
            alike.append((at, value, functools.partial(_same_format, kind, value.key)))
        elif kind not in PLAIN:
            said, inner = opened(value)
            holding.append((at, kind, said))
            whole += inner
        at += 1
    if not alike and not holding:
        return None, given
    pick = picker(tensors)

    def take(given: tuple) -> tuple[Tensor, ...] | None:
        for at, kind, said in holding:
            value = given[at]
            if type(value) is not kind:
                return None
            found, inner = opened(value)
            if found != said:
                return None
            given += inner
        for at, before, same in alike:
            value = given[at]
            if value is not before and not same(value):
                return None
        return pick(given)

    return take, pick(whole)


def _same(kind: type, number: Any, value: Any) -> bool:
    return (
        type(value) is kind and value == number and (value or str(value) == str(number))
    )  # 1 is equal to True, 0.0 to -0.0


def _same_format(kind: type, key: str, value: Any) -> bool:
    return type(value) is kind and value.key == key and value.tensor is None


def code_of(fmt: Any) -> tuple[type, str] | None:
    """What says all of a format; None of one with a scale, which is another's in another call."""
    return (type(fmt), fmt.key) if isinstance(fmt, Format) and fmt.tensor is None else None


def latest(kinds: tuple[tuple, ...], one: tuple) -> tuple[tuple, ...]:
    """The last few kinds of call, each with its guard, and this one before them."""
    return (one, *[other for other in kinds if other[0] is not one[0]][: RECENT - 1])


def leaves_of(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    return tuple([t.is_leaf for t in tensors])


class Front:
    """See the module. `unusual(args, kwargs)` takes calls that have no key or are under a mode or transform;
    `unknown(args, kwargs, key, slots)` those without a plan, to record one; `shared(args, kwargs)` those in which memory that is
    written meets other memory: it raises, gives the result, or MISS where that is allowed.
    `tape(args, kwargs, slots, results, known)` puts the backward behind results; without it no call here wants one. `plain`:
    kinds of call without names and numbers, `coded`: by format those that name one without a scale alone, and `into`: those that
    name their one result's memory alone, where `call.py`, which is the only one to have a tape, looks first."""

    def __init__(
        self,
        op: Runner,
        unusual: Callable,
        unknown: Callable,
        shared: Callable,
        tape: Callable | None = None,
        name: tuple[str, ...] = (),
    ) -> None:
        self.op, self.unusual, self.unknown, self.shared, self.tape, self.name = (
            op,
            unusual,
            unknown,
            shared,
            tape,
            name,
        )
        self.recent: dict[tuple, tuple[Kind, ...]] = {}  # by the names of arguments that have one
        self.plain: tuple[tuple, ...] = ()
        self.coded: dict[tuple[type, str], tuple[tuple, ...]] = {}
        self.into: tuple[tuple, ...] = ()

    def replayed(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The result of a call that is like one of the last few, or MISS. No mode is active, and nothing is forced."""
        given = args + tuple(kwargs.values()) if kwargs else args
        for count, take, check, pick, recorded, leaves, known in self.recent.get(tuple(kwargs) if kwargs else (), ()):
            if count != len(given):
                continue
            tensors = given if take is None else take(given)
            if tensors is None or not check(*tensors):
                continue
            if recorded is not None and recorded != torch.is_grad_enabled():
                continue
            if leaves is not None and leaves != leaves_of(tensors):
                continue
            slots = tensors if pick is None else pick(tensors)
            results = known.plan.function(slots)
            if results is None:
                return MISS
            if known.plain:
                return results if known.restore is None else known.restore(results)
            if known.step:
                return known.step.taped(slots, results)
            return self.finished(args, kwargs, known, slots, results)
        return MISS

    def keyed(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """By the plan of the call's key. A plan of a call that wants gradients gives all results."""
        if modes() or transforms() or levels._current_level >= 0:
            return self.unusual(args, kwargs)
        key = Key(self.name)
        key.parts += kwargs
        out = kwargs.get("out")
        rest = kwargs.values() if out is None else [v for n, v in kwargs.items() if n != "out"]
        if not key.add(args) or not key.add(rest) or not (out is None or key.add_out(out)):
            return self.unusual(args, kwargs)
        graded = [t.requires_grad for t in key.slots] if torch.is_grad_enabled() else ()
        parts = (*key.parts, *graded) if True in graded else tuple(key.parts)
        if self.op.overwrites and True in graded:
            parts = (*parts, *leaves_of(key.slots))  # whether the backward may write over an argument
        known = self.op.plans.get(parts)
        if known is None or compiles_only():
            return self.unknown(args, kwargs, parts, key.slots)
        if known.written and not known.plan.apart(key.addresses):
            result = self.shared(args, kwargs)
            if result is not MISS:
                return result
        elif key.free and key.slots and key.aligned:
            self.remember(args, kwargs, known, key.slots)
        return self.finished(args, kwargs, known, key.slots, known.plan.function(key.slots, True))

    def finished(
        self, args: tuple, kwargs: Mapping[str, Any], known: Known, slots: Sequence[Tensor], results: Any
    ) -> Any:
        """What the caller gets of what a plan gave."""
        out = None
        if known.written:
            count_write(known.writes(slots))
            out = kwargs.get("out")
            if known.stored:
                return tuple(out) if type(out) is list else out
        if known.restore is not None:
            results = known.restore(results)
        if known.whole:
            return self.tape(args, kwargs, slots, results, known)
        if out is not None:  # the caller's own objects
            return with_outs(results, (out,) if len(self.op.result_rows) == 1 else tuple(out))
        return results

    def remember(self, args: tuple, kwargs: Mapping[str, Any], known: Known, slots: Sequence[Tensor]) -> None:
        """Remember a kind of call by guard, where it has one. A guard is made once, for kinds of call may take turns."""
        given = (*args, *kwargs.values())
        take, tensors = taking(given)
        if sum(type(t) is not Quantized for t in tensors) != len(slots):
            return  # a result on an argument: the guard would not tell it from one beside it
        kind = known.kind
        recorded = torch.is_grad_enabled() if any(t.requires_grad for t in tensors) else None
        leaves = leaves_of(tensors) if self.op.overwrites and recorded else None
        like = kind is not None and (kind.recorded, kind.leaves) == (recorded, leaves) and kind.check(*tensors)
        if not like or not (kind.take is None or kind.take(given)):  # a list is no tuple to a kind, but to a key it is
            check = guard([*tensors])
            if check is None:
                return
            at = [next(i for i, t in enumerate(tensors) if t is slot) for slot in slots]
            pick = None if at == [*range(len(tensors))] else picker(at)
            known.kind = kind = Kind(len(given), take, check, pick, recorded, leaves, known)
        names, code = tuple(kwargs), code_of(kwargs.get("out_format"))
        direct = self.tape is not None and kind.slots is None and kind.leaves is None
        direct = direct and all(type(t) in PLAIN for t in args)
        stored = direct and kind.take is None and known.stored and recorded is None
        one = kind.check, len(tensors), recorded, known.plan.function, known.restore
        if direct and known.plain and not names:
            self.plain = latest(self.plain, one)
        elif direct and known.plain and names == ("out_format",) and code is not None:
            self.coded = {**(self.coded if len(self.coded) < WAYS else {}), code: latest(self.coded.get(code, ()), one)}
        elif stored and names == ("out",) and known.written == (len(args),):
            self.into = latest(self.into, (kind.check, len(tensors), known.plan.function))
        else:
            others = [other for other in self.recent.get(names, ()) if other is not kind]
            if len(self.recent) >= WAYS:
                self.recent.clear()
            self.recent[names] = (kind, *others[: RECENT - 1])


class Once(tuple):
    """The key of a plan for the very tensors of a call."""


class ListKind(NamedTuple):
    """A call over lists of tensors that has a plan: types and names of arguments, what is no tensor among them and how long lists
    are, the guard over all tensors, where they lie, what was forced, whether gradients were recorded, and its plan."""

    types: tuple
    others: list[Any]
    check: Callable[..., bool]
    addresses: list[int]
    forced: str | None
    recorded: bool
    known: Known


class ListFront:
    """The front of an op over lists of tensors: the plan of a call is for its very tensors, as long as each is of the same kind and
    lies where it lay. That is what one pass of C++ over thousands of them can say."""

    def __init__(self, op: Runner, unknown: Callable) -> None:
        self.op, self.unknown = op, unknown
        self.recent: tuple[ListKind, ...] = ()

    def call(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        usual = (
            kwargs.get("out") is None
            and not self.op.signature.listed
            and levels._current_level < 0
            and not compiles_only()
        )
        found = self._apart(args, kwargs) if usual else None
        if found is None:
            return self.unknown(args, kwargs)
        types, others, tensors = found
        how, recorded = forced.get(), torch.is_grad_enabled()
        for kind in self.recent:
            if kind.types == types and kind.others == others and (kind.forced, kind.recorded) == (how, recorded):
                if kind.check(*tensors) and [*map(_address, tensors)] == kind.addresses:
                    results = kind.known.plan.function(())
                    return results if kind.known.restore is None else kind.known.restore(results)
        if modes() or transforms() or not all(type(t) in PLAIN for t in tensors):
            return self.unknown(args, kwargs)
        key = Once((object(),))
        result = self.unknown(args, kwargs, key, [])
        known = self.op.plans.pop(key, None)
        check = None if known is None or known.whole else guard(tensors)
        if check is not None:
            kind = ListKind(types, others, check, [*map(_address, tensors)], how, recorded, known)
            self.recent = (kind, *self.recent[: RECENT - 1])
        return result

    def _apart(self, args: tuple, kwargs: Mapping[str, Any]) -> tuple[tuple, list[Any], list[Tensor]] | None:
        """(types and names, what is no tensor and how long lists are, tensors); None where there are other arguments."""
        given = (*args, *kwargs.values())
        tensors: list[Tensor] = []
        others: list[Any] = []
        for value in given:
            kind = type(value)
            if kind in (list, tuple):
                others.append(len(value))
                tensors += value
            elif kind in PLAIN:
                tensors.append(value)
            elif kind in NUMBERS:
                others.append(value)
            else:
                return None
        return ((*map(type, given), *kwargs), others, tensors) if tensors else None


def fronted(op: Runner) -> Callable[[Callable], Callable]:
    """A decorator for a function that does nothing but take its arguments apart and call ops by their public functions: a call
    becomes one plan, kept with those of `op`. What has none (one that copies, or wants gradients) is the function itself."""

    def decorate(function: Callable) -> Callable:
        def unusual(args: tuple, kwargs: Mapping[str, Any]) -> Any:
            return function(*args, **kwargs)

        def unknown(args: tuple, kwargs: Mapping[str, Any], key: tuple, slots: list[Tensor]) -> Any:
            graded = torch.is_grad_enabled() and any(t.requires_grad for t in slots)
            if graded or key in op.unplannable or compiles_only():
                return function(*args, **kwargs)
            with torch.no_grad(), Recorder(slots) as recorder:
                result = function(*args, **kwargs)
            pieces = [piece for piece in flattened(kwargs.get("out")) if piece is not None]
            written = tuple(at for at, slot in enumerate(slots) if any(slot is piece for piece in pieces))
            known = known_of(recorder, result, outs_of(op, kwargs), written)
            if known is None:
                op.remember_no_plan(key)
            else:
                op.keep(key, known)
            if written:
                count_write([slots[at] for at in written])
            return result

        front = Front(op, unusual, unknown, shared=unusual, name=(function.__name__,))

        @functools.wraps(function)
        def public(*args: Any, **kwargs: Any) -> Any:
            if _tracing():
                return function(*args, **kwargs)
            if forced.get() is None and levels._current_level < 0:
                result = front.replayed(args, kwargs)
                if result is not MISS:
                    return result
            return front.keyed(args, kwargs)

        public.op = op
        return public

    return decorate
