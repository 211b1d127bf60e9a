"""Counts what the net of torch's operators tries, by overload. A pytest plugin, for this net and its tests on a GPU:

    TRITON_INTERPRET=1 PYTEST_PLUGINS=tests.aten.tried python3 -m pytest tests/aten
    PYTEST_PLUGINS=tests.aten.tried python3 -m tests.gpu tests/gpu/test_aten.py

Each test adds a line to `aten_tried.jsonl`, in $OUT or else in `.cache`: how it ended and, for each overload that was called while
it was replaced, how many calls were ours and why others were aten's. `python3 -m tests.aten.tried LOG ...` makes the rows of
`evidence/aten/` from such logs, of which the last line of a test counts. They are rows of a whole run: what is in no log has none.
"""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOG = "aten_tried.jsonl"
# Files whose tests hold results against aten's
COMPARED = tuple(
    f"test_{name}.py"
    for one in (
        "beyond",
        "copies",
        "dtypes",
        "formats",
        "index",
        "index_map",
        "numbers",
        "opinfo",
        "plans",
        "product",
        "reduction",
        "rows",
        "scan",
        "sort",
        "window",
    )
    for name in (one, f"aten_{one}")
) + ("tests/gpu/test_aten.py", "tests/gpu/test_aten_engines.py")
_calls: dict[str, tuple[Counter[str], Counter[str]]] = {}  # of the test that runs: (ours, why others were not)


def pytest_configure() -> None:
    from tilewright.aten.router import Override

    remove = Override.remove

    def counted(self: Any) -> None:
        taken, declined = getattr(self, "counted", (0, Counter()))
        ours, others = _calls.setdefault(self.name, (Counter(), Counter()))
        ours["taken"] += self.taken - taken
        others.update(self.declined - declined)
        self.counted = self.taken, self.declined.copy()
        remove(self)

    Override.remove = counted


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo) -> Iterator[Any]:
    report = yield
    if report.when == "call":
        if item.nodeid.partition("::")[0].endswith(COMPARED) and report.outcome != "skipped":
            write(item.nodeid, report.outcome)
        _calls.clear()
    return report


def write(test: str, outcome: str) -> None:
    import torch
    import triton

    from tilewright.core.target import INTERPRETING

    calls = {
        name: {"taken": ours["taken"], "declined": dict(others)}
        for name, (ours, others) in _calls.items()
        if ours["taken"] or others
    }
    where = "interpreter" if INTERPRETING else torch.cuda.get_device_name()
    line = {"test": test, "outcome": outcome, "calls": calls, "where": where, "torch": torch.__version__}
    path = Path(os.environ.get("OUT") or ROOT / ".cache") / LOG
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(json.dumps({**line, "triton": triton.__version__}) + "\n")


def rows_of(lines: Sequence[dict[str, Any]], date: str) -> list[dict[str, Any]]:
    """A row for each overload that was called, of logs of one place and its versions."""
    from tilewright.bench import tried

    last = {line["test"]: line for line in lines}.values()
    places = {(line["where"], line["torch"], line["triton"]) for line in last}
    if len(places) != 1:
        raise ValueError(f"these logs are of {len(places)} places: {sorted(places)}")
    [(where, torch, triton)] = places
    found: dict[str, dict[str, Any]] = {}
    for line in last:
        for name, own in line["calls"].items():
            row = found.setdefault(
                name, {"overload": name, "tried": 0, "passed": 0, "declined": Counter(), "failed": []}
            )
            row["tried"] += own["taken"] + sum(own["declined"].values())
            row["declined"].update(own["declined"])
            if line["outcome"] == "passed":
                row["passed"] += own["taken"]
            else:
                row["failed"].append(line["test"].partition("::")[2])
    about = {"where": where, "torch": torch, "triton": triton, "date": date}
    return [
        {**row, "declined": dict(row["declined"]), **about, "source": tried.source(name)}
        for name, row in sorted(found.items())
    ]


def main(files: Sequence[str]) -> None:
    from tilewright.bench import evidence, tried

    lines = [json.loads(line) for file in files for line in Path(file).read_text().splitlines() if line]
    rows = rows_of(lines, datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"))
    wrong = [f"{row['overload']} {what}" for row in rows if (what := tried.problem(row)) is not None]
    if wrong:
        raise ValueError("; ".join(wrong))
    path = evidence.path_of(rows[0]["where"], ROOT / tried.FOLDER)
    evidence.write(path, rows)
    print(f"{path.relative_to(ROOT)}: {len(rows)} overloads, {sum(row['tried'] for row in rows)} calls")


if __name__ == "__main__":
    main(sys.argv[1:])
