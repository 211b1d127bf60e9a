"""The time below which a memory-bound call cannot go: a kernel that only streams, timed as the call itself is.

It reads R bytes and writes W bytes in the call's own proportion, over rotating buffers, in the same process and
harness. The best of a few configurations is the floor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from .timing import Cuda, Device, plan, time_graph

MOST_BLOCKS = 9  # read and written blocks of one program, before unrolling
WORD = 4
# (words in a block, warps, unrolling): which is best depends on the proportion and on the number of bytes
CONFIGS = (
    (1024, 4, 1),
    (2048, 4, 1),
    (4096, 4, 1),
    (2048, 8, 1),
    (4096, 8, 1),
    (8192, 8, 1),
    (1024, 4, 4),
    (2048, 8, 2),
)


@triton.jit
def stream(X, Y, READ: tl.constexpr, WRITE: tl.constexpr, BLOCK: tl.constexpr):
    """Each program reads READ blocks of int32 words and writes their sum to WRITE blocks."""
    lane = tl.arange(0, BLOCK)
    program = tl.program_id(0).to(tl.int64)
    total = tl.zeros((BLOCK,), tl.int32) + tl.program_id(0)
    for k in tl.static_range(READ):
        total += tl.load(X + (program * READ + k) * BLOCK + lane)
    for k in tl.static_range(WRITE):
        tl.store(Y + (program * WRITE + k) * BLOCK + lane, total)
    if WRITE == 0:
        # A store that practically never happens keeps the loads alive without a reduction, and without writing.
        tl.store(Y + lane, total, mask=total == 0x5EED1E55)


def proportion(read: int, written: int) -> tuple[int, int]:
    """The small whole numbers whose ratio is nearest to read : written; (1, 0) or (0, 1) where one of the two hardly counts."""
    if read < 0 or written < 0 or read + written == 0:
        raise ValueError(f"a floor needs bytes to move, got {read} read and {written} written")
    share = read / (read + written)
    pairs = [(r, n - r) for n in range(1, MOST_BLOCKS + 1) for r in range(n + 1)]
    return min(pairs, key=lambda p: (abs(p[0] / sum(p) - share), sum(p)))


def programs(read: int, written: int, block: int, unroll: int) -> tuple[int, float]:
    """(programs to launch, factor from their bytes to the bytes asked for)."""
    per_program = sum(proportion(read, written)) * unroll * block * WORD
    count = round((read + written) / per_program)
    if count == 0:
        return 1, 1.0  # less than one program's bytes: the floor is a launch
    return count, (read + written) / (count * per_program)


def _streams(read: int, written: int, config: tuple[int, int, int]) -> tuple[Callable, float]:
    """(`make` for `time_graph`, factor to scale its time by)."""
    block, warps, unroll = config
    reads, writes = (blocks * unroll for blocks in proportion(read, written))
    count, factor = programs(read, written, block, unroll)

    def make() -> Callable[[], None]:
        x = torch.empty(max(1, count * reads) * block, dtype=torch.int32, device="cuda").random_()
        y = torch.empty(max(1, count * writes) * block, dtype=torch.int32, device="cuda")
        return lambda: stream[(count,)](x, y, READ=reads, WRITE=writes, BLOCK=block, num_warps=warps)

    return make, factor


@functools.cache
def floor_us(read: int, written: int) -> float:
    """Microseconds of the best streaming kernel for `read` bytes in and `written` bytes out, once a process."""
    device: Device = Cuda()
    sets, calls = plan(read + written, device.l2_bytes())
    best = float("inf")
    for config in CONFIGS:
        make, factor = _streams(read, written, config)
        best = min(best, factor * time_graph(make, sets, calls, replays=9, device=device))
    return best
