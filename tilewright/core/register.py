"""The registered face of an op: `torch.ops.tilewright.<name>`, its fake and its autograd, from the same declaration.

Registered ops are flat: tensors and numbers in, tensors out. Overloads: `.default`; `.quantized` with a canonical format
string, its quantised result led by a carrier, a one-element tensor expanded to the logical shape, through which autograd sends
an ordinary gradient of the logical dtype (an fp8 result would have its gradient cast to fp8); and `.out`. Absent pieces of a
quantised result are empty tensors. `<name>_backward` is what the backward pass calls.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .format import Format, Quantized, pack

if TYPE_CHECKING:
    from .op import Op

LIBRARY = torch.library.Library("tilewright", "FRAGMENT")
DEVICES = ("CPU", "CUDA")
PIECES = 8  # tensors of a quantised result beside its carrier; absent ones are empty


def register(op: Op) -> None:
    """Define and implement all overloads of an op."""
    op.overloads = {}
    kinds = ["default"]
    kinds += ["quantized"] if "out_format" in op.signature.names else []
    kinds += ["out"] if "out" in op.signature.names else []
    for kind in kinds:
        name = _name(op, kind)
        LIBRARY.define(name + _schema(op, kind))
        for device in DEVICES:
            LIBRARY.impl(name, _implementation(op, kind), device)
        torch.library.register_fake(f"tilewright::{name}", _fake(op, kind), lib=LIBRARY)
        op.overloads[kind] = getattr(getattr(torch.ops.tilewright, op.name), kind)
    if op.differentiable:
        _register_backward(op)
        for kind in kinds:
            if kind != "out":
                _register_autograd(op, kind)


def _name(op: Op, kind: str) -> str:
    return op.name if kind == "default" else f"{op.name}.{kind}"


# ---------------------------------------------------------------- flat arguments


def _parameters(op: Op) -> list:
    return [p for p in op.signature.parameters if p.name not in ("out", "out_format")]


def _schema(op: Op, kind: str) -> str:
    arguments = [p.schema() for p in _parameters(op)]
    if kind == "quantized":
        arguments += ['str out_format=""', "Tensor? out_scale=None"]
    if kind == "out":
        out = "Tensor(a!)[] out" if op.signature.listed else "Tensor(a!) out"
        return f"({', '.join([*arguments, '*', out])}) -> ()"
    if op.signature.listed:
        return f"({', '.join(arguments)}) -> Tensor[]"
    count = len(op.results) + (PIECES if kind == "quantized" else 0)
    returns = "Tensor" if count == 1 else f"({', '.join(['Tensor'] * count)})"
    return f"({', '.join(arguments)}) -> {returns}"


def _values(op: Op, flat: tuple, named: Mapping[str, Any]) -> dict[str, Any]:
    """The reference's arguments from a registered op's."""
    names = [p.name for p in _parameters(op)]
    given = {**dict(zip([*names, "out_format", "out_scale"], flat)), **named}
    scale = given.pop("out_scale", None)
    if given.get(op.overwrites):
        raise ValueError(f"{op.name}: {op.overwrites} is for eager calls alone, not for compiled or traced ones")
    if given.get("out_format"):
        given["out_format"] = Format.parse(given["out_format"], scale)
    return {**op.signature.defaults, **given}


def call(op: Op, values: Mapping[str, Any]) -> Any:
    """The public function through the registered op: subclasses, dispatch modes, fake tensors, torch.compile, export."""
    flat = [values[p.name] for p in _parameters(op)]
    if op.sharded is not None and any(isinstance(t, Tensor) and hasattr(t, "device_mesh") for t in flat):
        return op.sharded(**values)  # while torch.compile traces: eager calls do not come here with DTensors
    if op.signature.lists and not any(isinstance(v, Tensor) or (isinstance(v, (list, tuple)) and v) for v in flat):
        op.signature.validate(values)
        return op.run_reference(values)  # without a tensor the dispatcher knows no device
    fmt = values.get("out_format")
    out = values.get("out")
    if out is not None:
        if fmt is not None:
            raise ValueError(f"{op.name}: out with out_format is for eager calls alone")
        op.overloads["out"](*flat, out=out)
        return out
    if fmt is None:
        made = op.overloads["default"](*flat)
        if op.signature.listed:
            return list(made)
    else:
        made = op.overloads["quantized"](*flat, fmt.key, fmt.tensor)
    return op.public(unflatten(op, values, made if isinstance(made, (tuple, list)) else (made,)))


# ---------------------------------------------------------------- flat results


def flatten(results: Any) -> tuple[Tensor, ...]:
    """All results as the registered op returns them."""
    made: list[Tensor] = []
    for r in results if isinstance(results, tuple) else (results,):
        if not isinstance(r, Quantized):
            made.append(r)
            continue
        made.append(torch.empty(1, dtype=r.dtype, device=r.device).expand(r.shape))
        pieces = r.tensors()
        made += [*pieces, *(torch.empty(0, device=r.device) for _ in range(PIECES - len(pieces)))]
    return tuple(made)


def saved_results(op: Op, flat: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The results that the backward wants, by name."""
    return {name: flat[at] for name, at in op.kept.items()}


