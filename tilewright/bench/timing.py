"""How long a call takes on the device, and how long the host needs to issue it.

Device time: a captured graph of several calls over rotating buffer sets that together exceed four times the L2, median
over replays. Neither the launch nor a warm cache is in it. What cannot be captured is timed with events and says so.
Host time: calls are issued in short batches to a drained device, so the launch queue never fills and never blocks.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch

L2_TIMES = 4
BYTES_PER_US = 4e6  # only to size graphs and warm-ups, never part of a result
GRAPH_US = 3000.0  # long enough that the gap between two replays is lost among the calls
# Of a graph and of a reading: some rivals take thousands of times as long as their bytes would
MOST_GRAPH_US, MOST_READING_US = 100_000.0, 500_000.0
WARM_US = 30_000.0  # an idle H200 sits at 345 MHz; this is time enough for its clocks to rise
FLUSH_BYTES = 256 << 20
WARM_CALLS = 3
REPLAYS = 15  # of a graph, whose median is a reading


@functools.cache
def capture_stream() -> torch.cuda.Stream:
    """The stream that graphs are captured on."""
    return torch.cuda.Stream()


class CannotCapture(RuntimeError):
    """The calls cannot be captured in a graph; the message says why."""


class Device(Protocol):
    """The few device operations that timing needs."""

    def l2_bytes(self) -> int: ...
    def synchronize(self) -> None: ...
    def capture(self, body: Callable[[], None]) -> Callable[[], None]: ...
    def mark(self) -> Any: ...
    def elapsed_us(self, start: Any, end: Any) -> float: ...
    def flush(self) -> None: ...


class Cuda:
    """The current CUDA device."""

    def __init__(self) -> None:
        self._clean: torch.Tensor | None = None

    def l2_bytes(self) -> int:
        return torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size

    def synchronize(self) -> None:
        torch.cuda.synchronize()

    def capture(self, body: Callable[[], None]) -> Callable[[], None]:
        """Capture `body` and return the function that replays it (which keeps the graph and its memory alive)."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, stream=capture_stream()):
                body()
        except RuntimeError as error:
            raise CannotCapture(str(error).strip().split("\n")[0]) from error
        return graph.replay

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return start.elapsed_time(end) * 1e3

    def flush(self) -> None:
        """Fill the L2 with clean lines of nobody's, so that no earlier write-back lands in what is timed next."""
        if self._clean is None:
            self._clean = torch.ones(FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        torch.sum(self._clean)


class Within(NamedTuple):
    """A call that is made inside of something which decides what it is, and which many calls may be made inside of."""

    plain: Callable[[], Any]
    inside: Callable[[], contextlib.AbstractContextManager]

    def __call__(self) -> Any:
        with self.inside():
            return self.plain()


@contextlib.contextmanager
def entered(calls: Sequence[Callable[[], Any]]) -> Iterator[list[Callable[[], Any]]]:
    """Calls of one kind, without what each is made inside of: here all of them are."""
    if not isinstance(calls[0], Within):
        yield list(calls)
        return
    with calls[0].inside():
        yield [call.plain for call in calls]


@dataclass(frozen=True)
class Timing:
    """Microseconds a call, and by which method: "graph", or "events" with the reason."""

    us: float
    method: str


def plan(nbytes: int, l2: int, once: bool = False) -> tuple[int, int]:
    """(buffer sets, calls in a graph) for a call that moves `nbytes`; `once`: no set may be used twice in a replay."""
    sets = max(2, -(-L2_TIMES * l2 // max(nbytes, 1)))
    sets = min(sets, 64)  # a call this small is bound by its launch, not by memory
    if once:
        return sets, sets
    rounds = GRAPH_US * BYTES_PER_US / (sets * max(nbytes, 1))
    return sets, sets * max(1, min(8, round(rounds)))


class Graph:
    """Calls of `work`, one for each buffer set, captured once and timed as often as one likes. Raises `CannotCapture`.

    Of calls that are far slower than their bytes would have them there are fewer. `restore` puts back what the calls overwrite,
    before every replay and outside the time. `kept` are the results that the last replay left, one for each set.
    """

    def __init__(
        self,
        work: Sequence[Callable[[], Any]],
        calls: int,
        *,
        restore: Callable[[], None] | None = None,
        device: Device | None = None,
    ) -> None:
        sets = len(work)
        if restore is not None and calls > sets:
            raise ValueError(f"calls that overwrite their input use each set once: {calls} calls for {sets} sets")
        self.restore, self.device = restore, Cuda() if device is None else device
        # Twice: an op may take its long way at the first call of a kind and its short one from the second on.
        for call in work:
            call()
        start = self.device.mark()
        for call in work:
            call()
        end = self.device.mark()
        self.device.synchronize()
        longest = max(1, int(MOST_GRAPH_US / max(self.device.elapsed_us(start, end), 1.0)))
        self.calls = calls = min(calls, longest * sets)
        self.kept: list[Any] = [None] * sets

        def body() -> None:
            # Results are held for a whole round, so that they rotate as the inputs do; freed at once, every call would
            # write the same addresses and its writes would stay in the L2.
            for i in range(calls):
                self.kept[i % sets] = None
                self.kept[i % sets] = work[i % sets]()

        self.replay = self.device.capture(body)

    def timed(self) -> tuple[Any, Any]:
        """The marks around a replay."""
        if self.restore is not None:
            self.restore()
            self.device.flush()
        start = self.device.mark()
        self.replay()
        return start, self.device.mark()

    def warm(self, most: int, within: float) -> int:
        """Replay until the clocks have risen; how many replays, `most` at most and three at least, take so many microseconds."""
        first = [self.timed() for _ in range(2)]
        self.device.synchronize()
        once = max(self.device.elapsed_us(*first[1]), 1.0)
        for _ in range(min(200, int(WARM_US / once))):
            self.timed()
        return max(3, min(most, int(within / once)))

    def us(self, replays: int) -> float:
        """Microseconds a call: median over replays."""
        marks = [self.timed() for _ in range(replays)]
        self.device.synchronize()
        return statistics.median(self.device.elapsed_us(*pair) for pair in marks) / self.calls


def time_graph(
    make: Callable[[], Callable[[], Any]],
    sets: int,
    calls: int,
    replays: int = REPLAYS,
    *,
    restore: Callable[[], None] | None = None,
    inspect: Callable[[list[Any]], None] | None = None,
    device: Device | None = None,
) -> float:
    """Microseconds a call: median over replays of a `Graph` of `calls` calls over `sets` buffer sets, one `make()` each. `inspect`
    is given the results that the last replay left."""
    graph = Graph([make() for _ in range(sets)], calls, restore=restore, device=device)
    us = graph.us(graph.warm(replays, MOST_READING_US))
    if inspect is not None:
        inspect(graph.kept)
    return us


def time_events(
    make: Callable[[], Callable[[], Any]],
    repeats: int = 25,
    *,
    restore: Callable[[], None] | None = None,
    inspect: Callable[[list[Any]], None] | None = None,
    device: Device | None = None,
) -> float:
    """Microseconds a call, by a pair of events around each of `repeats` calls after the L2 was filled with other data.

    The pair itself costs about 3 us on an H200, and a call whose host side outlasts the fill shows its launch.
    """
    device = Cuda() if device is None else device
    call = make()
    for _ in range(3):
        call()
    marks = []
    result = None
    for _ in range(repeats):
        result = None
        if restore is not None:
            restore()
        # The second fill keeps the device busy while the host issues the call.
        device.flush()
        device.flush()
        start = device.mark()
        result = call()
        marks.append((start, device.mark()))
    device.synchronize()
    if inspect is not None:
        inspect([result])
    return statistics.median(device.elapsed_us(*pair) for pair in marks)


def measure(
    calls: Sequence[Callable[[], Any]],
    in_graph: int,
    *,
    restore: Callable[[], None] | None = None,
    inspect: Callable[[list[Any]], None] | None = None,
    device: Device | None = None,
    captured: bool = True,
) -> Timing:
    """Time `calls`, one for each buffer set, by a graph of `in_graph` calls; by events where there can be no graph, or none is
    to be `captured`."""
    method, results = "graph", []
    with entered(calls) as own:
        supply = itertools.cycle(own)

        def make() -> Callable[[], Any]:
            return next(supply)

        try:
            if not captured:
                raise CannotCapture("as the case asks")
            us = time_graph(make, len(calls), in_graph, restore=restore, inspect=results.extend, device=device)
        except CannotCapture as error:
            us = time_events(make, restore=restore, inspect=results.extend, device=device)
            method = f"events: {error}"
    if inspect is not None:  # outside of what the calls are made inside of, which is not how they are checked
        inspect(results)
    return Timing(us, method)


def time_host_each(
    calls: Sequence[Callable[[], Any]],
    batches: int = 41,
    per_batch: int | Sequence[int] = 100,
    *,
    whole: bool = False,
    clock: Callable[[], int] = time.perf_counter_ns,
    drain: Callable[[], None] | None = None,
) -> list[float]:
    """Microseconds the host needs to issue one of each of `calls`: medians over batches of one call after another. `whole`: until
    the device has done them, which is what a program waits for.

    Batches of all calls alternate, so that a slower or faster spell of the machine falls on all of them. A batch of 100 is far
    under the about 1000 launches that a stream queues before the host has to wait. Batches of each call may have a size of their
    own.
    """
    drain = torch.cuda.synchronize if drain is None else drain
    sizes = [per_batch] * len(calls) if isinstance(per_batch, int) else per_batch
    for call, size in zip(calls, sizes):
        with entered([call]) as [own]:
            for _ in range(size):
                own()
    times: list[list[float]] = [[] for _ in calls]
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(batches):
            for call, size, mine in zip(calls, sizes, times):
                with entered([call]) as [own]:
                    if own is not call:  # what was entered anew may have its long way to go again
                        for _ in range(WARM_CALLS):
                            own()
                    drain()
                    start = clock()
                    for _ in itertools.repeat(None, size):
                        own()
                    if whole:
                        drain()
                    mine.append((clock() - start) / size / 1e3)
    finally:
        if collecting:
            gc.enable()
        drain()
    return [statistics.median(mine) for mine in times]


def time_host(call: Callable[[], Any], **settings: Any) -> float:
    """Microseconds the host needs to issue one call; see `time_host_each`."""
    return time_host_each([call], **settings)[0]
