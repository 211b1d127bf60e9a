"""`kernel`: a Triton or Gluon function together with its grid. Calling it launches it.

There is one launch path. A call names its runtime arguments by position and its constants by keyword; an argument may be a
tuple of others, which the kernel hands on to what needs them. The kernel's own default (or a tuned row) adds the rest; the
compiled variant is found by a key of dtypes, 16-byte alignment, the class of each integer, constants and device. What was
launched is also told to the active `Recorder`, so that the op which called us can replay it without coming back here (`plan.py`).
"""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from ..core import triton_versions
from ..core.nest import leaves
from ..core.target import INTERPRETING, Target
from ..toolchain import faults
from . import config, plan
from .launch import CudaLaunch, HostLaunch, Launch, PublicLaunch
from .list_launch import ListLaunch

if INTERPRETING:
    from ..toolchain import interpret

    interpret.install()

# Launch options that Triton takes beside the kernel's own arguments.
OPTIONS = frozenset(("num_warps", "num_stages", "num_ctas", "maxnreg", "launch_pdl", "launch_cooperative_grid"))
# Compiled launchers that are called directly, by how they take a kernel's arguments; elsewhere Triton's public call.
DIRECT = {"row": CudaLaunch, "list": ListLaunch}
CUDA_ERROR = "Triton Error [CUDA]"  # begins what the driver says through a launcher
# Whether dependent kernels are launched early (`device/dependent.py`): off to measure what that brings
EARLY = os.environ.get("TILEWRIGHT_DEPENDENT") != "0"


class NotCompiledError(RuntimeError):
    """A kernel would have to be compiled where that cannot be: during CUDA graph capture."""


class Arguments(dict):
    """A kernel's arguments by name, readable as attributes in grids and defaults."""

    __getattr__ = dict.__getitem__


def integer_class(value: int, specialised: bool) -> Any:
    """What the compiled code may assume of an integer: its width and, if specialised, that it is 1 or a multiple of 16."""
    wide = not -(2**31) <= value < 2**31
    if not specialised:
        return wide
    return 1 if value == 1 else (wide, value % 16 == 0)


def argument_class(value: Any, specialised: bool) -> Any:
    """The part of the variant key that one argument contributes."""
    if isinstance(value, Tensor):
        return value.dtype, value.data_ptr() % 16 == 0
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int):
        return integer_class(value, specialised)
    if isinstance(value, float):
        return float
    if isinstance(value, tuple):
        return tuple(argument_class(item, specialised) for item in value)
    if hasattr(value, "block_shape"):  # a tensor descriptor: its box and layout are part of the type
        return value.base.dtype, tuple(value.block_shape), repr(value.layout)
    raise TypeError(f"a kernel cannot take a {type(value).__name__}")


class Wanted(NamedTuple):
    """A launch that `collect` kept from happening: what would have to be compiled."""

    kernel: Kernel
    ordered: list
    options: dict[str, Any]


_collected: ContextVar[list[Wanted] | None] = ContextVar("collected", default=None)


@contextlib.contextmanager
def collect() -> Iterator[list[Wanted]]:
    """Collect launches instead of making them; any tensors will do."""
    token = _collected.set([])
    try:
        yield _collected.get()
    finally:
        _collected.reset(token)


def collecting() -> bool:
    """Whether launches are collected, not made."""
    return _collected.get() is not None


