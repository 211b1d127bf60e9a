"""Ops held to the truth at the sizes of real models: which calls to make, one of them made, and what was found, kept.

On a GPU these are all calls of `models.calls`, with the truth in float64 on that GPU; in the interpreter those few that have
every value of every constant, with few rows. A file keeps an outcome a line, so that a run that was stopped goes on where it was,
and a call is made again when the code that it launches has changed.

Many calls are made side by side. One whose truth does not fit beside the others is made once more when they are done, alone; and
where an op says how to cut a call (`Bars.parts`), its truth is had in parts.
"""

from __future__ import annotations

import datetime
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

from .. import catalogue
from ..core.format import Format
from ..core.target import INTERPRETER, Target
from ..op import Op, Part
from ..runtime.kernel import Wanted
from .cases import Net
from .compare import check
from .models import TOKENS, ModelCall, Place, calls, covering, digest, elements, place_calls, programs
from .oracle import Outcome, outcome, truth_on
from .variants import Plain

DONE = ("held", "skipped")
BYTES = (
    96  # of memory for each element of the arguments: it, its gradient, and float64 copies of both for truth and noise
)
SHARE = 0.8  # of a GPU's memory that a call may take
FEW, SOME = 3, 128  # rows in the interpreter, and of the property on a GPU
LARGEST = {True: 3 << 17, False: 1 << 26}  # elements of a sampled call, in the interpreter and on a GPU
# Milliseconds that a call, a program and an element of its arguments take in the interpreter, and those that an op may take
CALL_MS, PROGRAM_MS, ELEMENT_MS, OP_MS = 50.0, 4.0, 0.005, 2000.0
RANK = 1 << 28  # elements of a call at which one more rank shares the experts, or the width, that ranks can share
ON_GPU = 1 << 28  # elements of all sampled calls of an op there
Row = dict[str, Any]


# ---------------------------------------------------------------- which calls


def sample(
    op: Op, net: Net, names: Iterable[str] | None = None, places: Sequence[Place] | None = None
) -> list[ModelCall]:
    """A few of an op's calls in models, the smallest first, that have every value of its kernels' constants between them."""
    chosen = {"places": places, "most": LARGEST[net.interpreter]}
    if net.interpreter:
        target = INTERPRETER
        # Formats are for `quantised`: their codes are made by integer arithmetic, which takes seconds here
        some = [one for one in calls(op, names, (FEW,), target, **chosen) if one.format is None]
    else:
        target = Target.of(torch.cuda.current_device())
        some = place_calls(op, names, (SOME,), **chosen)
    size = {one.name: elements(op, one) for one in some}

    def cost(one: ModelCall, launches: list[Wanted]) -> float:
        """Milliseconds in the interpreter, elements on a GPU."""
        there = size[one.name]
        return CALL_MS + PROGRAM_MS * programs(launches) + ELEMENT_MS * there if net.interpreter else there

    smallest_first = sorted(some, key=lambda one: size[one.name])
    return covering(op, smallest_first, target, cost=cost, most=OP_MS if net.interpreter else ON_GPU)


# ---------------------------------------------------------------- one call


def hold(op: Op, call: ModelCall, net: Net) -> str:
    """Make a call and its backward, and hold all that they give to the truth, or parts of it where the whole truth does not fit;
    what is to be said of that."""
    values = call.values(op, call.source(op, Plain, device=net.device))
    with truth_on(net.device):
        with net.kernels():
            actual = outcome(op, values)
        try:
            check(op, call.name, values, actual)
            return ""
        except torch.OutOfMemoryError:
            parts = [] if op.bars.parts is None else list(op.bars.parts(SimpleNamespace(**op.arguments(values)), True))
            if not parts:
                raise
        torch.cuda.empty_cache()
        for part in parts:
            check(op, f"{call.name}, a part", part.arguments, piece(op, actual, part))
        return f"{len(parts)} parts of it: the whole truth did not fit"


def piece(op: Op, actual: Outcome, part: Part) -> Outcome:
    """What a call gave, as far as a part of it goes."""
    at = {**part.at, **{f"d_{name}": place for name, place in part.at.items()}}
    made = Outcome({name: t[at[name]] for name, t in actual.items() if name in at})
    upstream = [op.results[i] for i in op.graded_results]
    made.grads = [None if g is None else g[at[name]] for name, g in zip(upstream, actual.grads)]
    return made


def answer(op: Op, call: ModelCall, net: Net) -> Row:
    """`hold` as a worker's reply: a call that does not fit is skipped, and the memory of that process given up."""
    try:
        said = hold(op, call, net)
    except RuntimeError as error:  # torch has two, and the driver says it in a third way
        if "out of memory" not in str(error):
            raise
        return {"skipped": f"did not fit: {str(error).partition('.')[0]}", "crowded": True, "spoiled": True}
    finally:
        if net.device == "cuda":
            torch.cuda.empty_cache()
    return {"why": said} if said else {}


def written(call: ModelCall) -> str:
    """A call as a line of JSON."""
    fields = {n: v for n, v in vars(call).items() if n != "models"}
    return json.dumps({**fields, "options": {n: _to_json(v) for n, v in call.options.items()}})


def read(line: str) -> ModelCall:
    """The call of such a line."""
    fields = json.loads(line)
    return ModelCall(**{**fields, "options": {n: _from_json(v) for n, v in fields["options"].items()}})


def _to_json(value: Any) -> Any:
    if isinstance(value, Fraction):
        return {"share": str(value)}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    return {"format": value.key} if isinstance(value, Format) else value


def _from_json(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, text),) = value.items()
    return {"share": Fraction, "dtype": lambda t: getattr(torch, t), "format": Format.parse}[kind](text)


# ---------------------------------------------------------------- what was found


