"""Which implementation takes a call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.declaration import Declaration, Triton
from ..core.flat import given_tensors
from ..core.outs import outs_of
from ..core.target import Target

AUTO = "auto"  # what a call that leaves the choice to us asks for
forced: ContextVar[str | None] = ContextVar("forced", default=None)


@contextlib.contextmanager
def force(name: str) -> Iterator[None]:
    """`force("reference")` takes the reference on any device; `force("triton")` takes kernels of ours, never a library's, and
    runs them on CPU tensors through the interpreter (a process with TRITON_INTERPRET=1); any other implementation's name
    takes that one where it applies."""
    token = forced.set(name)
    try:
        yield
    finally:
        forced.reset(token)


def implementation(op: Declaration, values: Mapping[str, Any], device: torch.device | None = None) -> Triton | None:
    """The implementation for these arguments; None is the reference. On a GPU nothing matching raises."""
    if op.signature.lists:
        given = given_tensors(values)
        if not given:
            return None  # empty lists are on no device
        device = device or given[0].device
    device = device or next(v.device for v in values.values() if isinstance(v, Tensor))
    asked = AUTO if op.asks is None else values.get(op.asks, AUTO)
    wanted = forced.get() if asked == AUTO else asked  # what a call asks for comes first
    if wanted == "reference" or (device.type != "cuda" and wanted is None):
        return None
    target = Target.at(device)
    space = SimpleNamespace(**{**values, "out": next(iter(outs_of(op, values)), None)})
    others = []
    for one in op.implementations:
        if (one.library and device.type == "cpu") or not one.takes(target, space):
            continue
        if not one.library if wanted == "triton" else wanted in (None, one.name):
            return one
        others.append(one.name)
    what = ("implementation" if asked == AUTO else op.asks) + (f" {wanted}" if others else "")
    tried = op.explain(values) + (f"; {', '.join(others)} would do" if others else "")
    raise RuntimeError(f"{op.name}: no {what} for these arguments on {target.arch}: {tried}")
