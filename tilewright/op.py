"""`Op`: one declaration of one operation (`core/declaration.py`), with all that follows from it: the public function, its CPU path,
validation, autograd, the registered `torch.ops.tilewright.*` op with its fake, cost, tests and the catalogue entry.

    rms_norm = Op("rms_norm", reference, inputs, Triton(forward, backward), where={...}, results={...}, gradient=...)

This module assembles what stands below it, and nothing there imports it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .core.declaration import Bars, Cost, Gradient, Out, Part, Sharding, Triton, single, upcast
from .runtime import call, register
from .runtime.choose import force
from .runtime.results import flatten, saved_results
from .runtime.run import Runner, compiling_only

__all__ = [
    "OPS",
    "Bars",
    "Cost",
    "Gradient",
    "Op",
    "Out",
    "Part",
    "Sharding",
    "Triton",
    "force",
    "single",
    "upcast",
    "warmup",
]
OPS: dict[str, Op] = {}


class Op(Runner):
    """A declaration that can be run, called and found. Calling an op is calling its `function`."""

    def __init__(self, name: str, *args: Any, **said: Any) -> None:
        super().__init__(name, *args, **said)
        self.function = call.public(self)
        self.overloads = register.register(self)
        OPS[name] = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def warmup(function: Callable, *args: Any, backward: bool = True, **kwargs: Any) -> None:
    """Compile all kernels that `function(*args, **kwargs)` and its backward need, launching none of them."""
    op = getattr(function, "op", function)
    if not isinstance(op, Op):
        raise TypeError(f"warmup: function must be an operation of tilewright's, got {type(function).__name__}")
    with compiling_only():
        values = op.signature.bind(args, kwargs)
        op.validate(values)
        one = op.implementation(values)
        if one is None:  # the reference has nothing to compile
            return
        needs = frozenset(n for n in op.differentiable if backward and values[n] is not None)
        flat = flatten(op.run(values, needs))
        if needs and one.backward is not None:
            grads = [torch.empty(flat[i].shape, dtype=flat[i].dtype, device=flat[i].device) for i in op.graded(values)]
            op.run_backward(values, saved_results(op, flat), grads, needs, one)
