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
from collections.abc import Callable, Mapping
from operator import or_
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.declaration import PLAIN
from ..core.flat import flattened
from ..core.format import Format, Quantized
from ..core.outs import with_outs
from ..core.private import guard, levels, modes, transforms
from .choose import forced
from .key import NUMBERS, Key
from .plan import Recorder
from .run import Known, Runner, compiles_only, known_of

RECENT = 8  # kinds of call that a function remembers by guard
MISS = object()  # no guard held
_tracing = torch.compiler.is_dynamo_compiling
_address = Tensor.data_ptr


class Kind(NamedTuple):
    """A kind of call that is remembered by guard: types and names of arguments, what is no tensor among them, how many tensors
    there are, which of them are a plan's slots (None: all), the guard over all, whether gradients were recorded (None: no tensor
    has any), which tensors are leaves (None: it does not matter), and what is known of the call."""

    types: tuple
    others: list[Any]
    count: int
    slots: tuple[int, ...] | None
    check: Callable[..., bool]
    recorded: bool | None
    leaves: tuple[bool, ...] | None
    known: Known


def apart(given: tuple) -> tuple[list[Tensor], list[Any]]:
    """(all tensors, the quantised ones each followed by what it stores; everything else, formats by their canonical strings)."""
    tensors: list[Tensor] = []
    others: list[Any] = []
    for value in given:
        kind = type(value)
        if kind in PLAIN:
            tensors.append(value)
        elif kind in NUMBERS:
            others.append(value)
        else:
            others.append(value.key)
            if kind is Quantized:
                inner = value._inner
                others += inner
                tensors.append(value)
                tensors += inner.values()
            elif value.tensor is not None:
                tensors.append(value.tensor)
    return tensors, others


def leaves_of(tensors: list[Tensor]) -> tuple[bool, ...]:
    return tuple([t.is_leaf for t in tensors])


class Front:
    """See the module. `unusual(args, kwargs)` takes calls that have no key or are under a mode or transform;
    `unknown(args, kwargs, key, slots)` those without a plan, to record one; `shared(args, kwargs)` those in which memory that is
    written meets other memory: it raises, gives the result, or MISS where that is allowed.
    `tape(args, kwargs, slots, results, known)` puts the backward behind results; without it no call here wants one. `plain`: kinds
    of call without names and numbers, where `call.py`, which is the only one to have a tape, looks first."""

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
        self.recent: tuple[Kind, ...] = ()
        self.plain: tuple[tuple, ...] = ()

    def replayed(self, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """The result of a call that is like one of the last few, or MISS. No mode is active, and nothing is forced."""
        given = (*args, *kwargs.values()) if kwargs else args
        types = (*map(type, given), *kwargs)
        tensors = None
        for kinds, numbers, count, at, check, recorded, leaves, known in self.recent:
            if kinds != types:
                continue
            if tensors is None:
                tensors, others = apart(given)
            if count != len(tensors) or numbers != others or not check(*tensors):
                continue
            if recorded is not None and recorded != torch.is_grad_enabled():
                continue
            if leaves is not None and leaves != leaves_of(tensors):
                continue
            slots = tensors if at is None else [tensors[i] for i in at]
            if known.simple is not None:
                result = known.simple(slots)
                return MISS if result is None else result
            addresses = [*map(_address, slots)]
            if functools.reduce(or_, addresses) & 15:
                return MISS  # guards do not see alignment
            if known.plainly:
                results = known.plan(slots, addresses)
                return results if known.restore is None else known.restore(results)
            if known.written and not known.apart(addresses):
                return MISS
            return self.finished(args, kwargs, known, slots, addresses)
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
        if known.written and not known.apart(key.addresses):
            result = self.shared(args, kwargs)
            if result is not MISS:
                return result
        elif key.free and key.slots and key.aligned:
            self.remember(args, kwargs, known, key.slots)
        return self.finished(args, kwargs, known, key.slots, key.addresses)

    def finished(
        self, args: tuple, kwargs: Mapping[str, Any], known: Known, slots: list[Tensor], addresses: list[int]
    ) -> Any:
        """What the caller gets of a replay."""
        written = [slots[at] for at in known.written] if known.written else None
        results = known.plan(slots, addresses)
        if written is not None:
            torch.autograd.graph.increment_version(written)
            out = kwargs.get("out")
            if type(out) in PLAIN:
                return out
        if known.restore is not None:
            results = known.restore(results)
        if known.whole:
            return self.tape(args, kwargs, slots, results, known)
        if written is not None and out is not None:
            return with_outs(
                results, (out,) if len(self.op.result_rows) == 1 else tuple(out)
            )  # the caller's own objects
        return results

    def remember(self, args: tuple, kwargs: Mapping[str, Any], known: Known, slots: list[Tensor]) -> None:
        """Remember a kind of call by guard, where it has one. A guard is made once, for kinds of call may take turns."""
        given = (*args, *kwargs.values())
        if not all(type(v) in PLAIN or type(v) in NUMBERS or isinstance(v, (Format, Quantized)) for v in given):
            return  # several numbers, in a list that the caller may change; several results
        tensors, others = apart(given)
        if sum(type(t) is not Quantized for t in tensors) != len(slots):
            return  # a result on an argument: the guard would not tell it from one beside it
        kind = known.kind
        recorded = torch.is_grad_enabled() if any(t.requires_grad for t in tensors) else None
        leaves = leaves_of(tensors) if self.op.overwrites and recorded else None
        if kind is None or (kind.recorded, kind.leaves) != (recorded, leaves) or not kind.check(*tensors):
            check = guard(tensors)
            if check is None:
                return
            at = tuple(next(i for i, t in enumerate(tensors) if t is slot) for slot in slots)
            every = at == tuple(range(len(tensors)))
            types = (*map(type, given), *kwargs)
            known.kind = kind = Kind(types, others, len(tensors), None if every else at, check, recorded, leaves, known)
        if self.tape and not others and not kwargs and kind.slots is None and not known.whole and not known.written:
            one = kind.check, kind.count, bool(kind.recorded), known.plan.simple, known.plan, known.restore
            self.plain = (one, *[other for other in self.plain if other[0] is not kind.check][: RECENT - 1])
        else:
            self.recent = (kind, *[other for other in self.recent if other is not kind][: RECENT - 1])


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
                    results = kind.known.plan([], [])
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
            known = known_of(recorder, result, written)
            if known is None:
                op.remember_no_plan(key)
            else:
                op.keep(key, known)
            if written:
                torch.autograd.graph.increment_version([slots[at] for at in written])
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