def unflatten(op: Op, values: Mapping[str, Any], flat: tuple) -> tuple:
    """The results from what the registered op (or the autograd function) returned."""
    fmt = values.get("out_format")
    if fmt is None:
        return tuple(flat)
    offsets = values.get("offsets")
    if "offsets" in op.results:  # the op makes the groups itself
        offsets = flat[op.results.index("offsets") + PIECES]
    return (pack(flat[0], flat[1 : 1 + len(fmt.tensor_names)], fmt, offsets), *flat[1 + PIECES :])


def _implementation(op: Op, kind: str) -> Any:
    def implementation(*flat: Any, **named: Any) -> Any:
        values = _values(op, flat, named)
        op.validate(values)
        results = op.run(values)
        if kind == "out":
            return None
        made = flatten(results)
        return made[0] if len(made) == 1 else made

    return implementation


def _fake(op: Op, kind: str) -> Any:
    def fake(*flat: Any, **named: Any) -> Any:
        values = _values(op, flat, named)
        op.signature.validate(values)
        if kind == "out":
            return None
        made = flatten(op.run_reference(values))
        return made[0] if len(made) == 1 else made

    return fake


# ---------------------------------------------------------------- autograd


def setup(ctx: Any, op: Op, values: Mapping[str, Any], flat: tuple[Tensor, ...]) -> None:
    """Keep what the backward needs; say which results carry gradients."""
    names = op.signature.tensors
    tensors = [values[n] if n in op.saves else None for n in names]
    for name in () if op.spares is None else op.spares(values):
        given = values[name]
        if given is not None:  # shape and dtype for nothing: one element seen everywhere
            tensors[names.index(name)] = given.new_empty_strided(given.shape, (0,) * given.dim())
    ctx.save_for_backward(*tensors, *saved_results(op, flat).values())
    ctx.op = op
    ctx.scalars = {n: None if n in op.held else v for n, v in values.items()}
    ctx.graded = graded = op.graded(values)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*[t for i, t in enumerate(flat) if i not in graded])


def backward(ctx: Any, grads: tuple, wanted: frozenset, through: Any) -> tuple:
    """Gradients for the tensor arguments, in order; None for those not `wanted`."""
    op: Op = ctx.op
    tensors = op.signature.tensors
    given = [None if grads[i] is None else grads[i].resolve_neg() for i in ctx.graded]
    if all(g is None for g in given):
        return (None,) * len(tensors)
    found = through(op, ctx.scalars, ctx.saved_tensors, given, wanted)
    by_name = dict(zip(op.differentiable, found))
    return tuple([by_name[n] if n in wanted else None for n in tensors])


