"""Where tensors lie in memory: which bytes they span, and whether two of them, or one with itself, share any."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor


def layout(tensor: Tensor) -> tuple:
    """Sizes, and the strides of dimensions that have more than one element."""
    return tensor.shape, [stride for size, stride in zip(tensor.shape, tensor.stride()) if size > 1]


def span(t: Tensor) -> tuple[int, int]:
    """The bytes from a tensor's first element to its last."""
    if t.is_contiguous():
        return t.data_ptr(), t.data_ptr() + t.nbytes
    last = sum((n - 1) * s for n, s in zip(t.shape, t.stride()))
    return t.data_ptr(), t.data_ptr() + (last + 1) * t.element_size()


def overlapping(a: Tensor, b: Tensor) -> bool:
    """Whether the bytes spanned by two dense tensors can meet (spans, so a false alarm is possible, a miss is not)."""
    if a.numel() == 0 or b.numel() == 0 or a.is_meta or b.is_meta:
        return False
    (a0, a1), (b0, b1) = span(a), span(b)
    return a0 < b1 and b0 < a1


def interleaved(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are fields of the same records: both repeat at some distance, and within it lie apart."""
    for record in {s * a.element_size() for n, s in zip(a.shape, a.stride()) if n > 1 and s}:
        extents = []
        for t in (a, b):
            steps = [(n - 1, s * t.element_size()) for n, s in zip(t.shape, t.stride()) if n > 1]
            if any(step > record and step % record for _, step in steps):
                break
            extents.append(t.element_size() + sum(n * step for n, step in steps if step < record))
        else:
            apart = (b.data_ptr() - a.data_ptr()) % record
            if extents[0] <= apart and apart + extents[1] <= record:
                return True
    return False


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are one: the same elements at the same addresses."""
    return a is b or (a.data_ptr(), a.shape, a.stride(), a.dtype) == (b.data_ptr(), b.shape, b.stride(), b.dtype)


def same_storage(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors see one allocation."""
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def clashing(written: Sequence[Tensor], read: Sequence[Tensor]) -> bool:
    """Whether the span of a written tensor meets that of a read one, or of another written one where neither has gaps (the
    columns of one matrix, written one by one, have spans that meet and no element in common)."""
    writes = [(*span(t), t.is_contiguous()) for t in written if t.numel()]
    dense, reads = sorted(w for w in writes if w[2]), sorted(span(t) for t in read if t.numel())
    if any(a[1] > b[0] for a, b in zip(dense, dense[1:])):
        return True
    gaps = sorted(w[:2] for w in writes if not w[2])
    if any(a[0] == b[0] for a, b in zip(gaps, gaps[1:])):
        return True
    spans = sorted([(start, end, True) for start, end, _ in writes] + [(start, end, False) for start, end in reads])
    reach = {True: 0, False: 0}  # how far written and read spans that began before have come
    for start, end, writing in spans:
        if start < reach[not writing]:
            return True
        reach[writing] = max(reach[writing], end)
    return False


def self_overlapping(t: Tensor) -> bool:
    """Whether two elements of a tensor can share memory (an expanded output, say)."""
    reach = 0
    for stride, size in sorted((s, n) for n, s in zip(t.shape, t.stride()) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
