"""Where the tensors of a list lie, as a table on their device: what one launch over thousands of tensors reads.

A row of the table is a tensor, in int64 words:

    address, count, kind, first chunk, columns, row stride, column stride, address, row stride and column stride of its result

Behind the rows stands, for each chunk, the row it belongs to. A chunk is `span` bytes of one tensor, so programs are equally
long whatever the tensors are. A tensor is seen as rows by columns, in the order of its memory; a dense one is a single row.

Tables are kept, for a training step meets the same gradients every time, and taken again only if every address, size,
stride and dtype is as it was.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ...core.private import no_modes, raw_stream
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two
from ...runtime.plan import Recorder

WORDS = 10
DENSE, ALIGNED = 4, 8  # bits of `kind`: no gaps; that, and on a 16-byte boundary. The bits below are the dtype
DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
TILE = 16 * 1024  # bytes that one program has in flight: 128 threads with eight loads of 16
LARGEST = 8 * TILE  # more leaves the chip idle at the end, less makes the sum over chunks long
CHUNKS = 16  # for each processor, before chunks grow
MOST = 16  # tables kept
SPARE = 1 << 16  # words of pinned memory kept for tables that are made while a graph is captured


@dataclass
class Table:
    """`words` on the device; how many tensors and chunks it has, and how many bytes a chunk."""

    words: Tensor
    rows: int
    chunks: int
    span: int
    stream: int = 0
    ready: torch.cuda.Event | None = field(default=None, repr=False)

    def use(self) -> None:
        """Before a launch that reads it: wait until it is there, where another stream filled it; a graph holds it for ever."""
        if self.ready is None:
            return
        if torch.cuda.is_current_stream_capturing():  # a capture begins with all work done
            with _lock:
                _held[id(self)] = self
        elif raw_stream(self.words.get_device()) != self.stream:
            stream = torch.cuda.current_stream(self.words.device)
            stream.wait_event(self.ready)
            self.words.record_stream(stream)


_tables: dict[tuple, Table] = {}
_held: dict[int, Table] = {}  # of captured graphs, which read them for as long as the process lives
_lock = threading.Lock()
_spare: list[Tensor] = []


def folded(t: Tensor, out: Tensor | None) -> list[tuple[int, int, int]]:
    """The fewest (size, stride, stride of the result) that reach every element, outermost first, in the order of memory."""
    other = t if out is None else out
    if t.is_contiguous() and other.is_contiguous():
        return [(t.numel(), 1, 1)]
    merged: list[tuple[int, int, int]] = []
    for size, step, there in sorted(zip(t.shape, t.stride(), other.stride()), key=lambda d: (-d[2], -d[1])):
        if merged and merged[-1][1:] == (size * step, size * there):
            merged[-1] = merged[-1][0] * size, step, there
        elif size != 1:
            merged.append((size, step, there))
    return merged or [(1, 1, 1)]


def foldable(t: Tensor, out: Tensor | None = None) -> bool:
    """Whether a table can hold it as it is: as at most rows by columns."""
    return (t.is_contiguous() and (out is None or out.is_contiguous())) or len(folded(t, out)) <= 2


def table_of(tensors: Sequence[Tensor], outs: Sequence[Tensor] | None = None) -> Table:
    """The table of `tensors` (and of results of the same shapes), all `foldable` and at least one of them not empty."""
    device = tensors[0].device
    parts: list = [device, outs is None]
    for t in tensors if outs is None or outs is tensors else [*tensors, *outs]:
        # One flat tuple: thousands of small ones, kept, would be walked by every collection of garbage
        parts += (t.data_ptr(), t.dtype, t.numel() if t.is_contiguous() else (*t.shape, *t.stride()))
    key = tuple(parts)
    with _lock:
        found = _tables.pop(key, None)
        if found is not None:
            _tables[key] = found  # the last is the one used last
    if found is None:
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with no_modes():  # a recorder is to see that the table is used, not how it is made
            found = _made(tensors, outs, device, capturing)
        with _lock:
            if capturing:
                _held[id(found)] = found  # and not for eager calls: the graph fills it, when it runs
                return found
            _tables[key] = found
            while len(_tables) > MOST:
                del _tables[next(iter(_tables))]
    else:
        found.use()
    recorder = Recorder.active()
    if recorder is not None:
        recorder.adopt(found.words, found.use)
    return found


def span_of(size: int, device: torch.device) -> int:
    """Bytes of a chunk for tensors of `size` bytes in all: enough chunks for every processor, then long ones."""
    wanted = size // (CHUNKS * Target.at(device).sms)
    return min(max(power_of_two(wanted + 1) // 2, TILE), LARGEST)


def _made(tensors: Sequence[Tensor], outs: Sequence[Tensor] | None, device: torch.device, capturing: bool) -> Table:
    span = span_of(sum(t.numel() * t.element_size() for t in tensors), device)
    rows: list[list[int]] = []
    counts: list[int] = []
    first = 0
    for t, out in zip(tensors, outs or (None,) * len(tensors)):
        count = t.numel()
        if count == 0:
            continue
        (height, *outer), (columns, *inner) = [(1, 0, 0), *folded(t, out)][-2:]
        address, there = t.data_ptr(), 0 if out is None else out.data_ptr()
        dense = height == 1 and inner == [1, 1]
        kind = DTYPES[t.dtype] + DENSE * dense + ALIGNED * (dense and not (address | there) & 15)
        rows.append([address, count, kind, first, columns, outer[0], inner[0], there, outer[1], inner[1]])
        counts.append(cdiv(count * t.element_size(), span))
        first += counts[-1]
    owner = torch.repeat_interleave(torch.arange(len(rows)), torch.tensor(counts))
    words = torch.cat([torch.tensor(rows, dtype=torch.int64).reshape(-1), owner])
    if device.type != "cuda":
        return Table(words.to(device), len(rows), first, span)
    pinned = _spare_words(words) if capturing else words.pin_memory()
    there = torch.empty(words.shape, dtype=torch.int64, device=device).copy_(pinned, non_blocking=True)
    if capturing:
        return Table(there, len(rows), first, span)
    if not _spare:
        _spare.append(torch.empty(SPARE, dtype=torch.int64, pin_memory=True))
    stream = torch.cuda.current_stream(device)
    return Table(there, len(rows), first, span, stream.cuda_stream, stream.record_event())


def _spare_words(words: Tensor) -> Tensor:
    """`words` in pinned memory that stays as it is: a captured copy reads it at every replay, and none may be allocated now."""
    with _lock:
        if not _spare or _spare[0].numel() < words.numel():
            raise RuntimeError(
                "the table of these tensors cannot be made during CUDA graph capture: make the call once, with the same"
                " tensors, before capturing"
            )
        taken, _spare[0] = _spare[0][: words.numel()], _spare[0][words.numel() :]
    return taken.copy_(words)
