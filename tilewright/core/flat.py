"""Results and arguments as plain tensors: taken out of tuples, lists and quantised values, and put together again."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from .format import Format, Quantized


def as_tuple(results: Any) -> tuple:
    return results if isinstance(results, tuple) else (results,)


def mapped(change: Callable[[Tensor], Tensor], results: Any) -> Any:
    """The results with `change` applied to every plain tensor among them."""
    if isinstance(results, list):
        return [change(r) for r in results]
    made = tuple(r if isinstance(r, Quantized) else change(r) for r in as_tuple(results))
    return made if isinstance(results, tuple) else made[0]


def taken_apart(results: Any) -> tuple[list[Tensor | None], Callable[[Any], Any]]:
    """(results as plain tensors, a function that puts such tensors together to results of the same kind)."""
    flat: list[Tensor | None] = []
    makers: list[tuple[int, Callable | None]] = []  # how many tensors a result is, and what makes it of them
    for r in as_tuple(results):
        quantised = isinstance(r, Quantized)
        pieces = [*r.tensors(), r.offsets] if quantised else [r]
        flat += pieces
        makers.append((len(pieces), r.maker() if quantised else None))
    if all(make is None for _, make in makers):
        return flat, lambda pieces: tuple(pieces) if isinstance(pieces, list) else (pieces,)

    def restore(pieces: Any) -> Any:
        made, at = [], 0
        for count, make in makers:
            made.append(pieces[at] if make is None else make(pieces[at : at + count]))
            at += count
        return tuple(made)

    return flat, restore


def flattened(result: Any) -> tuple[Tensor | None, ...]:
    """A result, or several, as plain tensors."""
    if isinstance(result, (list, tuple)):
        return tuple(piece for one in result for piece in flattened(one))
    return tuple(result.tensors()) if isinstance(result, Quantized) else (result,)


def given_tensors(values: Mapping[str, Any]) -> list[Tensor]:
    """Every tensor among the arguments, those in lists included."""
    found: list[Tensor] = []
    for value in values.values():
        if isinstance(value, Tensor):
            found.append(value)
        elif isinstance(value, (list, tuple)):
            found += [t for t in value if isinstance(t, Tensor)]
    return found


def in_words(value: Any) -> Any:
    """An argument as an error message shows it."""
    if isinstance(value, (list, tuple)) and any(isinstance(t, Tensor) for t in value):
        return f"{len(value)} of {sorted({str(getattr(t, 'dtype', t)) for t in value})}"
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else value


def wants_grad(value: Any) -> bool:
    return any(t.requires_grad for t in given_tensors({"": value}))


def plain_tensors(values: Mapping[str, Any]) -> list[Tensor]:
    """Every plain tensor among the arguments, those inside a format or a Quantized included."""
    found: list[Tensor] = []
    for value in values.values():
        if isinstance(value, Format) and value.tensor is not None:
            found.append(value.tensor)
        elif isinstance(value, (Tensor, list, tuple)):
            found += [t for t in flattened(value) if isinstance(t, Tensor)]
    return found