@dataclass(frozen=True)
class Here:
    """Where calls run: what that is called, the chip, and how many elements the tensors of all calls at a time may have."""

    name: str
    target: Target
    most: int
    interpreter: bool = False

    @property
    def limit(self) -> int:
        """How many the tensors of a call that runs alone may have: most need less than `BYTES` each, and one that does not is
        skipped when memory runs out."""
        return 2 * self.most


def in_interpreter() -> Here:
    return Here("interpreter", INTERPRETER, LARGEST[True], interpreter=True)


def gpu() -> Here:
    """The current GPU."""
    at = torch.cuda.current_device()
    most = int(SHARE * torch.cuda.get_device_properties(at).total_memory / BYTES)
    return Here(torch.cuda.get_device_name(at), Target.of(at), most)


@dataclass(frozen=True)
class Listed:
    """A call of an op, how many elements its tensors have, and which code it runs."""

    op: str
    call: ModelCall
    elements: int
    source: str


def listed(op: str, names: Sequence[str] | None, here: Here) -> list[Listed]:
    """The calls of an op."""
    own = catalogue()[op]
    if here.interpreter:
        found = sample(own, Net(interpreter=True), names)
    else:
        found = calls(own, names, TOKENS, here.target, min(here.most, RANK))
    return [Listed(op, one, elements(own, one), digest(own, one, here.target)) for one in found]


def listed_all(ops: Sequence[str], names: Sequence[str] | None, here: Here, jobs: int) -> list[Listed]:
    """The calls of all ops: thousands, of which each takes some milliseconds to work out."""
    if min(jobs, len(ops)) == 1:
        return [one for op in ops for one in listed(op, names, here)]
    forking = multiprocessing.get_context("forkserver")  # a fresh process, without a device, that imports for all
    forking.set_forkserver_preload([__name__, *sorted({op.reference.__module__ for op in catalogue().values()})])
    with ProcessPoolExecutor(min(jobs, len(ops)), forking) as pool:
        found = pool.map(listed, ops, [names] * len(ops), [here] * len(ops))
        return [one for some in found for one in some]


class Kept:
    """The last outcome of each call, in a file that is appended to as outcomes come."""

    def __init__(self, path: Path) -> None:
        self.path, self.rows = path, {row["call"]: row for row in read_rows(path)}

    def has(self, one: Listed) -> bool:
        """Whether the call was right, or cannot be made, with the code and the compiler of now."""
        row = self.rows.get(one.call.name, {})
        same = row.get("triton") == triton.__version__ and row.get("outcome") in DONE
        return same and row["source"] == one.source

    def add(self, row: Row) -> None:
        """Keep a row: one write, so that neither a kill nor another process can mix two lines."""
        self.rows[row["call"]] = row
        self.path.parent.mkdir(parents=True, exist_ok=True)
        file = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(file, (json.dumps(row) + "\n").encode())
        finally:
            os.close(file)


def read_rows(path: Path) -> list[Row]:
    """The whole lines of a file; one that was cut short is left out."""
    rows = []
    for line in path.read_text().split("\n") if path.exists() else ():
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict) and {"call", "outcome", "source"} <= row.keys():
            rows.append(row)
    return rows


class Run:
    """A part of all calls of some ops in some models (None: all), and a file that says which of them were right before."""

    def __init__(
        self,
        ops: Sequence[str],
        names: Sequence[str] | None,
        here: Here,
        part: tuple[int, int],
        path: Path,
        again: bool,
        jobs: int = 1,
    ) -> None:
        self.here, self.kept = here, Kept(path)
        self.weights: dict[str, float] = {}  # of each request, in elements
        self.planned = listed_all(ops, names, here, jobs)[part[0] - 1 :: part[1]]
        self.pending = [one for one in self.planned if again or not self.kept.has(one)]
        for one in self.pending:
            self.kept.rows.pop(one.call.name, None)

    def go(self, ask: Callable[[Iterator[str]], Iterator[Row]], end: float) -> Iterator[Row]:
        """A row for each call that is left to run, kept as it comes; none is begun after that time of `time.monotonic`. `ask` gives
        workers' replies to requests, in whatever order."""
        for one in self.pending:
            if one.elements > self.here.limit:
                why = f"its tensors have {one.elements} elements, of which {self.here.limit} fit"
                yield self._keep(one, {"status": "ok", "skipped": why})
        self.pending = [one for one in self.pending if one.elements <= self.here.limit]
        asked = {written(one.call): one for one in self.pending}
        self.weights = {line: one.elements for line, one in asked.items()}
        crowded: list[str] = []
        for reply in ask(line for line in asked if time.monotonic() < end):
            if reply.get("crowded"):
                crowded.append(reply["case"])
            else:
                yield self._keep(asked[reply["case"]], reply)
        self.weights.update(dict.fromkeys(crowded, math.inf))
        for reply in ask(line for line in crowded if time.monotonic() < end):
            yield self._keep(asked[reply["case"]], reply)

    def _keep(self, one: Listed, reply: Row) -> Row:
        """What is kept of a worker's reply."""
        outcome = {"ok": "skipped" if "skipped" in reply else "held"}.get(reply["status"], reply["status"])
        row = {
            "op": one.op, "call": one.call.name, "models": list(one.call.models), "outcome": outcome,
            "why": reply.get("skipped") or reply.get("why", ""), "seconds": reply.get("wall_s", 0.0), "source": one.source,
            "where": self.here.name, "torch": torch.__version__, "triton": triton.__version__,
            "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        }  # fmt: skip
        self.kept.add(row)
        return row

    def rows(self) -> list[Row]:
        """What is known of the calls of this part."""
        return [self.kept.rows[one.call.name] for one in self.planned if one.call.name in self.kept.rows]
