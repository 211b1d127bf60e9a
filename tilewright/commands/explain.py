"""`tilewright explain OP`: which implementation a call takes on a chip, and what it launches there."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from .console import Json, dimensions, fail, find, show


def explain(
    name: Annotated[str, typer.Argument(metavar="OP")],
    arch: Annotated[str, typer.Option(help="The chip to explain for.")] = "sm_90",
    dim: Annotated[
        list[str] | None, typer.Option(help="A dimension, tokens=8192 say; may be given several times.")
    ] = None,
    format: Annotated[str, typer.Option(help="An out_format, fp8:e4m3:1x128:both:pow2:te say.")] = "",
    as_json: Json = False,
) -> None:
    """Which implementation a bf16 call takes on a chip, and what it launches there, forward and backward."""
    import torch

    from ..core import register
    from ..core.draw import Draw
    from ..core.format import Format
    from ..core.kernel import collect
    from ..core.op import force
    from ..core.target import TARGETS, pretend

    op = find(name)
    if arch not in TARGETS:
        fail(f"--arch {arch} is not one of {', '.join(TARGETS)}")
    if format and "out_format" not in op.signature.names:
        fail(f"{name} has no out_format")
    dims = {"tokens": 256, "hidden": 2048, "vocab": 32000, "experts": 4, **dimensions(dim)}
    values = op.signature.bind((), op.inputs(Draw(0, dims, dtype=torch.bfloat16)))
    try:
        if format:
            values["out_format"] = Format.parse(format)
        with pretend(TARGETS[arch]), force("triton"), torch.no_grad():
            op.validate(values)
            chosen = op.implementation(values)
            with collect() as forward:
                flat = register.flatten(op.run(values))
            needs = frozenset(n for n in op.differentiable if values[n] is not None)
            with collect() as backward:
                if needs:
                    grads = [torch.empty_like(flat[i]) for i in op.graded(values)]
                    op.run_backward(values, register.saved_results(op, flat), grads, needs)
    except (ValueError, TypeError, RuntimeError) as error:
        fail(str(error).partition("\n")[0])
    rows = [
        {"pass": which, "kernel": w.kernel.name, "constants": _constants(w), "options": w.options}
        for which, launches in (("forward", forward), ("backward", backward))
        for w in launches
    ]
    if as_json:
        typer.echo(json.dumps({"op": name, "arch": arch, "implementation": chosen.name, "launches": rows}, indent=1))
    else:
        show(
            rows, f"{name} on {arch}: implementation {chosen.name} of {[one.name for one in op.implementations]}", False
        )


def _constants(wanted: Any) -> dict[str, Any]:
    """The compile-time arguments that are numbers or words."""
    pairs = zip(wanted.kernel.jit.params, wanted.ordered)
    return {p.name: v for p, v in pairs if p.is_constexpr and isinstance(v, (int, str, bool))}
