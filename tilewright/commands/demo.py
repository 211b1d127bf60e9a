"""`tilewright demo`: the same small model trained with plain PyTorch and with tilewright, side by side."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .console import Json, fail, show

if TYPE_CHECKING:
    from ..demo.train import Run

ROWS = 9  # of the table of curves
PATIENCE = 150  # seconds for the interpreted step, which takes 7 on a free core: the whole is to end in three minutes
# In fp32 the kernels' gradients come within 3e-6 of torch's; a wrong one is off by far more than this
STEP_TOLERANCE = 1e-4


def demo(
    steps: Annotated[int, typer.Option(help="Training steps of each run; 0: as many as suit the machine.")] = 0,
    out: Annotated[Path, typer.Option(help="Where the picture of the curves goes.")] = Path("demo.png"),
    seed: Annotated[int, typer.Option(help="Of parameters and text.")] = 0,
    interpreter: Annotated[
        bool, typer.Option(help="Without a GPU: one more step through Triton's interpreter.")
    ] = True,
    as_json: Json = False,
) -> None:
    """Train a small mixture-of-experts model with plain PyTorch and with tilewright; fail if the curves part."""
    if steps < 0:
        fail(f"--steps {steps} must not be negative")
    if out.suffix != ".png" or not out.absolute().parent.is_dir():
        fail(f"--out {out} must be a .png file in a folder that exists")
    import torch

    from ..core.target import INTERPRETING
    from ..core.tensor import name_of
    from ..demo import model, picture, train

    on_gpu = torch.cuda.is_available() and not INTERPRETING
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    setting = train.GPU if on_gpu else train.CPU
    steps = steps or setting.steps
    limits, notes = dict(setting.tolerances), []
    if not on_gpu:
        notes.append("on a CPU operations are their PyTorch references, which say nothing of speed; FP8 is for GPUs")
    elif not _target(device).fp8:
        del limits[model.FP8]
        notes.append("no FP8 run: the chip has no FP8 instructions")
    runs = []
    with _progress() as progress:
        for name in (model.PLAIN, *limits):
            bar = progress.add_task(name, total=steps, loss="")

            def done(loss: float, bar: Any = bar) -> None:
                progress.update(bar, advance=1, loss=f"loss {loss:.3f}")

            runs.append(train.train(name, setting, steps=steps, seed=seed, device=device, done=done))
    where = torch.cuda.get_device_name(device) if on_gpu else "CPU"
    picture.draw(runs, [*limits.values()], f"{where}, {name_of(setting.dtype)}", out)
    if on_gpu:
        compiled = sorted(name for name, kernel in train.kernels().items() if kernel.variants)
        notes.append(f"kernels compiled and run: {', '.join(compiled)}")
    partings = {
        run.name: {"most": train.parting(runs[0], run)._asdict(), "tolerance": limits[run.name]._asdict()}
        for run in runs[1:]
    }
    found = {
        "device": where,
        "dtype": name_of(setting.dtype),
        "steps": steps,
        "seed": seed,
        "runs": [dataclasses.asdict(run) for run in runs],
        "window": train.WINDOW,
        "early": train.EARLY,
        "parting": partings,
        "interpreter": _interpreted(seed) if interpreter and not on_gpu else None,
        "notes": notes,
        "picture": str(out),
    }
    if as_json:  # what is not finite has no place in JSON
        typer.echo(json.dumps(json.loads(json.dumps(found), parse_constant=lambda text: None), indent=1))
    else:
        _tables(found, runs)
    _judge(found)


def _target(device: Any) -> Any:
    from ..core.target import Target

    try:
        return Target.of(device.index)
    except RuntimeError as error:  # a chip that no kernel is known to run on
        fail(str(error))


def _judge(found: dict[str, Any]) -> None:
    """Exit with status 1 and one line if the runs do not agree or the interpreted step is wrong."""
    first = found["runs"][0]["name"]
    for name, parts in found["parting"].items():
        most, limit = parts["most"], parts["tolerance"]
        if not all(most[which] <= limit[which] for which in limit):
            _wrong(
                f"{name} parts from {first} by {most['early']:.2g} nats in the first {found['early']} steps and by"
                f" {most['whole']:.2g} in all, more than {limit['early']:g} and {limit['whole']:g}: see {found['picture']}"
            )
    step = found["interpreter"]
    if step is not None:
        if not step.get("launches"):
            _wrong(f"the interpreted step ran no kernel: {step.get('error', 'nothing was launched')}")
        errors = step["loss_error"], step["gradient_error"]
        if not all(error <= STEP_TOLERANCE for error in errors):
            loss, gradient = errors
            _wrong(
                f"the interpreted step is {loss:.2g} (loss) and {gradient:.2g} (gradients) from plain PyTorch, more than"
                f" {STEP_TOLERANCE:g}"
            )


def _progress() -> Progress:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), "{task.fields[loss]}")
    made = [TextColumn(column) if isinstance(column, str) else column for column in columns]
    return Progress(*made, console=Console(stderr=True))


def _beside(parts: dict[str, Any], which: str) -> str:
    return f"{parts['most'][which]:.2g}, at most {parts['tolerance'][which]:g}"


def _wrong(text: str) -> NoReturn:
    typer.echo(f"tilewright: {text}", err=True)
    raise typer.Exit(1)


def _interpreted(seed: int) -> dict[str, Any]:
    """The report of `demo.step`; `error` says why there is none."""
    root = str(Path(__file__).parents[2])
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    env = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "tilewright.demo.step", str(seed)]
    try:
        done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE)
    except subprocess.TimeoutExpired:
        return {"error": f"it took more than {PATIENCE} s"}
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["it said nothing"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def _tables(found: dict[str, Any], runs: list[Run]) -> None:
    from ..demo.train import smooth

    steps, first, on_cpu = found["steps"], runs[0], found["device"] == "CPU"
    curves = {run.name: smooth(run.losses) for run in runs}
    at = sorted({round(i * (steps - 1) / (ROWS - 1)) for i in range(ROWS)})
    title = f"loss ({found['window']}-step mean)"
    show([{"step": i + 1, **{name: f"{curve[i]:.4f}" for name, curve in curves.items()}} for i in at], title, False)
    rows = []
    for run in runs:
        parts = found["parting"].get(run.name)
        held = "unknown" if run.peak_bytes is None else f"{run.peak_bytes / 2**20:.0f} MiB"
        rows.append(
            {
                "run": run.name,
                "ms a step": f"{run.step_ms:.1f}",
                **({} if on_cpu else {"speed": f"{first.step_ms / run.step_ms:.2f}x"}),
                "process at its peak" if on_cpu else "peak memory": held,
                "parts early": "" if parts is None else _beside(parts, "early"),
                "parts in all": "" if parts is None else _beside(parts, "whole"),
            }
        )
    show(rows, "runs", False)
    for note in found["notes"]:
        typer.echo(note)
    step = found["interpreter"]
    if step and step.get("launches"):
        typer.echo(
            f"one step through the interpreter: {sum(step['launches'].values())} launches of {len(step['launches'])}"
            f" kernels, loss {step['loss']:.4f} -> {step['loss_after']:.4f}, gradients within"
            f" {step['gradient_error']:.1e} of plain PyTorch's"
        )
    typer.echo(f"curves: {found['picture']}")
