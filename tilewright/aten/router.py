"""Which calls of torch's operators are ours: registered at the backend key, and aten's own kernel for everything else.

In mode "auto", the default, an override takes those calls that measurements say it should (`verdicts.py`); in mode "all" every one
that its row can.

A registration is for the whole process, since autograd's own threads must see it. Autograd, autocast, vmap and DTensor stand above
the backend key and work as before. An override takes a call if its row can; whatever the row declines, invalid arguments included,
goes to the kernel that was there before, whose exception is then the exception. Both are counted.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.nest import picker
from ..core.private import guard
from ..core.target import INTERPRETING
from ..runtime.kernel import NotCompiledError
from ..runtime.plan import Recorder
from . import pointwise, table
from .leaves import LEAVES
from .observed import INSIDE, Calls, calls_of
from .plans import Function, Run, plan_of, slot, thread
from .row import Declined, kind_of
from .signature import Signature, signature_of
from .table import NUMBERS, name_of, overload_of, tensor_slots
from .verdicts import Verdicts

STALE = "SafeKernelFunction has been invalidated"  # begins what torch says of a captured kernel whose library is gone
# Of the tensors that torch makes of Python's numbers
WIDEST = {bool: torch.bool, int: torch.int64, float: torch.float64, complex: torch.complex128}
SLOTS = (int, float)  # types of numbers that are slots of a plan; a bool is one of two values, and part of a key
RECENT = 4  # kinds of call that an overload knows by guard
MOST_OUTCOMES = 512  # keys of an overload
MODES = ("all", "auto")
IMPLICIT = torch._C.DispatchKey.CompositeImplicitAutograd  # of what torch makes of other operators
# Before torch 2.13 a library that stands over another one has to say that it means to
OVER_ANOTHER = {"allow_override": True} if "allow_override" in inspect.signature(Library.impl).parameters else {}

Key = tuple[tuple, tuple]  # of a call: all but shapes and strides, and these

_lock = threading.RLock()
_active: dict[str, Override] = {}
_wanted: list[Request] = []  # of each `enable` and `use` in force


@dataclass(eq=False)
class Request:
    """The overloads that one `enable`, or a block of `use`, asks for, and what says which of their calls are to be ours (None: all
    that can be)."""

    names: frozenset[str]
    scoped: bool
    verdicts: Verdicts | None = None

    @property
    def mode(self) -> str:
        return "all" if self.verdicts is None else "auto"


class Kind(NamedTuple):
    """A kind of call that is remembered by torch's guard: how many values it has, by position and then by name; what takes the
    tensors from them, each once (None: they are nothing else), the guard over these, whether the other values are as they were
    (None: there are none), what takes the tensors of the plan (None: the same), what becomes of it, and where it is counted."""

    count: int
    take: Callable[[Sequence[Any]], tuple[Tensor, ...]] | None
    check: Callable[..., bool]
    same: Callable[[Sequence[Any]], bool] | None
    every: Callable[[Sequence[Any]], tuple[Tensor, ...]] | None
    function: Function | None
    reason: str
    tally: list[int]

    def holds(self, values: Sequence[Any]) -> bool:
        """Whether a call under the same key is of this kind."""
        return self.check(*(values if self.take is None else self.take(values))) and (
            self.same is None or self.same(values)
        )


class Outcome:
    """What becomes of calls under one key: the function of their plan, or why they are aten's; or neither, of one that was `seen`
    once, and of those whose every run is another (`plannable` is False then), as random ones are. `tally` counts those that are
    ours. Guards see more than a key does (which tensors require a gradient), so that there may be several kinds."""

    def __init__(
        self, function: Function | None, tally: list[int], reason: str = "", guarded: bool = True, seen: bool = False
    ) -> None:
        self.function, self.tally, self.reason, self.guarded, self.seen = function, tally, reason, guarded, seen
        self.plannable = True
        self.kinds: list[Kind] = []


class Override:
    """One overload: the form that serves it, the kernel that was there before, and what became of its calls."""

    def __init__(self, name: str) -> None:
        self.name, self.form = name, table.FORMS[name]
        self.overload = overload_of(name)
        self.key = "CPU" if INTERPRETING else "CUDA"
        self.keys = torch._C.DispatchKeySet(
            getattr(torch._C.DispatchKey, self.key)
        )  # what aten's kernel is called with
        self.tallies: dict[float, list[int]] = {}  # of calls that were ours, by what each gained
        self.declined: Counter[str] = Counter()
        self.verdicts: Verdicts | None = None  # which calls are to be ours; None: all that can be
        self.least, self.small = 0, ""  # bytes below which none is, whatever else it is; and the reason
        self.slots = tensor_slots(self.overload)
        arguments = self.overload._schema.arguments
        self.arguments = [a.name for a in arguments]
        self.writes = {a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write}
        self.numbers, self.asks = getattr(self.form, "numbers", ()), getattr(self.form, "asks", {})
        self.settings: Callable[[], Any] = getattr(self.form, "settings", lambda: None)  # of torch's, that a run reads
        self.retired: list[Any] = []
        self.forget()
        self.register()

    def forget(self) -> None:
        """All that is known of calls."""
        self.outcomes: dict[Key, Outcome] = {}
        self.flats: dict[tuple, Function] = {}  # of calls whose tensors lie alike, whatever their shape
        self.recent: tuple[Kind, ...] = ()  # of calls without keywords, the last first
        self.named: dict[tuple[str, ...], tuple[Kind, ...]] = {}  # of others, by the names of these

    def follow(self, verdicts: Verdicts | None) -> None:
        """Go by these from now on."""
        if verdicts is not self.verdicts:
            self.verdicts = verdicts
            self.least = 0 if verdicts is None else verdicts.least(self.name)
            self.small = f"fewer than {self.least} bytes, from which on ours are known to be faster"
            self.forget()

    @property
    def taken(self) -> int:
        return sum(tally[0] for tally in self.tallies.values())

    def tally(self, args: tuple, kwargs: dict[str, Any]) -> list[int]:
        """Where a call is counted. Raises `Declined` where measurements say that it is aten's."""
        gain = 0.0 if self.verdicts is None else self.verdicts.gain(self.signature(args, kwargs))
        return self.tallies.setdefault(gain, [0])

    def signature(self, args: tuple, kwargs: dict[str, Any]) -> Signature:
        return signature_of(self.name, args, kwargs)

    def register(self) -> None:
        """Capture the kernel that is there, and take its place."""
        try:
            self.kernel = torch.library.get_kernel(self.overload, self.key)
        except RuntimeError:
            self.kernel = Missing(self.name, self.key)
        self.library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s).*Overriding a previously registered kernel", category=UserWarning
            )
            self.library.impl(self.name, self.call, self.key, **OVER_ANOTHER)

    def remove(self) -> None:
        self.library._destroy()

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """A call from the dispatcher. The shortest way is that of a kind of call that a guard knows."""
        if thread.run is not None:
            return self.before(args, kwargs)
        names, values, recent = (), args, self.recent
        if kwargs:
            names, values = tuple(kwargs), (*args, *kwargs.values())
            recent = self.named.get(names, ())
        if self.least and below(values, self.least):
            self.declined[self.small] += 1
            return self.before(args, kwargs)
        for count, take, check, same, every, function, reason, tally in recent:
            if count == len(values):
                tensors = values if take is None else take(values)
                if check(*tensors) and (same is None or same(values)):
                    if function is None:
                        self.declined[reason] += 1
                        return self.before(args, kwargs)
                    try:
                        made = function(tensors if every is None else every(values), values)
                    except Declined:  # by a number, which the run below says
                        break
                    if made is not None:
                        tally[0] += 1
                        return made
                    break
        return self.keyed(args, kwargs, names, values)

    # ---- calls that no guard knows

    def keyed(self, args: tuple, kwargs: dict[str, Any], names: tuple[str, ...], values: Sequence[Any]) -> Any:
        """Make a call by the plan under its key, or by a run."""
        if Recorder.active() is not None:
            return self.before(args, kwargs)
        key, tensors = self.key_of(names, values)
        outcome = self.outcomes.get(key)
        try:
            made = None
            if outcome is None:  # a shape may never come again: a plan is made the second time
                outcome = Outcome(None, self.tally(args, kwargs), seen=True)
                self.keep(key, outcome)
                flat = self.flats.get(flat_key(key, tensors)) if self.flats else None  # there is none under None
                made = None if flat is None else flat(tensors, values)
            elif outcome.seen:
                made = self.planned(key, names, values, outcome) if outcome.plannable else None
            else:
                self.remember(outcome, names, values)
                if outcome.function is None:
                    raise Declined(outcome.reason, lasting=False)
                made = outcome.function(tensors, values)
            if made is None:
                with Run():
                    made = self.form(*args, **kwargs)
            outcome.tally[0] += 1
            return made
        except Declined as declined:
            reason = str(declined)
            if declined.lasting:
                self.keep(key, Outcome(None, [0], reason))
        except NotCompiledError:
            reason = "a kernel that is not compiled, during graph capture"
        self.declined[reason] += 1
        return self.before(args, kwargs)

    def key_of(self, names: tuple[str, ...], values: Sequence[Any]) -> tuple[Key, list[Tensor]]:
        """All that a run reads, and the tensors among the values."""
        settings = torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), self.settings()
        parts: list[Any] = [names, *settings]
        layouts: list[Sequence[int]] = []
        tensors: list[Tensor] = []
        for at, value in enumerate(values):
            kind = type(value)
            if isinstance(value, Tensor) or holds_tensors(value):
                for t in (value,) if isinstance(value, Tensor) else value:
                    if t is None:  # of a list of indices
                        parts.append(None)
                        continue
                    tensors.append(t)
                    parts += t.dtype, t.get_device(), t.data_ptr() & 15, t.is_neg()
                    layouts += t.shape, t.stride()
                parts.append(len(tensors))  # a list ends here, or one tensor
            elif kind in SLOTS and (name := self.name_at(at, names, values)) in self.numbers:
                parts += kind, self.asks[name](value) if name in self.asks else None
            else:
                parts += kind, tuple(value) if kind is list else value
        return (tuple(parts), tuple(layouts)), tensors

    def name_at(self, at: int, names: tuple[str, ...], values: Sequence[Any]) -> str:
        """The argument that stands there."""
        positions = len(values) - len(names)
        return self.arguments[at] if at < positions else names[at - positions]

    def planned(self, key: Key, names: tuple[str, ...], values: Sequence[Any], outcome: Outcome) -> Any:
        """Run the form, and keep the run under the key if later calls can be made from it."""
        given: list[Tensor] = []
        shown: dict[int, Tensor] = {}  # by id, what each of these is to the caller
        numbers: set[int] = set()

        # Neither calls itself: a function inside another that does is a circle, and would keep these tensors until it is found
        def tagged_tensor(value: Tensor | None) -> Tensor | None:
            if value is None:  # of a list of indices
                return None
            # A plan knows tensors by identity: of one that is given twice, the second is another view
            given.append(value.detach() if id(value) in shown else value)
            shown[id(given[-1])] = value
            return given[-1]

        def tagged(at: int, value: Any) -> Any:
            if isinstance(value, Tensor):
                return tagged_tensor(value)
            if holds_tensors(value):
                return [tagged_tensor(one) for one in value]
            if type(value) in SLOTS and self.name_at(at, names, values) in self.numbers:
                numbers.add(at)
                return slot(value, at)
            return value

        with Run() as run:
            seen = [tagged(at, value) for at, value in enumerate(values)]
            positions = len(values) - len(names)
            made = self.form(*seen[:positions], **dict(zip(names, seen[positions:])))
            places = {id(value) for at, value in enumerate(seen) if self.name_at(at, names, values) in self.writes}
            written = [at for at, t in enumerate(given) if id(t) in places]
            plan = plan_of(run, given, written, numbers, made)
            outcome.plannable = plan is not None
            if plan is not None:
                self.keep(key, Outcome(plan.function, outcome.tally, guarded=plan.guarded))
                flat = flat_key(key, given) if plan.flat is not None else None
                if flat is not None and len(self.flats) < MOST_OUTCOMES:
                    self.flats[flat] = plan.flat
        return shown.get(id(made), made)

    def keep(self, key: Key, outcome: Outcome) -> None:
        with _lock:
            if len(self.outcomes) >= MOST_OUTCOMES and key not in self.outcomes:
                del self.outcomes[next(iter(self.outcomes))]
            self.outcomes[key] = outcome

    def remember(self, outcome: Outcome, names: tuple[str, ...], values: Sequence[Any]) -> None:
        """Have calls like this one, which has come again, known by a guard."""
        if not outcome.guarded or any(map(holds_tensors, values)):
            return
        with _lock:
            kind = next((kind for kind in outcome.kinds if kind.holds(values)), None)
            if kind is None and len(outcome.kinds) < RECENT:
                kind = self.kind_of(outcome, names, values)
            if kind is None:
                outcome.guarded = False
                return
            if kind not in outcome.kinds:
                outcome.kinds.append(kind)
            before = self.named.get(names, ()) if names else self.recent
            recent = (kind, *[one for one in before if one is not kind])[:RECENT]
            if not names:
                self.recent = recent
            elif names in self.named or len(self.named) < RECENT:
                self.named[names] = recent

    def kind_of(self, outcome: Outcome, names: tuple[str, ...], values: Sequence[Any]) -> Kind | None:
        """The kind of a call; None where torch has no guard."""
        every = [i for i, value in enumerate(values) if isinstance(value, Tensor)]
        first = {i: next(j for j in every if values[j] is values[i]) for i in every}
        once = [i for i in every if first[i] == i]  # torch's guard takes no tensor twice
        check = guard([values[i] for i in once])
        if check is None:
            return None
        rest = [(i, type(v), v) for i, v in enumerate(values) if i not in every]
        slots = {i for i, kind, _ in rest if kind in SLOTS and self.name_at(i, names, values) in self.numbers}
        told = [(i, v) for i, _, v in rest if i not in slots]
        asked = [
            (i, self.asks[name], self.asks[name](v))
            for i, _, v in rest
            if i in slots and (name := self.name_at(i, names, values)) in self.asks
        ]
        twice = [(i, j) for i, j in first.items() if i != j]

        def same(values: Sequence[Any]) -> bool:
            for i, kind, _ in rest:
                if type(values[i]) is not kind:
                    return False
            for i, value in told:
                if values[i] != value:
                    return False
            for i, j in twice:
                if values[i] is not values[j]:
                    return False
            return not asked or all(ask(values[i]) == answer for i, ask, answer in asked)

        return Kind(
            len(values), picker(once) if rest or twice else None, check, same if rest or twice else None,
            picker(every) if twice else None, outcome.function, outcome.reason, outcome.tally,
        )  # fmt: skip

    # ---- aten

    def before(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """aten's own answer."""
        for at in self.slots:
            if at < len(args) and type(args[at]) in NUMBERS:
                return self.before_numbers(args, kwargs)
        kernel = self.kernel
        try:
            return kernel.call_boxed(self.keys, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(STALE):
                raise
        with _lock:
            if self.kernel is kernel:
                self.capture_again()
        return self.kernel.call_boxed(self.keys, *args, **kwargs)

    def capture_again(self) -> None:
        """The library whose kernel was captured is gone, so that another lies below ours: step aside to see it. Our own
        registration is kept alive, for this very call came through it."""
        self.retired.append(torch.library.get_kernel(self.overload, self.key))
        self.remove()
        self.register()

    def before_numbers(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """aten's answer to a call with a Python number in a tensor's place, which a captured kernel refuses: the number is a tensor
        without dimensions. Its dtype counts as much as that of other tensors without dimensions, where a number's counts less: if
        that tells, these have a dimension of 1 for this call, and its result has none again."""
        given = list(args)
        every = {at: args[at] for at in self.slots if at < len(args)}
        tensors = {at: value for at, value in every.items() if isinstance(value, Tensor)}
        numbers = [at for at, value in every.items() if type(value) in NUMBERS]
        beside = [t.dtype for t in tensors.values()]
        if not beside and len(numbers) > 1:
            beside = [torch.bool]  # the least of all
        with Run():
            for at in numbers:
                given[at] = wrapped(args[at], beside)
        dtypes = {given[at].dtype for at in numbers}
        least, lowest = max([rank(t.dtype) for t in tensors.values() if t.dim()], default=-1), min(map(rank, dtypes))
        lone = {at: t for at, t in tensors.items() if not t.dim() and rank(t.dtype) >= max(lowest, least + 1)}
        if dtypes.issuperset([t.dtype for t in lone.values()]):
            return self.before(tuple(given), kwargs)
        for at, t in lone.items():
            given[at] = t.unsqueeze(0)
        out = kwargs.get("out")
        if least >= 0:  # another tensor has dimensions, which the result has too
            return self.before(tuple(given), kwargs)
        if out is None:
            made = self.before(tuple(given), kwargs)
            return args[0] if self.writes else made.squeeze(0)
        if out.dim():  # it is resized
            self.before(tuple(given), kwargs)
            return out.resize_(())
        self.before(tuple(given), {**kwargs, "out": out.unsqueeze(0)})
        return out


class Missing(NamedTuple):
    """In the place of a kernel that torch does not have for this backend: what is declined is refused, as without us."""

    name: str
    key: str

    def call_boxed(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(f"Could not run 'aten::{self.name}' with arguments from the '{self.key}' backend.")


def flat_key(key: Key, tensors: list[Tensor]) -> tuple | None:
    """What of a key counts where all tensors are of one shape, without gaps or dimensions of 1; None where they are not."""
    shape, count = tensors[0].shape, tensors[0].numel()
    if 1 in shape or not 0 < count < 2**31:
        return None
    for t in tensors:
        if t.shape != shape or not t.is_contiguous():
            return None
    return *pointwise.size_class(count), *key[0]


def below(values: Sequence[Any], least: int) -> bool:
    """Whether the tensors among the values have fewer bytes together. Of a small call this is all that is asked, for it costs a few
    calls of a function, and a key many."""
    nbytes = 0
    for value in values:
        if isinstance(value, Tensor):
            nbytes += value.nbytes
        elif type(value) is list:
            nbytes += sum([t.nbytes for t in value if isinstance(t, Tensor)])
    return nbytes < least


def holds_tensors(value: Any) -> bool:
    return type(value) is list and any(isinstance(one, Tensor) for one in value)


def wrapped(value: Any, beside: Sequence[torch.dtype]) -> Tensor:
    """A number as a tensor without dimensions, beside tensors of these dtypes: of the widest dtype of its kind, which keeps its
    value, unless that is a kind above all of theirs. Such a number decides the result's dtype, which is by torch's default one."""
    dtype = torch.uint64 if type(value) is int and value >= 2**63 else WIDEST[type(value)]
    like = max(beside, key=rank, default=dtype)
    if rank(like) < rank(dtype) and type(value) in (float, complex):
        dtype = torch.result_type(torch.empty((), dtype=like, device="cpu"), value)
    return torch.tensor(value, dtype=dtype, device="cpu")


@functools.cache
def rank(dtype: torch.dtype) -> int:
    """Of its kind, among kinds of dtypes from the lowest."""
    return pointwise.KINDS.index(kind_of(dtype))


# ---------------------------------------------------------------- which


def resolve(names: Iterable[str], argument: str = "include") -> frozenset[str]:
    """Overloads for names: of an overload itself, of an operator, which means all of its overloads, or of an engine."""
    one = not isinstance(names, Iterable) or isinstance(names, (str, torch._ops.OpOverloadPacket))
    given = [names] if one else list(names)
    found: set[str] = set()
    for name in given:
        if not isinstance(name, str):
            raise ValueError(f"aten: {argument} takes names such as 'add.Tensor', 'add' or 'pointwise', got {name!r}")
        own = {n for n in table.FORMS if name in (n, n.partition(".")[0], table.ENGINE[n])}
        if not own:
            raise ValueError(f"aten: {unknown(name)}")
        found |= own
    return frozenset(found)


def unknown(name: str) -> str:
    """What there is to say of a name that is not of a replacement."""
    packet, _, overload = name.partition(".")
    leaves = sorted({leaf for n, leaf in LEAVES.items() if name in (n, n.partition(".")[0])})
    if leaves:
        return f"{name!r} has no replacement of its own: name {' or '.join(map(repr, leaves))}, which its calls reach"
    torchs = getattr(torch.ops.aten, packet, None)
    overloads = torchs.overloads() if isinstance(torchs, torch._ops.OpOverloadPacket) else []
    asked = [o for o in overloads if overload in ("", o)]
    if any(getattr(torchs, o).has_kernel_for_dispatch_key(IMPLICIT) for o in asked):
        return f"{name!r} has no replacement of its own: torch makes it of others, which `explain` names"
    own = sorted(n for n in table.FORMS if n.partition(".")[0] == packet)
    known = sorted({*table.FORMS, *(n.partition(".")[0] for n in table.FORMS), *table.ENGINE.values()})
    near = difflib.get_close_matches(name, own) or own[:3] or difflib.get_close_matches(name, known)
    missing = "" if asked else ", and torch has no such overload" if overloads else ", and torch does not define it"
    meant = f": did you mean {' or '.join(near)}?" if near else ""
    return f"{name!r} is no operator that there is a replacement for{missing}{meant}"


def chosen(
    mode: str, include: Iterable[str] | None, exclude: Iterable[str] | None, observed: Any, scoped: bool
) -> Request:
    """What is asked for."""
    if mode not in MODES:
        raise ValueError(f"aten: mode must be {' or '.join(map(repr, MODES))}, got {mode!r}")
    if observed is not None and mode != "auto":
        raise ValueError("aten: observed is for mode 'auto', which chooses")
    every = frozenset(table.FORMS) if include is None else resolve(include)
    every -= resolve(exclude, "exclude") if exclude is not None else frozenset()
    if not INTERPRETING and not torch.cuda.is_available():
        raise RuntimeError("aten: there is no GPU whose operators could be replaced")
    if mode == "all":
        return Request(every, scoped)
    verdicts = Verdicts.here()
    names = every & verdicts.chosen(None if observed is None else calls_of(observed, verdicts.place.gpu).counts)
    if not names:
        why = verdicts.silence(every, observed is not None)
        warnings.warn(f"aten: nothing is replaced: {why}. Mode 'all' replaces whatever can be", stacklevel=3)
    return Request(names, scoped, verdicts)


def settle() -> None:
    """Register what is asked for and not there; take away what nobody asks for. Of several requests that name an overload, the
    last one says which of its calls are ours."""
    last = {name: one.verdicts for one in _wanted for name in one.names}
    for name in [n for n in _active if n not in last]:
        _active.pop(name).remove()
    for name in sorted(last.keys() - _active.keys()):
        _active[name] = Override(name)
    for name, verdicts in last.items():
        _active[name].follow(verdicts)


def begin(request: Request) -> None:
    """Put a request into force, or, where an overload of it cannot be registered, leave everything as it was."""
    _wanted.append(request)
    try:
        settle()
    except BaseException:
        end(request)
        raise


def end(request: Request) -> None:
    _wanted.remove(request)
    settle()


# ---------------------------------------------------------------- what callers see


def enable(
    mode: str = "auto",
    *,
    include: Iterable[str] | None = None,
    exclude: Iterable[str] | None = None,
    observed: Calls | str | Path | None = None,
) -> None:
    """Replace torch's operators on the GPU by ours, in the whole process, until `disable`.

    `mode` "auto" replaces only what was measured on this GPU to be no slower and, with `observed` (calls that `observe` counted, or
    a file of them), also what pays for a program that makes these calls: where nothing was measured it replaces nothing, and warns
    how to measure. "all" replaces whatever can be, faster or not. `include` and `exclude` name
    overloads ("add.Tensor"), operators ("add": all their overloads) or engines ("pointwise"). What a replacement does not take goes
    to torch as before. Inside compiled functions there is no effect but on what Inductor leaves to aten.
    """
    request = chosen(mode, include, exclude, observed, False)
    with _lock:
        other = next((one.mode for one in _wanted if one.mode != mode), None)
        if other is not None:
            raise ValueError(f"aten: mode {other!r} is in force: `disable` ends it, and `use` nests in it")
        begin(request)


def disable() -> None:
    """Take back every `enable`; blocks of `use` stay as they are until they end."""
    with _lock:
        _wanted[:] = [one for one in _wanted if one.scoped]
        settle()


class use:
    """`enable` for a block, in all threads: `with tw.aten.use(): ...`. Blocks nest, and one object may be entered again; of an
    overload that several of them name, the innermost says which calls are ours."""

    def __init__(
        self,
        mode: str = "auto",
        *,
        include: Iterable[str] | None = None,
        exclude: Iterable[str] | None = None,
        observed: Calls | str | Path | None = None,
    ) -> None:
        self.request = chosen(mode, include, exclude, observed, True)
        self.entered: list[Request] = []

    def __enter__(self) -> None:
        with _lock:
            request = replace(self.request)
            begin(request)
            self.entered.append(request)

    def __exit__(self, *_: object) -> None:
        with _lock:
            end(self.entered.pop())


def report() -> dict[str, dict[str, Any]]:
    """For each overload in force: how many calls were ours, and why others were aten's. In mode "auto" also its verdict, what was
    gained by measured times, in microseconds, less what falling back costs, and the other releases that rows are of, if so."""
    with _lock:
        return {n: reported(o) for n, o in sorted(_active.items())}


def reported(one: Override) -> dict[str, Any]:
    said = {"taken": one.taken, "declined": dict(one.declined)}
    if one.verdicts is None:
        return said
    gained = sum(gain * tally[0] for gain, tally in one.tallies.items())
    lost = (one.verdicts.fallback_us or 0.0) * sum(one.declined.values())
    said |= {"verdict": one.verdicts.verdict(one.name), "gained_us": gained - lost}
    foreign = one.verdicts.foreign(one.name)
    return said if foreign is None else {**said, "note": foreign}


def explain(name: str, *args: Any, **kwargs: Any) -> str:
    """Who takes a call, and why, in one line. The call is made: of a composite, what is said is of the first that it calls."""
    found: Any = torch.ops.aten
    for part in name.split("."):
        if not hasattr(found, part):
            raise ValueError(f"aten: torch does not define {name!r}")
        found = getattr(found, part)
    with Watch() as watch:
        found(*args, **kwargs)
    return watch.said or f"{name}: aten's, which calls nothing else"


class Watch(TorchDispatchMode):
    """Says who takes the first call inside."""

    said = ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        if self.said:
            return func(*args, **kwargs)
        if name in INSIDE:  # the call is torch's, and what it calls may be ours
            leaf, inner = INSIDE[name]
            given = inner(*args, **kwargs)
            self.ask(leaf, *given)
            return func(*args, **kwargs)
        if name not in table.FORMS:
            self.said = f"{name}: aten's, there is no replacement"
            return func(*args, **kwargs)
        made = self.ask(name, args, kwargs)
        return func(*args, **kwargs) if made is None else made

    def ask(self, name: str, args: Any, kwargs: Any) -> Any:
        """What our replacement gives; None where it declines."""
        with Run():
            try:
                override = _active.get(name)
                if override is not None:  # measurements may say that it is aten's
                    override.tally(args, kwargs)
                made = table.FORMS[name](*args, **kwargs)
                self.said = f"{name}: ours, by the engine {table.ENGINE[name]}"
                return made
            except Declined as reason:
                self.said = f"{name}: aten's, because of {reason}"
                return None
