"""The public function of an op: what happens between calling it and the launches of a plan.

`front.py` says which plan a call takes. Here stands what is tried before: the guard of calls with tensors alone and no names but
`out` or `out_format`, which must cost next to nothing; and after: `dispatch`, the long way, which validates, chooses an
implementation and records.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.declaration import Declaration, is_foreign
from ..core.flat import given_tensors
from ..core.private import count_write, levels, modes, transforms
from . import register
from .choose import forced
from .front import MISS, Front, ListFront, code_of
from .plan import Recorder
from .run import Known, Runner
from .tape import Step, differentiate, taped

_tracing = torch.compiler.is_dynamo_compiling


def public(op: Runner) -> Callable[..., Any]:
    """The public function of an op: a call with no mode active goes straight to a plan, from there to the tape if gradients are
    wanted."""

    @functools.wraps(op.reference)
    def function(*args: Any, **kwargs: Any) -> Any:
        if _tracing():
            return register.call(op, op.signature.bind(args, kwargs))
        if lists is not None:
            return lists.call(args, kwargs)
        if forced.get() is None and levels._current_level < 0:
            if not kwargs:
                kinds = front.plain
            elif len(kwargs) == 1 and "out_format" in kwargs:
                kinds = front.coded.get(code_of(kwargs["out_format"]), ())
            else:
                kinds = ()
            for check, count, recorded, replay, restore in kinds:
                if count == len(args) and check(*args):
                    if recorded is not None and recorded != torch.is_grad_enabled():
                        continue
                    results = replay(args)
                    if results is None:
                        break
                    return results if restore is None else restore(results)
            if len(kwargs) == 1 and "out" in kwargs:
                out = kwargs["out"]
                given = (*args, out)
                for check, count, replay in front.into:
                    if count == len(given) and check(*given):
                        if replay(given) is None:
                            break
                        count_write((out,))
                        return out
            result = front.replayed(args, kwargs)
            if result is not MISS:
                return result
        return front.keyed(args, kwargs)

    def unusual(args: tuple, kwargs: Mapping[str, Any], *key: Any) -> Any:
        return step(op, args, kwargs) if is_step() else dispatch(op, args, kwargs, *key)

    def shared(args: tuple, kwargs: Mapping[str, Any]) -> Any:
        op.validate(op.signature.bind(args, kwargs))
        return MISS

    def tape(args: tuple, kwargs: Mapping[str, Any], slots: list[Tensor], results: Any, known: Known) -> Any:
        # A step knows arguments by identity: a call that gives one tensor for two of them leaves it to a later one to make it
        if known.step is None and len({*map(id, slots)}) == len(slots):
            known.step = Step.of(op, op.signature.bind(args, kwargs), slots, known) or False
        if known.step and forced.get() is None:
            return known.step.taped(slots, results)
        return taped(op, op.signature.bind(args, kwargs), results, known.implementation)

    front = Front(op, unusual, functools.partial(dispatch, op), shared, tape)
    lists = ListFront(op, unusual) if op.signature.lists else None
    function.op, function.__name__, function.__qualname__ = op, op.name, op.name
    function.__signature__ = signature_of(op)
    return function


def is_step() -> bool:
    """Whether the one mode that is active is the recorder of a run that wants no gradients: a call is then a step of its plan."""
    recorder = Recorder.active()
    watched = recorder is not None and recorder.watch and modes() == 1
    return watched and not (torch.is_grad_enabled() or transforms() or levels._current_level >= 0)


def step(op: Runner, args: tuple, kwargs: Mapping[str, Any]) -> Any:
    """A call from within a run that is recorded."""
    values = op.signature.bind(args, kwargs)
    if any(is_foreign(t) for t in given_tensors(values)):
        return register.call(op, values)
    op.validate(values)
    return op.public(op.run(values))


def dispatch(op: Runner, args: tuple, kwargs: Mapping[str, Any], key: tuple | None = None, slots: Any = None) -> Any:
    """A call that no plan answered. The plan it makes, over `slots`, is kept under `key` unless that is None."""
    values = op.signature.bind(args, kwargs)
    tensors = given_tensors(values)
    if levels._current_level >= 0:
        if forced.get() == "reference":
            op.signature.validate(values)
            return op.public(op.by_reference(op.arguments(values)))  # torch differentiates it, in any mode
        return register.constant_call(op, values)
    if any(is_foreign(t) for t in tensors) or modes() or transforms():
        if op.sharded is not None and any(hasattr(t, "device_mesh") for t in tensors):
            return op.sharded(**values)
        return register.call(op, values)
    op.validate(values)
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return differentiate(op, values, key, slots)
    return op.record(values, key, op.slots(values) if slots is None else slots, whole=False)[0]


def signature_of(op: Declaration) -> inspect.Signature:
    """The reference's with `out`, less the results that the caller does not get."""
    signature = inspect.signature(op.reference)
    count = len(op.results) - op.hidden
    if op.hidden or op.writes:
        signature = signature.replace(
            return_annotation="Tensor" if count == 1 else f"tuple[{', '.join(['Tensor'] * count)}]"
        )
    if not op.result_rows:
        return signature.replace(return_annotation="None")
    one = "Tensor | Quantized | None" if "out_format" in op.signature.names else "Tensor | None"
    kind = "list[Tensor] | None" if op.signature.listed else one
    kind = kind if count == 1 else f"tuple[{', '.join([one] + ['Tensor | None'] * (count - 1))}] | None"
    out = inspect.Parameter("out", inspect.Parameter.KEYWORD_ONLY, default=None, annotation=kind)
    return signature.replace(parameters=[*signature.parameters.values(), out])
