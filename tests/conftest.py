"""Which net this process is, which part of it runs, and what it cost: in all and for each op.

Triton decides at import whether kernels are interpreted, so `tests/interpreter` and `tests/aten` run in processes with
TRITON_INTERPRET=1 and everything else in processes without. TILEWRIGHT_NET, which the Makefile sets, names a net that is run
whole or, with TILEWRIGHT_SHARD=I/N, in parts: its CPU seconds are held to a budget and kept (`tests/seconds.py`).
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import seconds

HERE = Path(__file__).parent
INTERPRETING = os.environ.get("TRITON_INTERPRET") == "1"
NET = os.environ.get("TILEWRIGHT_NET", "")
SHARD = os.environ.get("TILEWRIGHT_SHARD") or "1/1"
INTERPRETED = ("interpreter", "aten")  # the folders that run so
FOLDERS = [p.name for p in HERE.iterdir() if p.is_dir()]
collect_ignore = [name for name in FOLDERS if (name in INTERPRETED) != INTERPRETING]

_spent: Counter[str] = Counter()
_tests: Counter[str] = Counter()
_workers: list[float] = []  # seconds of the processes that ran the tests, if others did
_mark = 0.0  # the clock when the last phase of a test ended


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "smoke: quick enough to run again with the oldest supported Triton")
    asked = [Path(argument.split("::")[0]).resolve() for argument in config.args]
    for path in asked:
        folder = path.relative_to(HERE).parts[:1] if path.is_relative_to(HERE) else ()
        if not INTERPRETING and folder and folder[0] in INTERPRETED:
            raise pytest.UsageError(f"tests/{folder[0]} needs TRITON_INTERPRET=1 in the environment (make {folder[0]})")
        if INTERPRETING and folder and folder[0] in collect_ignore:
            raise pytest.UsageError(f"only tests/{' and tests/'.join(INTERPRETED)} run with TRITON_INTERPRET=1")
    try:
        seconds.read_shard(SHARD)
    except ValueError as error:
        raise pytest.UsageError(str(error)) from error


def pytest_collection(session: pytest.Session) -> None:
    """Every op is declared before the first test: some take ops out of the table and put back what was there."""
    if session.config.pluginmanager.hasplugin("dsession"):  # whose workers collect, and run the tests
        return
    import tilewright

    tilewright.catalogue()


@pytest.hookimpl(trylast=True)  # after -k and -m, so that parts of what is left are equal
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = seconds.shard((item.nodeid for item in items), *seconds.read_shard(SHARD))
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in mine])
    items[:] = [item for item in items if item.nodeid in mine]
    for item in items:
        parameters = item.callspec.params if hasattr(item, "callspec") else {}
        item.user_properties.append(("subject", seconds.subject(item.path, parameters)))


# ---------------------------------------------------------------- what it cost


def pytest_runtest_logstart() -> None:
    global _mark
    _mark = seconds.clock()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[Any]:
    """The process that ran a phase of a test says what it took; the one that is told of it adds up."""
    global _mark
    report = yield
    before, _mark = _mark, seconds.clock()
    report.user_properties.append(("seconds", _mark - before))
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    told = dict(report.user_properties)
    if "subject" in told:  # of a test whose process died nobody says what it took, and it is still to be reported
        _spent[told["subject"]] += told["seconds"]
        _tests[told["subject"]] += report.when == "call"


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    _workers.append(getattr(node, "workeroutput", {}).get("seconds", 0.0))


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["seconds"] = seconds.clock()
        return
    _spent[seconds.REST] = max(0.0, (sum(_workers) or seconds.clock()) - _spent.total())
    if NET:
        seconds.keep(NET, SHARD, _spent)
    if NET and seconds.over(_spent, NET) and seconds.errs() and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.section(f"CPU seconds by op; {_spent.total():.1f} in all")
    for name, spent in _spent.most_common():
        terminalreporter.line(f"{spent:8.1f}  {_tests[name]:5d} tests  {name}")
    for line in seconds.said(seconds.over(_spent, NET)) if NET else ():
        terminalreporter.line(line, red=seconds.errs(), yellow=not seconds.errs())
