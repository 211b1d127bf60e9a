"""`tilewright tune`: the configs that kernels run with, searched on this GPU and kept as rows of data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .console import INTERRUPTED, Json, bar, fail, find, show

LIMIT = 90.0  # seconds one config may take to compile, be checked and be timed


def tune(
    names: Annotated[list[str] | None, typer.Argument(metavar="OP", help="All ops, if none is named.")] = None,
    model: Annotated[
        list[str] | None, typer.Option(help="A model whose sizes count; may be given several times. All, if not given.")
    ] = None,
    minutes: Annotated[float, typer.Option(min=0.0, help="Begin no measurement after this time.")] = 5.0,
    out: Annotated[Path | None, typer.Option(help="The file of rows. Yours for this chip, if not given.")] = None,
    tokens: Annotated[int, typer.Option(min=1, help="Rows of the calls that are timed.")] = 8192,
    as_json: Json = False,
) -> None:
    """Time every candidate config of kernels at models' sizes; keep those that beat the kernel's default by over 2 %."""
    import torch

    from .. import catalogue
    from ..bench import tune as tuning
    from ..check.models import models
    from ..core.target import Target
    from ..runtime import config

    ops = [find(name) for name in names] if names else list(catalogue().values())
    known = models()
    for one in model or ():
        if one not in known:
            fail(f"--model {one} is not one of {', '.join(known)}")
    if not torch.cuda.is_available():
        fail("tune measures a GPU, and there is none here; `tilewright doctor` says what is missing")
    try:
        target = Target.of(torch.cuda.current_device())
    except RuntimeError as error:
        fail(str(error))
    path = out or config.folder() / f"{target.arch}.jsonl"
    wanted = tuning.tasks(ops, model or list(known), target, tokens)
    if not wanted:
        fail(f"no kernel of {', '.join(op.name for op in ops)} has configs to choose from")
    found, interrupted = _search(wanted, path, target.arch, minutes)
    rows = [_row(one) for one in found]
    show(rows, f"{len(rows)} of {len(wanted)} kernels and sizes tuned; rows in {path}", as_json)
    if interrupted:
        raise typer.Exit(INTERRUPTED)


def _search(wanted: list[Any], path: Path, arch: str, minutes: float) -> tuple[list[Any], bool]:
    """What was found, and whether Ctrl-C ended the search."""
    from ..bench import tune as tuning
    from ..check.guarded import NoWorker, supervise

    command = [sys.executable, "-m", "tilewright.bench.tune"]
    found: list[Any] = []
    interrupted = False

    def finished(one: Any) -> None:
        found.append(one)
        tuning.save(path, arch, found)

    with bar(sum(len(task.configs) for task in wanted)) as shown:
        try:
            tuning.search(
                wanted,
                lambda requests: supervise(requests, command, LIMIT),
                60 * minutes,
                finished,
                say=shown.say,
                tick=lambda task: shown.step(task.name),
            )
        except KeyboardInterrupt:
            interrupted = True
            shown.say("interrupted; what was finished is kept")
        except NoWorker as error:
            fail(str(error))
        except OSError as error:
            fail(f"cannot write {path}: {error.strerror or error}")
    return found, interrupted


def _row(found: Any) -> dict[str, Any]:
    return {
        "kernel": found.task.kernel,
        "key": found.task.key,
        "default_us": round(found.default_us, 2),
        "us": round(found.us, 2),
        "gain": f"{100 * found.gain:.1f} %" if found.config != found.task.configs[0] else "",
        "config": found.config,
        "tried": found.tried,
    }
