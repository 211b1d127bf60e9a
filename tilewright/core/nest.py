"""Arguments of kernels that hold others: tuples, with or without names, of tensors, numbers and None."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from operator import itemgetter
from typing import Any

Path = tuple[int, ...]


def leaves(values: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """What lies in (tuples in) a list or tuple, and where: the position in it, in the tuple there, and so on."""
    for at, value in enumerate(values):
        if isinstance(value, tuple):
            yield from leaves(value, (*path, at))
        else:
            yield (*path, at), value


def mapped(change: Callable[[Path, Any], Any], value: Any, path: Path = ()) -> Any:
    """`change(path, leaf)` in the place of every leaf; tuples keep their names."""
    if not isinstance(value, tuple):
        return change(path, value)
    made = [mapped(change, item, (*path, at)) for at, item in enumerate(value)]
    return type(value)(*made) if hasattr(value, "_fields") else tuple(made)


def labels(name: str, value: Any) -> dict[Path, str]:
    """What to call the leaves of an argument: `WAY.codes`, `SOURCE.0`, and one that is no tuple by its own name."""
    if not isinstance(value, tuple):
        return {(): name}
    fields = getattr(value, "_fields", range(len(value)))
    return {
        (at, *path): label
        for at, (field, item) in enumerate(zip(fields, value))
        for path, label in labels(f"{name}.{field}", item).items()
    }


def picker(at: Sequence[int]) -> Callable[[Sequence], tuple]:
    """A function that gives, as a tuple, what stands at these places."""
    if len(at) > 1:
        return itemgetter(*at)
    return (lambda values: (values[at[0]],)) if at else lambda values: ()
