"""A device to measure on where there is none."""

from __future__ import annotations

import functools
from types import SimpleNamespace

from tilewright.bench import check, run, sol, timing
from tilewright.bench.replaced import Replaced
from tilewright.bench.work import Work


class Pretended:
    """A device with a clock of its own: calls cost what they say, replays repeat what was captured."""

    def __init__(self, capturable: bool = True) -> None:
        self.now = 0.0
        self.recording: list | None = None
        self.capturable = capturable
        self.flushes = 0

    def l2_bytes(self) -> int:
        return 60 * (1 << 20)

    def synchronize(self) -> None:
        pass

    def work(self, cost: float, effect=lambda: None) -> None:
        def happen() -> None:
            self.now += cost
            effect()

        if self.recording is None:
            happen()
        else:
            self.recording.append(happen)

    def capture(self, body):
        if not self.capturable:
            raise timing.CannotCapture("it copies to the host")
        self.recording = []
        body()
        recorded, self.recording = self.recording, None

        def replay() -> None:
            for happen in recorded:
                happen()

        return replay

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def flush(self) -> None:
        self.flushes += 1
        self.now += 1000.0


class Rerunning(Pretended):
    """A device whose replays, of two calls, really compute again."""

    def capture(self, body):
        def replay() -> None:
            body()
            self.now += 10.0

        return replay


def measuring(monkeypatch) -> Rerunning:
    """Make the process that measures do without a device: calls are on a CPU, and of two in a graph each takes 5 us. A clock that
    does not vary needs no median over replays, each of which computes."""
    device = Rerunning()
    monkeypatch.setattr(timing, "Cuda", lambda: device)
    monkeypatch.setattr(timing, "time_graph", functools.partial(timing.time_graph, replays=1))
    monkeypatch.setattr(timing, "REPLAYS", 3)
    monkeypatch.setattr(timing, "WARM_US", 0.0)
    monkeypatch.setattr(timing, "plan", lambda nbytes, l2, once=False: (2, 2))
    monkeypatch.setattr(timing, "time_host", lambda call, **_: 3.0)
    monkeypatch.setattr(check, "poison", lambda nbytes: None)
    monkeypatch.setattr(run, "floor_us", lambda read, written: 4.0)
    monkeypatch.setattr(run, "extra_bytes", lambda work, call=None: 7 if call is None else 21)
    monkeypatch.setattr(
        run, "gc", SimpleNamespace(collect=lambda: 0, freeze=lambda: None)
    )  # frees a device's memory, which takes 0.2 s each time
    monkeypatch.setattr(sol, "sustained_us", lambda call, us, device, clock: (2 * us, 1500))
    for kind in (Work, Replaced):
        monkeypatch.setattr(kind, "build", staticmethod(on_cpu(kind.build)))
    return device


def on_cpu(build):
    return lambda case, seed=0, device="cpu": build(case, seed, "cpu")
