"""Recorded results: `evidence/<gpu>.jsonl`, one JSON object a line, one line a case and release of Triton; recording that again
replaces it, unless the new row lacks a rival that the old one has: then it is written to `evidence/aside/`, which nothing reads.

A file is changed under a lock and put in place whole, so that neither an interrupted run nor two at once can damage it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..core.target import TARGETS, Target
from ..core.triton_versions import age, offered_gluon
from .cases import CASES
from .results import Key, key_of

Row = dict[str, Any]
FIELDS: dict[str, tuple[type, ...]] = {
    "op": (str,), "case": (str,), "direction": (str,), "dims": (dict,), "us": (int, float), "floor_us": (int, float, type(None)),
    "fraction": (int, float, type(None)), "rivals": (dict,), "error": (int, float, type(None)),
    "extra_bytes": (int, type(None)), "host_us": (int, float, type(None)), "method": (str,), "bytes": (list,),
    "gpu": (str,), "arch": (str,), "sms": (int,), "torch": (str,), "triton": (str,), "date": (str,), "source": (str,),
}  # fmt: skip
# Of matrix products; of models, each variant's step by its name, and versions of what is compared; of any, why rivals that were
# asked for have no time, the bytes that others take beside their results, and what else to know; of choices, the times of ours and
# of aten in every run, eager and in a graph
OPTIONAL = ("rates", "steps", "packages", "absent", "rival_bytes", "note", "runs")
ASIDE = "aside"
STEP = {"us": (int, float), "bytes": (int,), "loss": (int, float), "norm": (int, float), "error": (int, float)}
LONGEST = 64 << 20  # bytes of a file that are read


class Damaged(ValueError):
    """A file of evidence has a line that is none; the message says where."""


def folder() -> Path:
    """The folder of the evidence: the project's own where this is a checkout, else `evidence` in the current one."""
    here = Path(__file__).resolve().parents[2]
    return here / "evidence" if (here / "pyproject.toml").exists() else Path("evidence")


