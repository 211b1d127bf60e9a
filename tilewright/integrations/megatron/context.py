"""Attention of ranks that share sequences (context parallelism), by two ways of `cp_comm_type`.

Each sequence is cut into 2 * ranks chunks, of which rank r has chunks r and 2 * ranks - 1 - r: an early one, which sees few keys,
and a late one, which sees many.

- `p2p`, the default: keys and values go round the ranks. Each rank attends to those that it has while the next are on their way,
  and merges what it found by `attention_merge`. Causal queries see of an earlier rank's keys the early chunk alone, and of a later
  rank's both, but with the late chunk alone: a half of the work, the same for all.
- `all_gather`: keys and values of all ranks are gathered, and each of the two chunks of queries sees those before its own end.
  Windows take this way whatever was asked for, since they see few chunks.

In the backward the gradients of keys and values go back the way that they came, and are summed where they belong.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ...attention.attention import attention, attention_lse
from ...attention.merge import attention_merge

WAYS = ("p2p", "all_gather")

# ---------------------------------------------------------------- by parts


def by_parts(
    q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool, marks: Tensor | None, scale: float, sink: Tensor | None
) -> Tensor:
    """Attention of the queries of this rank to the keys of all, rank by rank; `marks` are those of whole packed sequences."""
    ranks, rank = group.size(), group.rank()
    if marks is None:
        half = q.shape[1] // 2
        early, late, whole, chunk = slice(half), slice(half, None), None, None
    else:
        early, late = chunks_of(marks, q.shape[1], ranks)[1]
        whole, chunk = marks // ranks, marks // (2 * ranks)
    parts = []
    for step in range(ranks):
        owner = (rank - step) % ranks
        k_next, v_next, coming = passed_on(k, v, group) if step + 1 < ranks else (None, None, [])
        if step == 0 or not causal:
            # A sink counts once
            given = {"causal": causal, "sink": sink if step == 0 else None}
            parts.append(attention_lse.function(q, k, v, scale=scale, **given, **between(whole, whole)))
        elif owner < rank:
            parts.append(attention_lse.function(q, k[:, early], v[:, early], scale=scale, **between(whole, chunk)))
        else:
            o, lse = attention_lse.function(q[:, late], k, v, scale=scale, **between(chunk, whole))
            parts.append(with_rows(o, lse, q.shape[1], late))
        for work in coming:
            work.wait()
        k, v = k_next, v_next
    o, lse = (torch.stack(some) for some in zip(*parts))
    return attention_merge.function(o, lse)[0]


def between(queries: Tensor | None, keys: Tensor | None) -> dict[str, Tensor]:
    """Marks of packed sequences as arguments, if there are."""
    return {} if queries is None else {"cu_seqlens_q": queries, "cu_seqlens_k": keys}


def with_rows(o: Tensor, lse: Tensor, length: int, at: slice | Tensor) -> tuple[Tensor, Tensor]:
    """What queries `at` these places found, beside the others, which saw nothing."""
    every = o.new_zeros(o.shape[0], length, *o.shape[2:])
    every[:, at] = o
    sums = lse.new_full((*lse.shape[:2], length), -torch.inf)
    sums[:, :, at] = lse
    return every, sums


class PassedOn(torch.autograd.Function):
    """What the rank before has, while the rank after gets what this one has; gradients go back. The forward does not wait: the
    transfers are added to `coming`."""

    @staticmethod
    def forward(ctx: Any, group: Any, coming: list, *sent: Tensor) -> tuple[Tensor, ...]:
        ctx.group = group
        received, works = exchanged(group, 1, sent)
        coming += works
        return received

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        received, works = exchanged(ctx.group, -1, grads)
        for work in works:
            work.wait()
        return None, None, *received


def exchanged(group: Any, step: int, sent: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], list]:
    """(tensors of the rank `step` before this one, the transfers under way of those and of what is `sent` as far ahead)."""
    ranks, rank = group.size(), group.rank()
    after, before = (dist.get_global_rank(group, (rank + by) % ranks) for by in (step, -step))
    sent = tuple(t.contiguous() for t in sent)
    received = tuple(torch.empty_like(t) for t in sent)
    both = [dist.P2POp(dist.isend, t, after, group, tag) for tag, t in enumerate(sent)]
    both += [dist.P2POp(dist.irecv, t, before, group, tag) for tag, t in enumerate(received)]
    return received, dist.batch_isend_irecv(both)


def passed_on(k: Tensor, v: Tensor, group: Any) -> tuple[Tensor, Tensor, list]:
    coming: list = []
    return *PassedOn.apply(group, coming, k, v), coming


# ---------------------------------------------------------------- gathered


def gathered_first(
    q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool, marks: Tensor | None, **given: Any
) -> Tensor:
    """The same, with the keys and values of all ranks gathered; `given` goes to `attention`."""
    ranks, rank = group.size(), group.rank()
    k, v = (Gathered.apply(t, group) for t in (k, v))  # [ranks, batch, length, heads, head_dim]
    ends = rank + 1, 2 * ranks - rank  # in chunks, of what the early and the late chunk of queries see
    if marks is not None:
        return _packed(q, k, v, marks, ends, given)
    k, v = (in_order(t) for t in (k, v))
    if not causal:
        return attention.function(q, k, v, **given)
    size = q.shape[1] // 2
    made = [
        attention.function(queries, k[:, : end * size], v[:, : end * size], causal=True, **given)
        for queries, end in zip(q.split(size, 1), ends, strict=True)
    ]
    return torch.cat(made, 1)


def _packed(q: Tensor, k: Tensor, v: Tensor, marks: Tensor, ends: tuple[int, int], given: dict[str, Any]) -> Tensor:
    """Each sequence is cut into chunks by itself."""
    ranks, tokens = k.shape[0], q.shape[1]
    source, halves = chunks_of(marks, tokens, ranks)
    k, v = (t.flatten(0, 2)[source].unsqueeze(0) for t in (k, v))
    o = None
    for own, end in zip(halves, ends, strict=True):
        made = attention.function(
            q[:, own], k, v, causal=True, **given, cu_seqlens_q=marks // (2 * ranks), cu_seqlens_k=marks,
            kv_len=marks.diff() // (2 * ranks) * end,
        )  # fmt: skip
        o = made.new_zeros(1, tokens, *made.shape[2:]) if o is None else o
        o = o.index_copy(1, own, made)
    return o


def in_order(t: Tensor) -> Tensor:
    """Chunks of all ranks [ranks, batch, 2 * size, ...] as they are in the sequence."""
    first, second = t.chunk(2, 2)
    return torch.cat([*first, *second.flip(0)], 1)


class Gathered(torch.autograd.Function):
    """What all ranks have, [ranks, ...]; the gradient is the sum of theirs for what this one has."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        ctx.group = group
        made = t.new_empty(group.size(), *t.shape)
        dist.all_gather_into_tensor(made, t.contiguous().unsqueeze(0), group=group)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        made = grad.new_empty(1, *grad.shape[1:])
        dist.reduce_scatter_tensor(made, grad.contiguous(), group=ctx.group)
        return made[0], None


# ---------------------------------------------------------------- packed sequences


def chunks_of(marks: Tensor, tokens: int, ranks: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(for each token of the whole batch its row in what `ranks` of `tokens` gathered, the rows of the early and of the late
    chunks of this rank's sequences), all made on the device."""
    marks = marks.long()

    def places(count: int, share: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens, where sequences have one `share`-th of their length: the sequence, the index there, the size of a chunk."""
        own = torch.arange(count, device=marks.device)
        ends = marks[1:] // share
        sequence = torch.searchsorted(ends, own, right=True).clamp(max=ends.shape[0] - 1)
        return sequence, own - marks[sequence] // share, marks.diff()[sequence] // (2 * ranks)

    sequence, index, size = places(ranks * tokens, 1)
    chunk = index // size.clamp(min=1)
    behind = chunk >= ranks
    owner = torch.where(behind, 2 * ranks - 1 - chunk, chunk).clamp(0, ranks - 1)
    source = owner * tokens + marks[sequence] // ranks + behind * size + index - chunk * size
    sequence, index, size = places(tokens // 2, 2 * ranks)
    early = marks[sequence] // ranks + index
    return source.clamp(0, ranks * tokens - 1), (early, early + size)
