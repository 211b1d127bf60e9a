"""The command line: `tilewright doctor | list | explain OP`. Every table can be had as JSON; an error is one line."""

from __future__ import annotations

import difflib
import importlib.util
import json
import platform
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]
EVIDENCE = Path(__file__).parent.parent / "evidence"


def fail(text: str) -> None:
    """One clear line on standard error, and exit status 2."""
    typer.echo(f"tilewright: {text}", err=True)
    raise typer.Exit(2)


def show(rows: list[dict[str, Any]], title: str, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table(title=title, title_justify="left")
    for name in rows[0] if rows else ():
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(_words(value) for value in row.values()))
    Console().print(table)


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "\n".join(f"{k}={_words(v)}" for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(_words, value))
    return (
        {True: "yes", False: "no", None: ""}.get(value, str(value))
        if isinstance(value, (bool, type(None)))
        else str(value)
    )


def find(name: str) -> Any:
    """The op of this name; an unknown one lists its near matches."""
    from . import catalogue

    ops = catalogue()
    if name not in ops:
        near = difflib.get_close_matches(name, ops) or sorted(ops)
        fail(f"there is no op {name!r}; perhaps {', '.join(near)}")
    return ops[name]


@app.command("list")
def list_ops(as_json: Json = False) -> None:
    """The ops: what they compute, whether they have gradients, their implementations, formats and where they have run."""
    from . import catalogue
    from .core.format import Format
    from .core.target import TARGETS

    recorded = _recorded()
    chips = {t.arch: "measured" if t.ran else "compiled" for t in TARGETS.values()}
    rows = []
    for name, op in sorted(catalogue().items()):
        rows.append(
            {
                "name": name,
                "family": op.reference.__module__.rpartition(".")[2],
                "summary": (op.__doc__ or "").strip().partition("\n")[0],
                "backward": bool(op.differentiable),
                "implementations": [one.name for one in op.implementations],
                "formats": sorted(Format.known) if "out_format" in op.signature.names else [],
                "chips": chips,
                "measured_cases": sorted(case for case, of in recorded.items() if of == name),
            }
        )
    if not as_json:
        shown = ("name", "summary", "backward", "implementations", "formats")
        rows = [{column: row[column] for column in shown} for row in rows]
    show(rows, "ops", as_json)


def _recorded() -> dict[str, str]:
    """case -> op of the rows in `evidence/`, where the project has them (a wheel does not)."""
    found = {}
    for path in sorted(EVIDENCE.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            found[row["case"]] = row["op"]
    return found


@app.command()
def doctor(as_json: Json = False) -> None:
    """What this machine has, what will be used, what is missing and the one command that mends it."""
    import torch
    import triton

    from .core import config, kernel, plan
    from .core.target import Target

    def row(what: str, found: str, fix: str = "") -> dict[str, str]:
        return {"what": what, "found": found, "to mend it": fix}

    rows = [
        row("python", platform.python_version()),
        row("torch", torch.__version__),
        row("triton", triton.__version__),
    ]
    if not torch.cuda.is_available():
        fix = (
            "pip install torch, with the CUDA build of your driver"
            if torch.version.cuda is None
            else "install the GPU's driver"
        )
        rows.append(row("GPU", "none: CPU tensors take the references", fix))
    for index in range(torch.cuda.device_count()):
        try:
            target = Target.of(index)
            state = f"{target.arch}, {'measured' if target.ran else 'compiled, never run'}"
        except RuntimeError as error:
            state = str(error)
        rows.append(row(f"GPU {index}", f"{torch.cuda.get_device_name(index)}: {state}"))
    direct = kernel.PRIVATE_LAUNCHER and plan.guard([torch.empty(1)]) is not None
    fix = "" if direct else "a torch that brings Triton 3.6 (2.10, 2.11): a call then costs the host half"
    rows.append(row("launch", "plans, launched directly" if direct else "through Triton's public call", fix))
    rows.append(row("your tuned rows", str(config.folder())))
    for name in ("pytest", "ruff"):
        if importlib.util.find_spec(name) is None:
            rows.append(row(name, "not installed", "only for working on tilewright: make env"))
    show(rows, "this machine", as_json)


@app.command()
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

    from .core import register
    from .core.draw import Draw
    from .core.format import Format
    from .core.kernel import collect
    from .core.op import force
    from .core.target import TARGETS, pretend

    op = find(name)
    if arch not in TARGETS:
        fail(f"--arch {arch} is not one of {', '.join(TARGETS)}")
    if format and "out_format" not in op.signature.names:
        fail(f"{name} has no out_format")
    dims = {"tokens": 256, "hidden": 2048, "vocab": 32000, "experts": 4, **_dims(dim or [])}
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


def _dims(texts: list[str]) -> dict[str, int]:
    dims = {}
    for text in texts:
        name, _, value = text.partition("=")
        if not value.isdigit():
            fail(f"--dim {text} is not of the form tokens=8192")
        dims[name] = int(value)
    return dims


def main() -> None:
    app(prog_name="tilewright")


if __name__ == "__main__":
    main()
