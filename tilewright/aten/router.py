"""Which calls of torch's operators are ours: registered at the backend key, and aten's own kernel for everything else.

A registration is for the whole process, since autograd's own threads must see it. Autograd, autocast, vmap and DTensor stand above
the backend key and work as before. An override takes a call if its row can; whatever the row declines, invalid arguments included,
goes to the kernel that was there before, whose exception is then the exception. Both are counted.
"""

from __future__ import annotations

import difflib
import threading
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.library import Library
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.target import INTERPRETING
from ..runtime.kernel import NotCompiledError
from ..runtime.plan import Recorder
from . import table
from .row import Declined
from .table import NUMBERS, name_of, overload_of, tensor_slots

STALE = "SafeKernelFunction has been invalidated"  # begins what torch says of a captured kernel whose library is gone

_lock = threading.RLock()
_active: dict[str, Override] = {}
_wanted: list[Request] = []  # of each `enable` and `use` in force


class _Thread(threading.local):
    ours = False  # whether this thread is inside a replacement: its host code and the interpreter use torch as it is


_thread = _Thread()


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
        self.slots = tensor_slots(self.overload)
        self.retired: list[Any] = []
        self.register()

    def register(self) -> None:
        """Capture the kernel that is there, and take its place."""
        self.kernel = torch.library.get_kernel(self.overload, self.key)
        self.library = Library("aten", "IMPL")
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="(?s).*Overriding a previously registered kernel", category=UserWarning
            )
            self.library.impl(self.name, self.call, self.key, with_keyset=True)

    def remove(self) -> None:
        self.library._destroy()

    def call(self, keys: Any, *args: Any, **kwargs: Any) -> Any:
        if _thread.ours or Recorder.active() is not None:
            return self.before(keys, args, kwargs)
        _thread.ours = True
        try:
            made = self.form(*args, **kwargs)
            self.taken += 1
            return made
        except Declined as declined:
            reason = str(declined)
        except NotCompiledError:
            reason = "a kernel that is not compiled, during graph capture"
        finally:
            _thread.ours = False
        self.declined[reason] += 1
        return self.before(keys, args, kwargs)

    def before(self, keys: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """aten's own answer."""
        args, kernel = self.as_tensors(args), self.kernel
        try:
            return kernel.call_boxed(keys, *args, **kwargs)
        except RuntimeError as error:
            if not str(error).startswith(STALE):
                raise
        with _lock:
            if self.kernel is kernel:
                self.capture_again()
        return self.kernel.call_boxed(keys, *args, **kwargs)

    def capture_again(self) -> None:
        """The library whose kernel was captured is gone, so that another lies below ours: step aside to see it. Our own
        registration is kept alive, for this very call came through it."""
        self.retired.append(torch.library.get_kernel(self.overload, self.key))
        self.remove()
        self.register()

    def as_tensors(self, args: tuple) -> Sequence[Any]:
        """A Python number may stand in a tensor's place, which a captured kernel refuses: as a tensor without dimensions that
        promotes as the number does."""
        if all(not slot or not isinstance(v, NUMBERS) for v, slot in zip(args, self.slots)):
            return args
        like = next((v for v in args if isinstance(v, Tensor)), None)
        before, _thread.ours = _thread.ours, True
        try:
            return [wrapped(v, like) if slot and isinstance(v, NUMBERS) else v for v, slot in zip(args, self.slots)]
        finally:
            _thread.ours = before


def wrapped(value: Any, like: Tensor | None) -> Tensor:
    """A number as the tensor that torch's own kernels take for it, beside a tensor: float64 beside floats, else of the dtype that
    both promote to; alone, of the widest dtype of its kind. A bool is one."""
    if isinstance(value, bool):
        return torch.tensor(value)
    if isinstance(value, float) and (like is None or like.is_floating_point()):
        return torch.tensor(value, dtype=torch.float64)
    if like is None:
        return torch.tensor(value)
    floating = like.is_floating_point() and not isinstance(value, complex)
    return torch.tensor(value, dtype=torch.float64 if floating else torch.result_type(like, value))


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
        if name not in table.FORMS:
            self.said = f"{name}: aten's, there is no replacement"
            return func(*args, **kwargs)
        _thread.ours = True
        try:
            made = table.FORMS[name](*args, **kwargs)
            self.said = f"{name}: ours, by the engine {table.ENGINE[name]}"
            return made
        except Declined as reason:
            self.said = f"{name}: aten's, because of {reason}"
            return func(*args, **kwargs)
        finally:
            _thread.ours = False
