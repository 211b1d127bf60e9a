"""`tilewright compile`: kernels compiled for chips, those that are not here too, and what the machine code costs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import typer

from .console import Json, bar, fail, find, show


def compile(
    names: Annotated[list[str] | None, typer.Argument(metavar="OP", help="All ops, if none is named.")] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="A chip; may be given several times. This GPU's, or sm_90, if not given.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Odd sizes, other dtypes, layouts and options too: many more variants.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Compile what typical calls and their backwards launch: registers, spills, shared memory. Needs no GPU."""
    from .. import catalogue
    from ..check.variants import calls, hot_calls
    from ..core.target import INTERPRETING, TARGETS
    from ..toolchain.aot import CompileError

    ops = [find(name) for name in names] if names else list(catalogue().values())
    if INTERPRETING:
        fail("TRITON_INTERPRET is set in this process, and interpreted kernels are not compiled: unset it")
    archs = arch or [_here()]
    for one in archs:
        if one not in TARGETS:
            fail(f"--arch {one} is not one of {', '.join(TARGETS)}")
    found: dict[tuple, tuple[str, Any]] = {}
    refused = []
    with bar(len(ops) * len(archs)) as shown:
        for op in ops:
            for one in archs:
                shown.step(f"listing {op.name} for {one}")
                for entry in _wanted(op, (calls if every else hot_calls)(op), one):
                    if isinstance(entry, str):
                        state = "refused" if entry.startswith(f"{op.name}:") else "failed"
                        refused.append(_row(op.name, one, None, state, why=entry))
                    else:
                        found.setdefault((one, entry.name), (op.name, entry))
    rows = []
    with bar(len(found)) as shown:
        for (one, _), (op_name, variant) in found.items():
            shown.step(f"{variant.kernel.name} for {one}", 0)
            try:
                made = variant.compile()
                rows.append(_row(op_name, one, variant, "compiled" if made.shared_is_there else "failed", made))
            except CompileError as error:
                rows.append(_row(op_name, one, variant, "failed", why=str(error)))
            shown.step()
    unique = {str(row): row for row in refused}
    rows += unique.values()
    title = f"{len(found)} variants for {' '.join(archs)}"
    if not as_json:
        hidden = {"variant"} if any(row["why"] for row in rows) else {"variant", "why"}
        rows = [{n: v for n, v in row.items() if n not in hidden} for row in rows]
    show(rows, title, as_json)
    if any(row["state"] == "failed" for row in rows):
        raise typer.Exit(1)


def _here() -> str:
    import torch

    from ..core.target import Target

    try:
        return Target.of(0).arch if torch.cuda.is_available() else "sm_90"
    except RuntimeError as error:
        fail(str(error))


def _wanted(op: Any, calls: Iterator[Any], arch: str) -> Iterator[Any]:
    """The variants that calls need on a chip, and why it refuses the others."""
    from ..check.variants import launches, variant

    for call in calls:
        try:
            wanted = launches(op, call, arch)
        except (RuntimeError, ValueError, TypeError) as error:
            yield str(error).partition("\n")[0]
            continue
        yield from (variant(one, arch) for one in wanted)


def _row(op: str, arch: str, variant: Any, state: str, compiled: Any = None, why: str = "") -> dict[str, Any]:
    constants = (
        {n: v for n, v in variant.constants.items() if n.isupper() and isinstance(v, (int, str))} if variant else {}
    )
    return {
        "op": op,
        "arch": arch,
        "kernel": variant.kernel.name if variant else "",
        "state": state,
        "registers": compiled and compiled.registers,
        "spills": compiled and compiled.spills,
        "shared": compiled and compiled.shared,
        "threads": compiled and compiled.threads,
        "constants": {**constants, **variant.options} if variant else {},
        "variant": variant.name if variant else "",
        "why": "more shared memory than the chip has" if compiled and not compiled.shared_is_there else why,
    }
