"""A device to measure on where there is none."""

from __future__ import annotations

from tilewright.bench import timing


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
