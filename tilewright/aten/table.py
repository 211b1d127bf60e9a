"""Every overload that there is a replacement for: the function that takes its arguments, and the engine behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import (
    attention,
    forms,
    index_add,
    index_map,
    index_put,
    index_take,
    nll,
    norm_channels,
    norm_rows,
    norm_weights,
    pointwise,
    product,
    random,
    reduction_rows,
    scan,
    select,
    softmax,
    window,
)
from . import sort as sorting
from .row import Declined, Row, of_numbers
from .rows import ROWS

NUMBERS = (bool, int, float, complex)


def overload_of(name: str) -> torch._ops.OpOverload:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def name_of(overload: torch._ops.OpOverload) -> str:
    return str(overload).removeprefix("aten.").removesuffix(".default")


def tensor_slots(overload: torch._ops.OpOverload) -> list[int]:
    """Which arguments are tensors, by their places in the schema."""
    return [at for at, a in enumerate(overload._schema.arguments) if isinstance(a.type, torch.TensorType)]


def pointwise_form(row: Row, name: str) -> Callable[..., Any]:
    """A call of an overload, by its schema, as a call of its row: in place, into `out`, or with a new result."""
    arguments = overload_of(name)._schema.arguments
    names = [a.name for a in arguments]
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    in_place = name.partition(".")[0].endswith("_")

    def call(*args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(names, args)), **kwargs}
        if not any(isinstance(values[n], Tensor) for n in (*row.tensors, *names[:1])):
            raise Declined("numbers alone")
        if row.when is not None:
            reason = row.when(values)
            if reason is not None:
                raise Declined(reason)
        out = values["self"] if in_place else values.get("out")
        return pointwise.run(row, values, out)

    return of_numbers(*row.tensors, *(n.name for n in row.numbers), asks=row.asks)(call)


def of_tensors(form: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A form that takes numbers in tensors' places only where it says so: torch hands a number that it has wrapped as a tensor back
    to Python as the number."""
    arguments, numbers = overload_of(name)._schema.arguments, getattr(form, "numbers", ())
    slots = [at for at in tensor_slots(overload_of(name)) if arguments[at].name not in numbers]

    @functools.wraps(form)
    def call(*args: Any, **kwargs: Any) -> Any:
        for at in slots:
            if at < len(args) and isinstance(args[at], NUMBERS):
                raise Declined("a number in a tensor's place")
        return form(*args, **kwargs)

    return call


OTHERS = {**forms.FORMS, **reduction_rows.FORMS, **scan.FORMS, **index_map.FORMS}
INDEX = {**index_take.FORMS, **index_put.FORMS, **index_add.FORMS, **select.FORMS, **nll.FORMS}
OTHERS |= {**INDEX, **sorting.FORMS, **random.FORMS}
ROWS_ENGINE = {**softmax.FORMS, **norm_rows.FORMS, **norm_channels.FORMS, **norm_weights.FORMS}
OTHERS |= {**ROWS_ENGINE, **product.FORMS, **attention.FORMS, **window.FORMS}
FORMS: dict[str, Callable[..., Any]] = {
    **{name: pointwise_form(row, name) for row in ROWS for name in row.overloads},
    **{name: of_tensors(form, name) for name, form in OTHERS.items()},
}
ENGINE: dict[str, str] = {
    **dict.fromkeys(FORMS, "pointwise"),
    **dict.fromkeys(reduction_rows.FORMS, "reduction"),
    **dict.fromkeys(scan.FORMS, "scan"),
    **dict.fromkeys(index_map.FORMS, "index_map"),
    **dict.fromkeys(INDEX, "index"),
    **dict.fromkeys(sorting.FORMS, "sort"),
    **dict.fromkeys(random.FORMS, "random"),
    **dict.fromkeys(ROWS_ENGINE, "rows"),
    **dict.fromkeys(product.FORMS, "product"),
    **dict.fromkeys(attention.FORMS, "attention"),
    **dict.fromkeys(window.FORMS, "window"),
}
