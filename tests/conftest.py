"""Which net this process is, and how long it took: in all and for each op.

Triton decides at import whether kernels are interpreted, so `tests/interpreter` runs in processes with
TRITON_INTERPRET=1 and everything else in processes without. A net fails if it took longer than TILEWRIGHT_TEST_BUDGET
seconds, or one op longer than TILEWRIGHT_OP_BUDGET seconds of test time (the Makefile sets both; without them nothing
is checked).
"""

from __future__ import annotations

import os
import time
from collections import Counter
from pathlib import Path

import pytest

HERE = Path(__file__).parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
collect_ignore = (
    [p.name for p in HERE.iterdir() if p.is_dir() and p.name != "interpreter"] if INTERPRETING else ["interpreter"]
)

_started = time.monotonic()
_seconds: Counter[str] = Counter()
_tests: Counter[str] = Counter()
_over: list[str] = []


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: quick enough to run again with the oldest supported Triton")
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    if not INTERPRETING and any(path.is_relative_to(HERE / "interpreter") for path in asked):
        raise pytest.UsageError("tests/interpreter needs TRITON_INTERPRET=1 in the environment (make interpreter)")
    if INTERPRETING and any(path.is_relative_to(HERE / name) for path in asked for name in collect_ignore):
        raise pytest.UsageError("only tests/interpreter runs with TRITON_INTERPRET=1 in the environment")


def pytest_collection() -> None:
    """Every op is declared before the first test: some take ops out of the table and put back what was there."""
    import tilewright

    tilewright.catalogue()


def op_of(item: pytest.Item) -> str:
    """The op a test is about: its `op` parameter, else its file."""
    op = getattr(item, "callspec", None) and item.callspec.params.get("op")
    return str(getattr(op, "name", op)) if op else item.path.stem


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.user_properties.append(("op", op_of(item)))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    op = dict(report.user_properties).get("op", "")
    _seconds[op] += report.duration
    _tests[op] += report.when == "call"


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        return
    total = time.monotonic() - _started
    limit, each = (float(os.environ.get(f"TILEWRIGHT_{name}_BUDGET", "inf")) for name in ("TEST", "OP"))
    if total > limit:
        _over.append(f"the net took {total:.0f} s, its budget is {limit:.0f} s")
    _over.extend(
        f"{op} took {s:.0f} s of test time, an op's budget is {each:.0f} s" for op, s in _seconds.items() if s > each
    )
    if _over and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"seconds of test time by op; {time.monotonic() - _started:.1f} s in all")
    for op, seconds in _seconds.most_common():
        terminalreporter.line(f"{seconds:8.1f}  {_tests[op]:5d} tests  {op}")
    for line in _over:
        terminalreporter.line(f"OVER BUDGET: {line}", red=True)
