"""Work that may hang or crash, in a process of its own that is replaced when it does.

A worker answers requests, one line each, through a pipe. What a kernel can do to its process (hang, lose the device, crash)
costs the one request that did it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import selectors
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
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

    def fileno(self) -> int:
        """The pipe of replies, for a selector."""
        return self._replies

    def send(self, request: str) -> None:
        try:
            self._process.stdin.write(request + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise Lost(f"ended with status {self._process.wait()}{self._last_words()}") from None

    def has_reply(self) -> bool:
        """Whether a whole reply was received and not taken."""
        return b"\n" in self._waiting

    def receive(self) -> Row | None:
        """The next reply, or None as long as it is not whole. Waits if nothing has come."""
        if not self.has_reply():
            received = os.read(self._replies, 1 << 16)
            if not received:
                raise Lost(f"crashed with status {self._process.wait()}{self._last_words()}")
            self._waiting += received
        line, end, rest = self._waiting.partition(b"\n")
        if not end:
            return None
        self._waiting = rest
        return json.loads(line)

    def read(self, limit: float) -> Row:
        """The next reply, within `limit` seconds."""
        end, row = time.monotonic() + limit, None
        with selectors.DefaultSelector() as selector:
            selector.register(self, selectors.EVENT_READ)
            while row is None:
                if not self.has_reply() and not selector.select(max(0.0, end - time.monotonic())):
                    raise self.late(limit)
                row = self.receive()
        return row

    def expect_ready(self, limit: float) -> None:
        """Wait for the first reply. A worker that cannot start will not start for the next case either."""
        try:
            status = self.read(limit)["status"]
        except Lost as lost:
            status = f"the worker did not start, {lost}"
        if status != READY:
            raise NoWorker(status)

    def ask(self, request: str, limit: float) -> Row:
        self.send(request)
        return self.read(limit)

    def late(self, limit: float) -> Lost:
        """What to say of a worker that was silent for so long."""
        return Lost(f"timed out after {limit:.3g} s{self._last_words()}")

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


@dataclass
class Asked:
    """A request that a worker has; `ready` once the worker has said that it can answer."""

    request: str
    weight: float
    begin: float
    since: float  # when the worker began with it, or was started
    ready: bool


def supervise(
    names: Iterable[str],
    command: Sequence[str],
    limit: float,
    start_limit: float = START_LIMIT,
    jobs: int = 1,
    weight: Callable[[str], float] = lambda name: 0.0,
    most: float = math.inf,
) -> Iterator[Row]:
    """A row for each name as it is ready, from `jobs` workers, each for as long as it lives.

    Names that are worked on at the same time weigh no more than `most` together; a heavier one is alone. With one job the next
    name is drawn after the last row was taken. Raises `NoWorker`.
    """
    feed, drawn = iter(names), None
    idle: list[Worker] = []
    asked: dict[Worker, Asked] = {}
    try:
        while True:
            while len(asked) < jobs:
                drawn = next(feed, None) if drawn is None else drawn
                if drawn is None or (asked and weight(drawn) + sum(a.weight for a in asked.values()) > most):
                    break
                now, ready = time.monotonic(), bool(idle)
                worker = idle.pop() if idle else Worker(command)
                asked[worker] = Asked(drawn, weight(drawn), now, now, ready)
                drawn = None
                with contextlib.suppress(Lost):  # it has ended: its last reply, or none, says why
                    worker.send(asked[worker].request)
            if not asked:
                return
            for worker, row in _replies(asked, limit, start_limit):
                one = asked.pop(worker)
                row = {"case": one.request, **row, "wall_s": round(time.monotonic() - one.begin, 2)}
                spoiled = row["status"] in ("lost", "failed") or row.pop("spoiled", False)
                if spoiled or row.get("method", "").startswith("events"):
                    worker.close()
                else:
                    idle.append(worker)
                yield row
    finally:
        for worker in (*idle, *asked):
            worker.close()


def _replies(asked: dict[Worker, Asked], limit: float, start_limit: float) -> list[tuple[Worker, Row]]:
    """Wait until a worker has something to say, or is silent for too long; the rows that are whole."""

    def allowed(one: Asked) -> float:
        return limit if one.ready else start_limit

    found: list[tuple[Worker, Row]] = []
    heard = {worker for worker in asked if worker.has_reply()}
    if not heard:
        with selectors.DefaultSelector() as selector:
            for worker in asked:
                selector.register(worker, selectors.EVENT_READ)
            end = min(one.since + allowed(one) for one in asked.values())
            heard = {key.fileobj for key, _ in selector.select(max(0.0, end - time.monotonic()))}
    for worker, one in asked.items():
        try:
            if worker in heard:
                row = worker.receive()
            elif time.monotonic() >= one.since + allowed(one):
                raise worker.late(allowed(one))
            else:
                continue
        except Lost as lost:
            if not one.ready:  # a worker that cannot start will not start for the next name either
                raise NoWorker(f"the worker did not start, {lost}") from None
            row = {"status": "lost", "why": str(lost)}
        if row is not None and not one.ready:
            if row["status"] != READY:
                raise NoWorker(row["status"])
            one.ready, one.since = True, time.monotonic()
        elif row is not None:
            found.append((worker, row))
    return found
