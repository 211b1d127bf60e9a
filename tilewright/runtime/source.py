"""The code of launches as text, and a hash of it: kernels, every function of this library that they call, and the constants that
they are launched with. Comment lines, blank lines and indentation do not count."""

from __future__ import annotations

import hashlib
import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import is_dataclass
from functools import cache
from typing import Any

from torch import Tensor
from triton import JITFunction

from ..core.nest import labels, leaves
from .kernel import Arguments, Wanted

OURS = __name__.partition(".")[0] + "."


def hashed(launches: Iterable[Wanted]) -> str:
    """Sixteen hexadecimal digits. A grid may depend on the chip, so this is asked with that chip pretended."""
    text = "\n".join(part for wanted in launches for part in described(wanted))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def described(wanted: Wanted) -> Iterator[str]:
    """A launch as lines of text: kernels' sources, grid, constants and options."""
    yield from sources(wanted.kernel.jit)
    yield f"grid={tuple(wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered))))}"
    for parameter, value in zip(wanted.kernel.jit.params, wanted.ordered):
        if parameter.is_constexpr:
            yield f"{parameter.name}={constant(value)}"
            continue
        names = labels(parameter.name, value)
        for path, leaf in leaves((value,)):
            if leaf is None or isinstance(leaf, Tensor):
                yield f"{names[path[1:]]}: {getattr(leaf, 'dtype', None)}"
    yield repr(sorted(wanted.options.items()))


def constant(value: Any) -> str:
    if isinstance(value, JITFunction) or callable(value):
        return "\n".join(sources(value))
    if is_dataclass(value):
        value = tuple(vars(value).values())
    if isinstance(value, tuple) and any(isinstance(one, JITFunction) for one in value):
        return "\n".join(map(constant, value))
    return repr(value)


def sources(function: Any, seen: set[int] | None = None) -> Iterator[str]:
    """The text of a kernel and of every function of this library that it calls, each once."""
    seen = set() if seen is None else seen
    plain: Callable = getattr(function, "fn", function)
    if id(plain) in seen or not isinstance(plain, types.FunctionType):
        return
    seen.add(id(plain))
    yield text_of(plain)
    for name in names_in(plain.__code__):
        value = plain.__globals__.get(name)
        if callable(getattr(value, "fn", None)) and value.fn.__module__.startswith(OURS):
            yield from sources(value, seen)
        elif hasattr(value, "value") and type(value).__name__ == "constexpr":
            yield f"{name}={value.value!r}"


def names_in(code: types.CodeType) -> list[str]:
    """The names that a function's code looks up, in an order that does not depend on the Python that compiled it."""
    found = set(code.co_names)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            found.update(names_in(inner))
    return sorted(found)


@cache
def text_of(function: types.FunctionType) -> str:
    """A function's lines without indentation, blank lines and comment lines."""
    lines = (line.strip() for line in inspect.getsource(function).splitlines())
    return "\n".join(line for line in lines if line and not line.startswith("#"))
