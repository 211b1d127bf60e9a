"""Work that may hang or crash, in a process of its own that is replaced when it does.

A worker answers requests, one line each, through a pipe. What a kernel can do to its process (hang, lose the device, crash)
costs the one request that did it.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TextIO

READY = "ready"
START_LIMIT = 180.0  # seconds for a worker to import torch and open the device
Row = dict[str, Any]


def serve(
    answer: Callable[[str], Row],
    wrong: tuple[type[Exception], ...],
    requests: TextIO,
    replies: TextIO,
    status: str = READY,
) -> None:
    """Answer requests until they end; the first reply says whether this process can answer at all.

    An exception among `wrong` is a verdict. After any other the process ends: the device may not be itself any more.
    """

    def reply(row: Row) -> None:
        replies.write(json.dumps(row) + "\n")
        replies.flush()

    reply({"status": status})
    if status != READY:
        return
    for line in requests:
        try:
            row = {"status": "ok", **answer(line.strip())}
        except wrong as error:
            row = {"status": "wrong", "why": str(error)[:4000]}
        except Exception as error:
            text = str(error).strip().partition("\n")[0][:400]
            why = f"{type(error).__name__}: {text}"
            reply({"status": "failed", "why": why, "trace": traceback.format_exc()[-4000:]})
            return
        reply(row)


class Lost(Exception):
    """The worker gave no answer; the message says how it ended."""


class NoWorker(Exception):
    """No worker can be started; the message says why."""


class Worker:
    """A child process that answers requests, one line each, through a pipe of its own; its output goes to a log."""

    def __init__(self, command: Sequence[str]) -> None:
        readable, writable = os.pipe()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        try:
            self._process = subprocess.Popen(
                [*command, str(writable)],
                stdin=subprocess.PIPE,
                stdout=self._log,
                stderr=subprocess.STDOUT,
                pass_fds=(writable,),
                text=True,
            )
        finally:
            os.close(writable)
        self._replies = readable
        self._waiting = b""

    def read(self, limit: float) -> Row:
        """The next reply, within `limit` seconds."""
        end = time.monotonic() + limit
        with selectors.DefaultSelector() as selector:
            selector.register(self._replies, selectors.EVENT_READ)
            while b"\n" not in self._waiting:
                if not selector.select(max(0.0, end - time.monotonic())):
                    raise Lost(f"timed out after {limit:.3g} s{self._last_words()}")
                received = os.read(self._replies, 1 << 16)
                if not received:
                    raise Lost(f"crashed with status {self._process.wait()}{self._last_words()}")
                self._waiting += received
        line, self._waiting = self._waiting.split(b"\n", 1)
        return json.loads(line)

    def expect_ready(self, limit: float) -> None:
        """Wait for the first reply. A worker that cannot start will not start for the next case either."""
        try:
            status = self.read(limit)["status"]
        except Lost as lost:
            status = f"the worker did not start, {lost}"
        if status != READY:
            raise NoWorker(status)

    def ask(self, request: str, limit: float) -> Row:
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Lost(f"ended with status {self._process.wait()}{self._last_words()}") from None
        return self.read(limit)

    def _last_words(self) -> str:
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().split("\n")
        text = " | ".join(line.strip() for line in lines[-3:] if line.strip())
        return f": {text[-400:]}" if text else ""

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        os.close(self._replies)
        self._log.close()


def supervise(
    names: Iterable[str], command: Sequence[str], limit: float, start_limit: float = START_LIMIT
) -> Iterator[Row]:
    """A row for each name, from one worker for as long as it lives; the next name is drawn after its row was taken.
    Raises `NoWorker`."""
    worker: Worker | None = None
    try:
        for name in names:
            start = time.monotonic()
            try:
                if worker is None:
                    worker = Worker(command)
                    worker.expect_ready(start_limit)
                row = worker.ask(name, limit)
            except Lost as lost:
                row = {"status": "lost", "why": str(lost)}
            row = {"case": name, **row, "wall_s": round(time.monotonic() - start, 2)}
            spoiled = row["status"] in ("lost", "failed") or row.pop("spoiled", False)
            spoiled = spoiled or row.get("method", "").startswith("events")
            if worker is not None and spoiled:
                worker.close()
                worker = None
            yield row
    finally:
        if worker is not None:
            worker.close()
