"""A function of an op's arguments as what is timed of a case: its forward, its backward alone, or a step of both."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from .check import Absent
from .timing import capture_stream
from .work import Work, same_arguments

Call = Callable[[], Any]


def directed(function: Callable[..., Any], work: Work) -> Call:
    """A function of the op's arguments as the call of the case: forward, or backward alone."""
    values = same_arguments(work.values)
    if work.steps:
        return work.step(function)
    if work.case.direction != "backward":

        def forward() -> Any:
            with torch.no_grad():
                return function(**values)

        return forward
    if work.case.grad_format is not None:
        raise Absent("its gradient is not quantised")
    names = [n for n in work.op.differentiable if values[n] is not None]
    leaves = {n: values[n].detach().clone().requires_grad_() for n in names}
    with own_stream():
        results = function(**{**values, **leaves})
        results = results if isinstance(results, tuple) else (results,)
        outputs = [results[i] for i in work.op.graded_results]
    grads = [g.to(o.dtype) for g, o in zip(work.grads, outputs)]
    return lambda: torch.autograd.grad(outputs, list(leaves.values()), grads, retain_graph=True)


@contextlib.contextmanager
def own_stream() -> Iterator[None]:
    """Inside, forwards run on the stream that captures, where their backwards then run too. A CPU has no streams."""
    if not torch.cuda.is_available():
        yield
        return
    with torch.cuda.stream(capture_stream()):
        yield
    torch.cuda.synchronize()


def takes(work: Work, *names: str) -> None:
    """Raise `Absent` where a case gives an argument beside these, or wants its gradient in codes: a rival that knows nothing of it
    would compute something else."""
    if work.case.grad_format is not None:
        raise Absent("its gradient is not quantised")
    defaults = work.op.signature.defaults
    for name, value in same_arguments(work.values).items():
        if name not in names and (isinstance(value, Tensor) or value != defaults[name]):
            raise Absent(f"it has no {name}")


def needs(work: Work, *names: str) -> None:
    """Raise `Absent` where a case leaves out one of these arguments."""
    for name in names:
        if work.values[name] is None:
            raise Absent(f"it cannot do without {name}")


def forward_only(work: Work) -> None:
    if work.steps or work.case.direction == "backward":
        raise Absent("it has no backward")
