"""What only hardware shows. Also a pytest plugin (`-p tests.gpu`) that writes each test's start and outcome.

The runner (`python3 -m tests.gpu`) reads those lines as they come: a test that began and never ended hung or crashed. Processes
that were given the same tests run each of them once: the first to claim it does.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

LOG = "TILEWRIGHT_GPU_LOG"
CLAIMS = "TILEWRIGHT_GPU_CLAIMS"
LOST_DEVICE = 70
_reports: dict[str, list[Any]] = {}
_absent: list[dict[str, Any]] = []  # files that were skipped whole, before they had tests
_asked: list[str] = []


def _write(row: dict[str, Any]) -> None:
    path = os.environ.get(LOG)
    if path:
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")


def pytest_configure(config: Any) -> None:
    _asked[:] = config.args


def pytest_collectreport(report: Any) -> None:
    if report.skipped:
        row = {"outcome": "skipped", "why": str(report.longrepr[-1])}
        _absent.append({"id": report.nodeid, **row})
        for name in _asked:  # by names of its tests, which pytest then says it cannot find
            if name.startswith(f"{report.nodeid}::"):
                _write({"id": name, **row})


def pytest_collection_finish(session: Any) -> None:
    if session.config.option.collectonly:
        torch = sys.modules.get("torch")  # every test that needs a device has imported it by now
        _write({"cuda": torch is not None and torch.cuda.is_available()})
        for row in (*_absent, *({"id": item.nodeid, "outcome": "collected"} for item in session.items)):
            _write(row)


def claim_of(folder: str | Path, name: str) -> Path:
    """The file that says that a process has begun with a test, or is about to."""
    return Path(folder) / hashlib.sha256(name.encode()).hexdigest()


def claim(name: str) -> bool:
    """Take a test, which is then nobody else's; False if another process has."""
    folder = os.environ.get(CLAIMS)
    if folder is None:
        return True
    try:
        claim_of(folder, name).touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def pytest_runtest_protocol(item: Any, nextitem: Any) -> bool | None:
    """Pass over a test that another process has. All tests of a process are of one file, so there is nothing to tear down."""
    return None if claim(item.nodeid) else True


def pytest_runtest_logstart(nodeid: str, location: tuple) -> None:
    _write({"id": nodeid, "outcome": "started"})


def still_running(nodeid: str) -> None:
    """Tell the runner that a test which waits for a process of its own, with a limit of its own, does not hang."""
    pytest_runtest_logstart(nodeid, ())


def pytest_runtest_logreport(report: Any) -> None:
    _reports.setdefault(report.nodeid, []).append(report)


def pytest_runtest_logfinish(nodeid: str, location: tuple) -> None:
    reports = _reports.pop(nodeid, [])
    failed = [r for r in reports if r.failed]
    skipped = [r for r in reports if r.skipped]
    outcome = "failed" if failed or not reports else "skipped" if skipped else "passed"
    why = failed[0].longreprtext[-3000:] if failed else str(skipped[0].longrepr)[-300:] if skipped else ""
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized() and not failed:
        torch.cuda.empty_cache()  # other processes test on the same device
    _write({"id": nodeid, "outcome": outcome, "seconds": round(sum(r.duration for r in reports), 2), "why": why})
    if failed and _device_lost():
        os._exit(LOST_DEVICE)  # every later test of this process would fail for this one's reason


def _device_lost() -> bool:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False
