"""The registered face of an op: `torch.ops.tilewright.<name>`, its fake and its autograd, from the same declaration.

Registered ops are flat: tensors and numbers in, tensors out. Overloads: `.default`; `.quantized` with a canonical format
string, its quantised result led by a carrier (`results.py`; an fp8 result would have its gradient cast to fp8); and `.out`.
`<name>_backward` is what the backward pass calls. It is told the implementation that the forward took, except in a compiled
function: while that is traced there are no tensors to choose by, and its backward chooses by what was saved.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from ..core.declaration import PIECES, is_foreign
from ..core.flat import as_tuple, given_tensors, mapped, wants_grad
from ..core.format import Format
from ..core.outs import check_number, check_outs, outs_of, with_outs
from ..core.private import has_tangent, levels, recording
from .choose import implementation as chosen_for
from .results import flatten, unflatten
from .run import Runner
from .tape import gradients, keep, kept

LIBRARY = torch.library.Library("tilewright", "FRAGMENT")
DEVICES = ("CPU", "CUDA")
FORWARD_MODE = (
    "{}: kernels have no forward-mode derivative (torch.func.jvp, jacfwd, hessian):"
    " call it under tilewright.force('reference')"
)  # fmt: skip
# Whether the tensors of this call were seen to have no tangents. Under torch.func they reach an implementation without their
# wrappers, where it cannot be seen; so one that is called by its registered name inside forward mode is refused
_constant: ContextVar[bool] = ContextVar("constant", default=False)


def register(op: Runner) -> dict[str, Any]:
    """Define and implement all overloads of an op, and give them by kind."""
    overloads = {}
    kinds = ["default"]
    kinds += ["quantized"] if "out_format" in op.signature.names else []
    kinds += ["out"] if op.result_rows else []
    for kind in kinds:
        name = _name(op, kind)
        LIBRARY.define(name + _schema(op, kind))
        for device in DEVICES:
            LIBRARY.impl(name, _implementation(op, kind), device)
        torch.library.register_fake(f"tilewright::{name}", _fake(op, kind), lib=LIBRARY)
        overloads[kind] = getattr(getattr(torch.ops.tilewright, op.name), kind)
    if op.differentiable and not op.writes:  # torch lets no op that changes its arguments have a gradient
        overloads["backward"] = _register_backward(op)
        for kind in kinds:
            if kind != "out":
                _register_autograd(op, kind)
    return overloads


def _name(op: Runner, kind: str) -> str:
    return op.name if kind == "default" else f"{op.name}.{kind}"


# ---------------------------------------------------------------- flat arguments


def _parameters(op: Runner) -> list:
    return [p for p in op.signature.parameters if p.name != "out_format"]


def _outs(op: Runner) -> tuple[str, ...]:
    """The names under which the `.out` overload takes memory for results."""
    return ("out",) if len(op.result_rows) == 1 else tuple(f"out_{name}" for name in op.result_rows)


def _schema(op: Runner, kind: str) -> str:
    said = op.signature.schemas()
    said.update((name, _written(said[name], at)) for at, name in enumerate(op.writes))
    arguments = [said[p.name] for p in _parameters(op)]
    if kind == "quantized":
        arguments += ['str out_format=""', "Tensor? out_scale=None"]
    if kind == "out":
        names = _outs(op)
        if len(names) == 1:
            out = "Tensor(a!)[] out" if op.signature.listed else "Tensor(a!) out"
            return f"({', '.join([*arguments, '*', out])}) -> ()"
        outs = [f"Tensor({chr(97 + i)}!)? {name}=None" for i, name in enumerate(names)]
        return f"({', '.join([*arguments, '*', *outs])}) -> ({', '.join(['Tensor'] * len(names))})"
    if op.signature.listed:
        return f"({', '.join(arguments)}) -> Tensor[]"
    count = len(op.results) + (PIECES if kind == "quantized" else 0)
    returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"({', '.join(arguments)}) -> {returns}"


def _written(schema: str, at: int) -> str:
    """The schema of an argument that the op writes."""
    return schema.replace("Tensor", f"Tensor({chr(ord('z') - at)}!)", 1)


def _values(op: Runner, flat: tuple, named: Mapping[str, Any]) -> dict[str, Any]:
    """The reference's arguments from a registered op's."""
    names = [p.name for p in _parameters(op)]
    given = {**dict(zip([*names, "out_format", "out_scale"], flat)), **named}
    scale = given.pop("out_scale", None)
    if given.get(op.overwrites):
        raise ValueError(f"{op.name}: {op.overwrites} is for eager calls alone, not for compiled or traced ones")
    if given.get("out_format"):
        given["out_format"] = Format.parse(given["out_format"], scale)
    for name in op.signature.dtypes:
        if type(given.get(name)) is int:
            del given[name]  # a default, which torch fills in as the integer that its schema has
    outs = tuple(given.pop(name, None) for name in _outs(op))
    out = outs[0] if len(outs) == 1 else None if all(t is None for t in outs) else outs
    return op.signature.settle({**op.signature.defaults, **given, "out": out})


def constant_call(op: Runner, values: Mapping[str, Any]) -> Any:
    """`call` inside forward-mode differentiation, with tensors that it does not go through."""
    refuse_tangents(op, given_tensors(values))
    token = _constant.set(True)
    try:
        return call(op, values)
    finally:
        _constant.reset(token)


def call(op: Runner, values: Mapping[str, Any]) -> Any:
    """The public function through the registered op: subclasses, dispatch modes, fake tensors, torch.compile, export."""
    flat = [values[p.name] for p in _parameters(op)]
    if op.sharded is not None and any(isinstance(t, Tensor) and hasattr(t, "device_mesh") for t in flat):
        return op.sharded(**values)  # while torch.compile traces: eager calls do not come here with DTensors
    if op.signature.lists and not given_tensors(dict(enumerate(flat))):
        op.signature.validate(values)
        return op.run_reference(values)  # without a tensor the dispatcher knows no device
    if op.writes and torch.is_grad_enabled() and any(wants_grad(values[n]) for n in op.differentiable):
        raise NotImplementedError(f"{op.name}: it writes {op.writes[0]}, so a gradient is for eager calls alone")
    fmt = values.get("out_format")
    out = values.get("out")
    if out is not None:
        if fmt is not None:
            raise ValueError(f"{op.name}: out with out_format is for eager calls alone")
        if len(op.result_rows) == 1:
            op.overloads["out"](*flat, out=out)
            return out
        check_number(op, out)
        return with_outs(tuple(op.overloads["out"](*flat, **dict(zip(_outs(op), out)))), tuple(out))
    if fmt is None:
        made = op.overloads["default"](*flat)
        if op.signature.listed:
            return list(made)
    else:
        made = op.overloads["quantized"](*flat, fmt.key, fmt.tensor)
    made = () if made is None else made
    return op.public(unflatten(op, values, made if isinstance(made, (tuple, list)) else (made,)))


# ---------------------------------------------------------------- implementations and fakes


def refuse_tangents(op: Runner, tensors: list[Tensor]) -> None:
    """Kernels have no forward-mode derivative, and what has none would count as constant: all tangents would be 0."""
    if any(has_tangent(t) for t in tensors):
        raise NotImplementedError(FORWARD_MODE.format(op.name))


def _implementation(op: Runner, kind: str) -> Any:
    def implementation(*flat: Any, **named: Any) -> Any:
        values = _values(op, flat, named)
        if levels._current_level >= 0 and not _constant.get():
            raise NotImplementedError(FORWARD_MODE.format(op.name))
        op.validate(values)
        results = op.run(values)
        if kind == "out":
            return _apart(op, as_tuple(results), values)
        made = flatten(results)
        return made[0] if len(made) == 1 else made or None

    return implementation


def _apart(op: Runner, results: tuple, values: Mapping[str, Any]) -> Any:
    """What an `.out` overload returns: nothing, or of several results those that it allocated, and nothing for the others, which
    must not be returned as well."""
    if len(op.result_rows) == 1:
        return None
    outs = outs_of(op, values) or (None,) * len(op.result_rows)
    return tuple(r if out is None else r.new_empty(0) for r, out in zip(results, outs))


def _shapes(op: Runner, values: Mapping[str, Any]) -> Any:
    """All results of the reference, which writes nothing, as kernels give them. No generator is asked for numbers."""
    if op.signature.generators:
        values = {n: None if isinstance(v, torch.Generator) else v for n, v in values.items()}
    return mapped(lambda t: t.contiguous(), op.apart(op.by_reference(op.arguments(values)))[0])


def _fake(op: Runner, kind: str) -> Any:
    def fake(*flat: Any, **named: Any) -> Any:
        values = _values(op, flat, named)
        op.signature.validate(values)
        if kind == "out":
            check_outs(op, values, addresses=False)
            return _apart(op, as_tuple(_shapes(op, values)), values)
        made = flatten(_shapes(op, values))
        return made[0] if len(made) == 1 else made or None

    return fake


# ---------------------------------------------------------------- autograd


def _register_autograd(op: Runner, kind: str) -> None:
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        values = _values(op, inputs, {})
        keep(ctx, op, values, output if isinstance(output, (tuple, list)) else (output,))
        plain = not any(is_foreign(t) for t in given_tensors(values))
        one = chosen_for(op, values) if plain else None
        ctx.chosen = None if one is None else one.name

    def backward(ctx: Any, saved: Any, grads: list, needs: frozenset) -> tuple:
        fmt = ctx.scalars.get("out_format")
        numbers = [ctx.scalars[n] for n in op.signature.scalars]
        flags = [n in needs for n in op.differentiable]
        fmt = None if fmt is None else fmt.key
        made = op.overloads["backward"](list(saved), grads, *numbers, ctx.chosen, fmt, flags)
        return tuple(t if flag else None for t, flag in zip(made, flags))

    def in_order(ctx: Any, *grads: Any) -> tuple:
        """One entry per argument of the registered op, tensors and numbers in their own order."""
        names = [p.name for p in _parameters(op)] + (["out_format", "out_scale"] if kind == "quantized" else [])
        needed = zip(names, ctx.needs_input_grad)
        wanted = frozenset(n for n, flag in needed if flag and n in op.differentiable)
        found = dict(zip(op.signature.tensors, gradients(ctx, grads, wanted, backward)))
        return tuple(found.get(n) for n in names)

    torch.library.register_autograd(
        f"tilewright::{_name(op, kind)}", in_order, setup_context=setup_context, lib=LIBRARY
    )


def _register_backward(op: Runner) -> Any:
    numbers = [p for p in op.signature.parameters if p.name in op.signature.scalars]
    types = {p.name: p.schema(default=False) for p in numbers}
    schema = ", ".join(
        ["Tensor?[] saved", "Tensor?[] grads", *types.values(), "str? chosen", "str? out_format", "bool[] needs"]
    )
    name = f"{op.name}_backward"
    by_name = {one.name: one for one in op.implementations}
    LIBRARY.define(f"{name}({schema}) -> Tensor[]")

    def unpack(flat: tuple) -> tuple:
        saved, grads, *rest = flat
        scalars = op.signature.settle({**dict.fromkeys((*op.signature.names, "out")), **dict(zip(types, rest))})
        if "out_format" in op.signature.names:
            scalars["out_format"] = None if rest[-2] is None else Format.parse(rest[-2])
        if op.overwrites:
            scalars[op.overwrites] = False  # a registered op writes only what its schema says
        needs = frozenset(n for n, flag in zip(op.differentiable, rest[-1]) if flag)
        return saved, grads, scalars, needs, by_name.get(rest[-3])

    def shapes(saved: Any, grads: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        """What each gradient is like: its argument, or the result if that was not saved."""
        values, _ = kept(op, scalars, saved)
        some = next(g for g in grads if g is not None)
        return [values[n] if values[n] is not None else some for n in op.differentiable]

    def implementation(*flat: Any) -> list[Tensor]:
        saved, grads, scalars, needs, chosen = unpack(flat)
        with recording():
            found = op.run_backward(*kept(op, scalars, saved), grads, needs, chosen)
        found = dict(zip(op.differentiable, found))
        made: list[Tensor] = []
        for name, like in zip(op.differentiable, shapes(saved, grads, scalars)):
            grad = found[name] if name in needs else like.new_empty(0)
            if grad is None:
                grad = torch.zeros_like(like, memory_format=torch.contiguous_format)
            elif any(grad is g for g in (*made, *grads)):
                grad = grad.clone(memory_format=torch.contiguous_format)  # results of a registered op share no memory
            made.append(grad.contiguous())  # as the fake says
        return made

    def fake(*flat: Any) -> list[Tensor]:
        saved, grads, scalars, needs, _ = unpack(flat)
        likes = zip(op.differentiable, shapes(saved, grads, scalars))
        return [like.new_empty(like.shape if name in needs else 0) for name, like in likes]

    for device in DEVICES:
        LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"tilewright::{name}", fake, lib=LIBRARY)
    return getattr(torch.ops.tilewright, name).default
