"""Every overload that there is a replacement for: the function that takes its arguments, and the engine behind it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import forms, index_map, pointwise, reduction_rows, scan
from .row import Declined, Row
from .rows import ROWS


def pointwise_form(row: Row, name: str) -> Callable[..., Any]:
    """A call of an overload, by its schema, as a call of its row: in place, into `out`, or with a new result."""
    packet, _, overload = name.partition(".")
    schema = getattr(getattr(torch.ops.aten, packet), overload or "default")._schema
    names = [a.name for a in schema.arguments]
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    in_place = packet.endswith("_")

    def call(*args: Any, **kwargs: Any) -> Any:
        values = {**defaults, **dict(zip(names, args)), **kwargs}
        if row.when is not None:
            reason = row.when(values)
            if reason is not None:
                raise Declined(reason)
        out = values["self"] if in_place else values.get("out")
        return pointwise.run(row, values, out)

    return call


FORMS: dict[str, Callable[..., Any]] = {
    **{name: pointwise_form(row, name) for row in ROWS for name in row.overloads},
    **forms.FORMS,
    **reduction_rows.FORMS,
    **scan.FORMS,
    **index_map.FORMS,
}
ENGINE: dict[str, str] = {
    **dict.fromkeys(FORMS, "pointwise"),
    **dict.fromkeys(reduction_rows.FORMS, "reduction"),
    **dict.fromkeys(scan.FORMS, "scan"),
    **dict.fromkeys(index_map.FORMS, "index_map"),
}
