"""Which calls of torch's operators are ours: registered at the backend key, and aten's own kernel for everything else.

A registration is for the whole process, since autograd's own threads must see it. Autograd, autocast, vmap and DTensor stand above
the backend key and work as before. An override takes a call if its row can; whatever the row declines, invalid arguments included,
goes to the kernel that was there before, whose exception is then the exception. Both are counted.
"""

from __future__ import annotations

import contextlib
import difflib
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library

from ..core.target import INTERPRETING
from . import table
from .row import Declined

_inside = threading.local()
_lock = threading.RLock()
_active: dict[str, Override] = {}
_wanted: list[Request] = []  # of each `enable` and `use` in force


@contextlib.contextmanager
def apart() -> Iterator[None]:
    """Inside, this thread's calls are aten's: host code of ours, and the interpreter, use torch themselves."""
    before = getattr(_inside, "off", False)
    _inside.off = True
    try:
        yield
    finally:
        _inside.off = before


@dataclass(eq=False)
class Request:
    """The overloads that one `enable`, or a block of `use`, asks for."""

    names: frozenset[str]
    scoped: bool


class Override:
    """One overload: the row that serves it, the kernel that was there before, and what became of its calls."""

    def __init__(self, name: str) -> None:
        self.name, self.form = name, table.FORMS[name]
        self.overload = overload_of(name)
        self.key = "CPU" if INTERPRETING else "CUDA"
        self.taken, self.declined = 0, Counter()
        self.kernel = torch.library.get_kernel(self.overload, self.key)
        self.library = Library("aten", "IMPL")
        self.library.impl(name, self.call, self.key, with_keyset=True, allow_override=True)

    def call(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(_inside, "off", False):
            return self.before(keys, args, kwargs)
        try:
            with apart():
                made = self.form(*args, **kwargs)
        except Declined as reason:
            self.declined[str(reason)] += 1
            return self.before(keys, args, kwargs)
        self.taken += 1
        return made

    def before(self, keys: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """aten's own answer."""
        return self.kernel.call_boxed(keys, *self.as_tensors(args), **kwargs)

    def as_tensors(self, args: Sequence[Any]) -> list[Any]:
        """A Python number may stand in a tensor's place, which a captured kernel refuses: as a tensor without dimensions that
        promotes as the number does."""
        slots = [isinstance(a.type, torch.TensorType) for a in self.overload._schema.arguments[: len(args)]]
        if all(isinstance(v, Tensor) or not slot for v, slot in zip(args, slots)):
            return list(args)
        like = next((v for v in args if isinstance(v, Tensor)), None)
        return [
            wrapped(v, like) if slot and isinstance(v, (bool, int, float, complex)) else v
            for v, slot in zip(args, slots)
        ]

    def remove(self) -> None:
        self.library._destroy()


def wrapped(value: Any, like: Tensor | None) -> Tensor:
    floating = like is not None and like.is_floating_point() and not isinstance(value, complex)
    dtype = torch.float64 if floating else torch.result_type(like, value) if like is not None else None
    return torch.tensor(value, dtype=dtype)


def overload_of(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


# ---------------------------------------------------------------- which


def resolve(names: Iterable[str]) -> frozenset[str]:
    """Overloads for names: of an overload itself, of an operator, which means all of its overloads, or of an engine."""
    found: set[str] = set()
    for name in [names] if isinstance(names, str) else names:
        own = {n for n in table.FORMS if name in (n, n.partition(".")[0], table.ENGINE[n])}
        if not own:
            packet = name.partition(".")[0]
            known = sorted({*table.FORMS, *(n.partition(".")[0] for n in table.FORMS), *table.ENGINE.values()})
            near = difflib.get_close_matches(name, known, n=3)
            missing = "" if hasattr(torch.ops.aten, packet) else ", and torch does not define it"
            raise ValueError(
                f"aten: {name!r} is no operator that there is a replacement for{missing}"
                + (f": did you mean {' or '.join(near)}?" if near else "")
            )
        found |= own
    return frozenset(found)


def chosen(mode: str, include: Iterable[str] | None, exclude: Iterable[str] | None) -> frozenset[str]:
    if mode != "all":
        raise ValueError(f"aten: mode must be 'all', got {mode!r}: there is no table of measurements to choose by yet")
    if not INTERPRETING and not torch.cuda.is_available():
        raise RuntimeError("aten: there is no GPU whose operators could be replaced")
    every = frozenset(table.FORMS) if include is None else resolve(include)
    return every - (resolve(exclude) if exclude is not None else frozenset())


def settle() -> None:
    """Register what is asked for and not there; take away what nobody asks for."""
    asked = frozenset().union(*(one.names for one in _wanted))
    for name in [n for n in _active if n not in asked]:
        _active.pop(name).remove()
    for name in sorted(asked - _active.keys()):
        _active[name] = Override(name)


# ---------------------------------------------------------------- what callers see


def enable(mode: str = "all", *, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None) -> None:
    """Replace torch's operators on the GPU by ours, in the whole process, until `disable`.

    `include` and `exclude` name overloads ("add.Tensor"), operators ("add": all their overloads) or engines ("pointwise"). What a
    replacement does not take goes to torch as before. Inside compiled functions there is no effect but on what Inductor leaves to
    aten.
    """
    with _lock:
        _wanted.append(Request(chosen(mode, include, exclude), False))
        settle()


def disable() -> None:
    """Take back every `enable`; blocks of `use` stay as they are until they end."""
    with _lock:
        _wanted[:] = [one for one in _wanted if one.scoped]
        settle()


class use:
    """`enable` for a block, in all threads: `with tw.aten.use(): ...`. Blocks nest, and one object may be entered again."""

    def __init__(
        self, mode: str = "all", *, include: Iterable[str] | None = None, exclude: Iterable[str] | None = None
    ) -> None:
        self.names = chosen(mode, include, exclude)
        self.entered: list[Request] = []

    def __enter__(self) -> None:
        with _lock:
            self.entered.append(Request(self.names, True))
            _wanted.append(self.entered[-1])
            settle()

    def __exit__(self, *_: object) -> None:
        with _lock:
            _wanted.remove(self.entered.pop())
            settle()


def report() -> dict[str, dict[str, Any]]:
    """For each overload in force: how many calls were ours, and why others were aten's."""
    with _lock:
        return {n: {"taken": o.taken, "declined": dict(o.declined)} for n, o in sorted(_active.items())}


def explain(name: str, *args: Any, **kwargs: Any) -> str:
    """Who takes a call, and why, in one line; the call is made."""
    overload = torch.ops.aten
    for part in name.split("."):
        overload = getattr(overload, part)
    if not isinstance(overload, torch._ops.OpOverload):
        with Seen() as seen:
            overload(*args, **kwargs)
        overload = seen.first
    full = overload._schema.name.removeprefix("aten::") + (
        f".{overload._overloadname}" if overload._overloadname != "default" else ""
    )
    if full not in table.FORMS:
        return f"{full}: aten's, there is no replacement"
    try:
        with apart():
            table.FORMS[full](*args, **kwargs)
    except Declined as reason:
        return f"{full}: aten's, because of {reason}"
    return f"{full}: ours, by the engine {table.ENGINE[full]}"


class Seen(torch.utils._python_dispatch.TorchDispatchMode):
    """Which overload a call reaches first."""

    first: Any = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.first = func if self.first is None else self.first
        return func(*args, **(kwargs or {}))