def saved_by_name(op: Op, scalars: Mapping[str, Any], saved: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """(arguments, in their order, and results) by name from what `setup` kept."""
    tensors = op.signature.tensors
    return {**scalars, **dict(zip(tensors, saved))}, dict(zip(op.kept, saved[len(tensors) :]))


def eager(op: Op, scalars: Mapping[str, Any], saved: Any, grads: list, needs: frozenset) -> tuple:
    values, results = saved_by_name(op, scalars, saved)
    return op.run_backward(values, results, grads, needs)


def traced(op: Op, scalars: Mapping[str, Any], saved: Any, grads: list, needs: frozenset) -> tuple:
    fmt = scalars.get("out_format")
    numbers = [scalars[n] for n in op.signature.scalars]
    flags = [n in needs for n in op.differentiable]
    made = op.overloads["backward"](list(saved), grads, *numbers, None if fmt is None else fmt.key, flags)
    return tuple(t if flag else None for t, flag in zip(made, flags))


def _register_autograd(op: Op, kind: str) -> None:
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        setup(ctx, op, _values(op, inputs, {}), output if isinstance(output, (tuple, list)) else (output,))

    def in_order(ctx: Any, *grads: Any) -> tuple:
        """One entry per argument of the registered op, tensors and numbers in their own order."""
        names = [p.name for p in _parameters(op)] + (["out_format", "out_scale"] if kind == "quantized" else [])
        needed = zip(names, ctx.needs_input_grad)
        wanted = frozenset(n for n, flag in needed if flag and n in op.differentiable)
        found = dict(zip(op.signature.tensors, backward(ctx, grads, wanted, traced)))
        return tuple(found.get(n) for n in names)

    torch.library.register_autograd(
        f"tilewright::{_name(op, kind)}", in_order, setup_context=setup_context, lib=LIBRARY
    )


@contextlib.contextmanager
def recording() -> Iterator[None]:
    """Let autograd record the reference, whose backward it is: a dispatch mode takes autograd away from what it calls, and all
    gradients would be 0."""
    keys = torch._C.DispatchKey.AutogradFunctionality, torch._C.DispatchKey.ADInplaceOrView
    taken = [key for key in keys if torch._C._dispatch_tls_is_dispatch_key_excluded(key)]
    for key in taken:
        torch._C._dispatch_tls_set_dispatch_key_excluded(key, False)
    try:
        yield
    finally:
        for key in taken:
            torch._C._dispatch_tls_set_dispatch_key_excluded(key, True)


def _register_backward(op: Op) -> None:
    numbers = [p for p in op.signature.parameters if p.name in op.signature.scalars]
    types = {p.name: p.schema().split("=")[0] for p in numbers}
    schema = ", ".join(["Tensor?[] saved", "Tensor?[] grads", *types.values(), "str? out_format", "bool[] needs"])
    name = f"{op.name}_backward"
    LIBRARY.define(f"{name}({schema}) -> Tensor[]")

    def unpack(flat: tuple) -> tuple:
        saved, grads, *rest = flat
        scalars = {**dict.fromkeys(op.signature.names), **dict(zip(types, rest))}
        if "out_format" in op.signature.names:
            scalars["out_format"] = None if rest[-2] is None else Format.parse(rest[-2])
        if op.overwrites:
            scalars[op.overwrites] = False  # a registered op writes only what its schema says
        needs = frozenset(n for n, flag in zip(op.differentiable, rest[-1]) if flag)
        return saved, grads, scalars, needs

    def shapes(saved: Any, grads: Any, scalars: Mapping[str, Any]) -> list[Tensor]:
        """What each gradient is like: its argument, or the result if that was not saved."""
        values, _ = saved_by_name(op, scalars, saved)
        some = next(g for g in grads if g is not None)
        return [values[n] if values[n] is not None else some for n in op.differentiable]

    def implementation(*flat: Any) -> list[Tensor]:
        saved, grads, scalars, needs = unpack(flat)
        with recording():
            found = dict(zip(op.differentiable, eager(op, scalars, saved, grads, needs)))
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
        saved, grads, scalars, needs = unpack(flat)
        likes = zip(op.differentiable, shapes(saved, grads, scalars))
        return [like.new_empty(like.shape if name in needs else 0) for name, like in likes]

    for device in DEVICES:
        LIBRARY.impl(name, implementation, device)
    torch.library.register_fake(f"tilewright::{name}", fake, lib=LIBRARY)
    op.overloads["backward"] = getattr(torch.ops.tilewright, name).default
