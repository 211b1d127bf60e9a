"""CPU seconds of the nets by op: their budgets, where they are kept, and `python -m tests.seconds`, which prints them.

What counts is the user and system time of the processes of a net and of those that they start: it does not grow because
other work takes the machine. More than a budget is a warning; with TILEWRIGHT_BUDGETS=error, which `.ci/run` sets, an error.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tilewright.names import OPS

KEPT = Path(__file__).resolve().parents[1] / ".cache" / "seconds.json"
NETS = {"host": 1420, "interpreter": 1850, "aten": 560, "compile": 1050, "smoke": 150}  # CPU seconds that each may take
# That one op may take in all nets together, an op on average, and all that is no op's: integrations, commands, documents. Torch's
# operators are in neither, `aten` is their net. An op is to take 70 at most: what else a machine does makes it a sixth more
OP, AVERAGE, OTHERS = 82, 20, 1900
REST = "(collecting and importing)"  # what no test took
Kept = dict[str, dict[str, dict[str, float]]]  # by net, shard, and op or file


def clock() -> float:
    """CPU seconds of this process and of the children that it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def subject(path: Path, parameters: Mapping[str, Any]) -> str:
    """What a test is about: its `op` parameter, the op that its file is named after, or its file."""
    op = parameters.get("op")
    name = str(getattr(op, "name", op)) if op is not None else path.stem.removeprefix("test_")
    return name if op is not None or name in OPS else path.stem


def shard(names: Iterable[str], part: int, parts: int) -> set[str]:
    """One of `parts` parts of the names. Every n-th of the sorted names, so that all machines agree, whatever they have kept,
    and the tests of one property are spread evenly."""
    return set(sorted(names)[part - 1 :: parts])


def read_shard(text: str) -> tuple[int, int]:
    """`2/4` as numbers."""
    part, slash, parts = text.partition("/")
    if not (slash and part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise ValueError(f"SHARD is I/N with 1 <= I <= N, got {text!r}")
    return int(part), int(parts)


def slower() -> float:
    """How much slower than the machine of the budgets this one is said to be."""
    return float(os.environ.get("SLOWER", "1"))


def errs() -> bool:
    """Whether more than a budget is an error."""
    return os.environ.get("TILEWRIGHT_BUDGETS") == "error"


def over(seconds: Mapping[str, float], net: str | None = None) -> list[str]:
    """Which budgets the seconds by op or file exceed: of a net, or of all nets together."""
    own, each = sum(s for op, s in seconds.items() if op in OPS), OP * slower()
    rest = sum(seconds.values()) - own
    totals = [(f"{len(OPS)} ops", own, AVERAGE * len(OPS)), ("all that is no op's", rest, OTHERS)]
    totals = [(f"the {net} net", own + rest, NETS.get(net, float("inf")))] if net else totals
    found = [
        f"{what} took {took:.0f} CPU seconds, the budget is {most * slower():.0f}"
        for what, took, most in totals
        if took > most * slower()
    ]
    wrong = {op: s for op, s in seconds.items() if op in OPS and s > each}
    return found + [f"{op} took {s:.0f} CPU seconds, an op's budget is {each:.0f}" for op, s in wrong.items()]


def said(lines: Iterable[str]) -> list[str]:
    """Those lines as warnings or errors."""
    return [f"{'ERROR' if errs() else 'WARNING'}: over budget: {line}" for line in lines]


# ---------------------------------------------------------------- kept


def load(path: Path = KEPT) -> Kept:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return {}


def keep(net: str, part: str, seconds: Mapping[str, float], path: Path = KEPT) -> None:
    """Replace what is kept of a net, or of a part of it; parts of another split go."""
    kept = load(path)
    parts = part.partition("/")[2]
    same = {name: row for name, row in kept.get(net, {}).items() if name.partition("/")[2] == parts}
    kept[net] = {**same, part: {op: round(s, 2) for op, s in seconds.items()}}
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent)
    with os.fdopen(handle, "w") as file:
        json.dump(kept, file, indent=1)
    os.replace(name, path)


def by_net(kept: Kept) -> dict[str, Counter[str]]:
    """Seconds by net, then by op or file, the parts of a net together."""
    found: dict[str, Counter[str]] = {}
    for net, parts in kept.items():
        found[net] = Counter()
        for row in parts.values():
            found[net].update(row)
    return found


def listing(nets: Mapping[str, Mapping[str, float]]) -> list[str]:
    """A table: ops first, then files, the slowest first."""
    names = [net for net in NETS if net in nets] + sorted(nets.keys() - NETS.keys())
    total = Counter()
    for net in names:
        total.update(nets[net])

    def line(title: str, cells: Sequence[float]) -> str:
        return " ".join(f"{cell:11.1f}" for cell in cells) + f"  {title}"

    head = " ".join(f"{name:>11}" for name in (*names, "all"))
    rows = sorted(total, key=lambda name: (name not in OPS, -total[name], name))
    body = [line(name, [*(nets[net].get(name, 0.0) for net in names), total[name]]) for name in rows]
    sums = [*(sum(nets[net].values()) for net in names), sum(total.values())]
    own = [*(sum(s for op, s in nets[net].items() if op in OPS) for net in names)]
    own.append(sum(own))
    return [head, *body, line("in all", sums), line("an op on average, of its own", [s / len(OPS) for s in own])]


def main(path: Path = KEPT) -> int:
    """Print what is kept, and what is over a budget."""
    nets = by_net(load(path))
    if not nets:
        print(f"tests.seconds: nothing is kept in {path} (make test)")
        return 1
    print("\n".join(listing(nets)))
    total = Counter()
    for net, row in nets.items():
        if net != "aten":
            total.update(row)
    wrong = over(total)
    print("\n".join(said(wrong)), end="\n" if wrong else "")
    return 1 if wrong and errs() else 0


if __name__ == "__main__":
    sys.exit(main())