class Kernel:
    """See the module. `tokens` names integers that are never specialised, so batch 1, 2 and 16 share a binary.

    `dependent`: programs wait before their first access to memory, so that they may begin before the launch before has ended
    (`device/dependent.py`). Such a kernel has a constant DEPENDENT, which says whether they do, and which nobody gives it: it is
    true where the chip begins launches early. A function of the arguments says which launches are meant."""

    def __init__(
        self,
        function: Callable,
        grid: Callable[[Arguments], tuple],
        *,
        jit: Callable = triton.jit,
        tokens: Iterable[str] = (),
        tune_by: Iterable[str] = (),
        default: Callable[[Arguments], Mapping[str, Any]] = lambda a: {},
        candidates: Callable[[Arguments], Iterable[Mapping[str, Any]]] | None = None,
        dependent: bool | Callable[[Arguments], bool] = False,
    ) -> None:
        self.name = function.__name__
        self.__doc__ = function.__doc__
        self.jit = jit(function, do_not_specialize=list(tokens))
        self.grid, self.default, self.candidates = grid, default, candidates
        self.tokens, self.tune_by = frozenset(tokens), tuple(tune_by)
        self.names: list[str] = list(self.jit.arg_names)
        self.dependent = dependent
        # By the function itself: where a Triton does not offer Gluon, what stands for its `jit` has no arguments
        if bool(dependent) != ("DEPENDENT" in inspect.signature(function).parameters):
            raise TypeError(f"{self.name}: a kernel has the constant DEPENDENT if and only if it is dependent")
        self.variants: dict[tuple, Any] = {}
        # Of a variant, by id: what launches it directly, or None
        self._direct: dict[int, Callable | None] = {}
        self._compiling = threading.Lock()

    def __repr__(self) -> str:
        return f"<kernel {self.name}>"

    def __call__(self, *args: Any, **constants: Any) -> None:
        a = Arguments(zip(self.names, args))
        a.update(constants)
        tensor = next(v for _, v in leaves(args) if isinstance(v, Tensor))
        target = Target.at(tensor.device)
        a.update(config.config_for(self, a, target))
        options = {k: a.pop(k) for k in OPTIONS & a.keys()}
        if self.dependent:
            a["DEPENDENT"] = self.begins_early(a, target)
            options |= {"launch_pdl": True} if a["DEPENDENT"] else {}
        grid = tuple(self.grid(a))
        if 0 in grid:
            return
        ordered = [a[name] for name in self.names]
        if any(isinstance(a[name], tuple) for name in self.tokens):
            raise TypeError(
                f"{self.name}: Triton specialises integers in tuples: tokens must be arguments of their own"
            )
        recorder = plan.Recorder.active()
        collected = _collected.get()
        if collected is not None:
            collected.append(Wanted(self, ordered, options))
            if recorder is not None:
                recorder.foreign = "a collected launch"
            return
        with contextlib.nullcontext() if INTERPRETING else torch.cuda.device(tensor.get_device()):
            launch = self._prepare(ordered, options, grid, tensor.get_device())
            if recorder is not None:
                recorder.launch(launch, ordered)
            if recorder is None or not recorder.compile_only:
                launch.first()

    def begins_early(self, a: Arguments, target: Target) -> bool:
        """Whether a launch of this dependent kernel may begin before the one before has ended."""
        if "DEPENDENT" in a:
            raise TypeError(f"{self.name}: DEPENDENT is not for callers to say")
        asked = self.dependent(a) if callable(self.dependent) else self.dependent
        return asked and EARLY and target.early_launch and not INTERPRETING

    def key(self, ordered: list, options: Mapping[str, Any], device: int) -> tuple:
        """What a compiled variant depends on; two calls with one key share a binary."""
        constants = {p.name for p in self.jit.params if p.is_constexpr}
        wide = {p.name for p in self.jit.params if p.annotation_type == "i64" and p.name in self.tokens}
        parts = [
            value if name in constants else int if name in wide else argument_class(value, name not in self.tokens)
            for name, value in zip(self.names, ordered)
        ]
        return device, tuple(parts), tuple(sorted(options.items()))

    def variant(self, ordered: list, options: Mapping[str, Any], grid: tuple, device: int) -> Any:
        key = self.key(ordered, options, device)
        compiled = self.variants.get(key)
        if compiled is None:
            with self._compiling:
                compiled = self.variants.get(key)
                if compiled is None:
                    if torch.cuda.is_current_stream_capturing():
                        raise NotCompiledError(
                            f"{self.name} would have to be compiled during CUDA graph capture: call"
                            " tilewright.warmup(op, ...) with these shapes and dtypes before capturing"
                        )
                    compiled = self.jit.warmup(*ordered, grid=grid, **triton_versions.COMPILED_WITH, **options)
                    faults.refuse(self.name, compiled)
                    _ = (
                        compiled.run
                    )  # loads the binary, before another thread can find a variant that is loaded in part
                    self.variants[key] = compiled
        return compiled

    def _prepare(self, ordered: list, options: Mapping[str, Any], grid: tuple, device: int) -> Launch:
        if INTERPRETING:
            return HostLaunch(self.jit, grid, ordered)
        compiled = self.variant(ordered, options, grid, device)
        launcher = compiled.run
        scratch = any(getattr(launcher, f"{use}_scratch_size", 0) for use in ("global", "profile"))
        hooks = triton.knobs.runtime.launch_enter_hook, triton.knobs.runtime.launch_exit_hook
        hooked = any(getattr(hook, "calls", hook) for hook in hooks)  # a chain of hooks is true even when it is empty
        if scratch or hooked:
            return PublicLaunch(compiled, grid, ordered)
        if id(compiled) not in self._direct:
            return self._tried(compiled, grid, ordered)
        return (self._direct[id(compiled)] or PublicLaunch)(compiled, grid, ordered)

    def _tried(self, compiled: Any, grid: tuple, ordered: list) -> Launch:
        """The first launch of a variant: direct if the launcher is a known one that takes what it is given, else Triton's own."""
        kind = triton_versions.launcher_of(type(compiled.run))
        direct, reason = DIRECT.get(kind), "its compiled launcher is not known"
        launch: Launch = PublicLaunch(compiled, grid, ordered)
        if direct is not None:
            try:
                made = direct(compiled, grid, ordered)
                made.trial()
                launch = made
            except Exception as error:
                if CUDA_ERROR in str(error):
                    raise
                direct, reason = None, f"its compiled launcher refused {self.name}: {error}"
        if direct is None:
            _say_once(
                f"triton {triton.__version__}: using Triton's public launch, which costs the host more per call ({reason})"
            )
        self._direct[id(compiled)] = direct
        return launch


_said: set[str] = set()


def _say_once(text: str) -> None:
    if text not in _said:
        _said.add(text)
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def kernel(grid: Callable[[Arguments], tuple], **settings: Any) -> Callable[[Callable], Kernel]:
    """Declare a kernel: `@kernel(grid=lambda a: (cdiv(a.M, a.ROWS),), tokens=("M",), default=lambda a: dict(...))`."""
    return lambda function: Kernel(function, grid, **settings)
