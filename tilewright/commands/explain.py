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
    full: Annotated[bool, typer.Option("--full", help="With every optional tensor.")] = False,
    as_json: Json = False,
) -> None:
    """Which implementation a bf16 call takes on a chip, and what it launches there, forward and backward."""
    from ..check.variants import COMMON, Blank, Call, passes
    from ..core.format import Format
    from ..core.op import force
    from ..core.target import TARGETS, pretend

    op = find(name)
    if arch not in TARGETS:
        fail(f"--arch {arch} is not one of {', '.join(TARGETS)}")
    if format and "out_format" not in op.signature.names:
        fail(f"{name} has no out_format")
    dims = {**COMMON, "tokens": 256, "hidden": 2048, "vocab": 32000, **dimensions(dim)}
    try:
        given = op.inputs(Blank(op, dims, full=full))
        if format:
            given["out_format"] = Format.parse(format)
        forward, backward = passes(op, Call(given), TARGETS[arch])
        with pretend(TARGETS[arch]), force("triton"):
            chosen = op.implementation(op.signature.bind((), given))
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