def path_of(gpu: str, where: Path | None = None) -> Path:
    return (where or folder()) / (re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-") + ".jsonl")


def problem(row: Any) -> str | None:
    """What is wrong with a row, or None."""
    if not isinstance(row, dict):
        return "is not an object"
    missing = [name for name in FIELDS if name not in row]
    if missing:
        return f"lacks {', '.join(missing)}"
    for name, kinds in FIELDS.items():
        if not isinstance(row[name], kinds) or isinstance(row[name], bool):
            return f"has {name} = {row[name]!r}"
    if not all(isinstance(v, (int, float)) for v in (*row["dims"].values(), *row["rivals"].values())):
        return "has a dimension or a rival that is not a number"
    if not all(isinstance(why, str) for why in row.get("absent", {}).values()):
        return "has a rival that is absent without a reason"
    if not is_runs(row.get("runs", {} if row["direction"] != "choice" else None)):
        return "has runs that are none"
    steps = row.get("steps", None if row["direction"] == "train" else {})
    if not isinstance(steps, dict) or not all(map(is_step, steps.values())):
        return "has a step that is neither measured nor failed"
    return None


def is_runs(runs: Any) -> bool:
    """Whether these are pairs of times, by the way of calling."""
    return isinstance(runs, dict) and all(
        isinstance(pairs, list) and all(isinstance(p, list) and len(p) == 2 and all(map(is_us, p)) for p in pairs)
        for pairs in runs.values()
    )


def is_us(value: Any) -> bool:
    return type(value) in (int, float) and value > 0


def is_step(step: Any) -> bool:
    """Whether a variant of a model has all its numbers, or a reason why it has none."""
    if not isinstance(step, dict):
        return False
    if not all(isinstance(step.get(name, ""), str) for name in ("failed", "note")):
        return False
    return "failed" in step or all(isinstance(step.get(name), kinds) for name, kinds in STEP.items())


def read(path: Path) -> list[Row]:
    """The rows of a file; raises `Damaged` with the line that is none."""
    return lines_of(path, problem)


def lines_of(path: Path, problem: Callable[[Any], str | None]) -> list[Row]:
    """The rows of a file of which `problem` says what is wrong."""
    rows = []
    try:
        with path.open() as file:
            text = file.read(LONGEST)
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise Damaged(f"{path}:{number} is not JSON: mend the line or delete it") from error
        wrong = problem(row)
        if wrong is not None:
            raise Damaged(f"{path}:{number} {wrong}: mend the line or delete it")
        rows.append(row)
    return rows


def everything(where: Path | None = None) -> list[Row]:
    """All rows of all GPUs."""
    return [row for path in sorted((where or folder()).glob("*.jsonl")) for row in read(path)]


def record(rows: Sequence[Row], where: Path | None = None) -> list[str]:
    """Add rows to their GPUs' files, in the place of earlier ones of the same case and Triton. A row that lacks a rival of the one
    that it would replace is kept aside instead; gives a line for each of these."""
    for row in rows:
        wrong = problem(row)
        if wrong is not None:
            raise ValueError(f"{row.get('case')}: the row {wrong}")
    said: list[str] = []
    for gpu in sorted({row["gpu"] for row in rows}):
        path = path_of(gpu, where)
        with locked(path):
            merged = {key_of(row): row for row in read(path)}
            refused = []
            for row in rows:
                if row["gpu"] != gpu:
                    continue
                lacks = sorted(merged.get(key_of(row), row)["rivals"].keys() - row["rivals"].keys())
                if lacks:
                    refused.append(row)
                    said.append(refusal(row, lacks))
                else:
                    merged[key_of(row)] = row
            write(path, ordered(merged.values()))
        if refused:
            _keep_aside(refused, (where or folder()) / ASIDE)
    return said


def refusal(row: Row, lacks: Sequence[str]) -> str:
    """What to say of a row that replaces none."""
    why = "; ".join(f"{name}: {row['absent'][name]}" for name in lacks if name in row.get("absent", {}))
    return (
        f"{row['case']}: kept aside: the recorded row has {', '.join(lacks)} beside it and this one has not"
        f" ({why or 'measure it with --rivals ' + ','.join(lacks)})"
    )


def _keep_aside(rows: Sequence[Row], where: Path) -> None:
    path = path_of(rows[0]["gpu"], where)
    with locked(path):
        merged = {key_of(row): row for row in (*read(path), *rows)}
        write(path, ordered(merged.values()))


def ordered(rows: Iterable[Row]) -> list[Row]:
    """Rows in the order of the cases."""
    places = {case: at for at, case in enumerate(CASES)}
    return sorted(rows, key=lambda row: (places.get(row["case"], len(places)), row["case"], age(row["triton"])))


def stale_keys(rows: Iterable[Row]) -> set[Key]:
    """The keys of rows that are not of today's code."""
    return {key_of(row) for row in rows if freshness(row) == "stale"}


def write(path: Path, rows: Sequence[Row]) -> None:
    """Put a whole file in place, or leave the old one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
            file.flush()
            os.fsync(file.fileno())
        beside.replace(path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[None]:
    """Inside, no other process records to this file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path.with_name(f".{path.name}.lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def freshness(row: Row) -> str:
    """`fresh` where the row's case would launch the same kernels with the same constants today, else `stale`."""
    from .source import source  # needs the ops

    target = target_of(row)
    if row["case"] not in CASES or target is None:
        return "stale"
    return "fresh" if source(row["case"], target) == row["source"] else "stale"


def target_of(row: Row) -> Target | None:
    """The chip of a row, with the Triton that it was measured with."""
    known = TARGETS.get(row["arch"])
    return known and replace(known, sms=row["sms"], gluon=offered_gluon(row["triton"]))


def state(op: str, rows: Sequence[Row]) -> str:
    """The freshness of an op's rows together: `none`, `fresh`, or `stale` if one of them is."""
    found = [freshness(row) for row in rows if row["op"] == op]
    return "none" if not found else "stale" if "stale" in found else "fresh"
