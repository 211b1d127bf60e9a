"""Which keys a query sees, and how far it is from them.

A query and a key have an index within their sequences. Of n queries and m keys, query i stands at position i + m - n, and sees key
j of the same sequence if position - left <= j <= position + right and j is one of those that there are.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Seen(NamedTuple):
    visible: Tensor  # bool [batch, length, keys]
    apart: Tensor  # |position - j|, int64 [batch, length, keys]
    wrong: Tensor  # bool [batch, length]: more keys were asked for than there is room for


def seen(
    q: Tensor,
    k: Tensor,
    causal: bool,
    left: int | None,
    right: int | None,
    kv_len: Tensor | None,
    cu_seqlens_q: Tensor | None,
    cu_seqlens_k: Tensor | None,
) -> Seen:
    """For a call's arguments: what each query sees."""
    batch, length, keys = q.shape[0], q.shape[1], k.shape[1]
    whose_q, index_q, count_q = sequences(length, cu_seqlens_q, q.device)
    whose_k, index_k, _ = sequences(keys, cu_seqlens_k, q.device)
    counts = keys_of_sequences(keys, cu_seqlens_k, q.device)  # how many there is room for
    room = counts[whose_q].expand(batch, length)
    given = room
    by_row = kv_len is not None and kv_len.dim() == 2
    if kv_len is not None:
        many = kv_len.clamp(min=0).long()
        if by_row:
            given = many
        elif cu_seqlens_q is not None:  # sequences in between marks; before the first and after the last there are none
            given = torch.nn.functional.pad(many, (1, 1))[whose_q].expand(batch, length)
        else:
            given = many[:, None].expand(batch, length)
    wrong = given > room
    limit = given.masked_fill(wrong, 0)
    position = index_q + (room if by_row else given) - count_q
    j = index_k.expand(batch, 1, keys)
    visible = (whose_q[:, None] == whose_k[None, :]) & (j < limit[..., None])
    right = 0 if causal else right
    if left is not None:
        visible = visible & (j >= position[..., None] - left)
    if right is not None:
        visible = visible & (j <= position[..., None] + right)
    return Seen(visible, (position[..., None] - j).abs(), wrong)


def keys_there(
    q: Tensor, k: Tensor, kv_len: Tensor | None, cu_seqlens_q: Tensor | None, cu_seqlens_k: Tensor | None
) -> Tensor | None:
    """Which keys there are by a call's lengths and marks, bool [batch, keys]: those that some query would see if it saw all of its
    sequence. None if all are."""
    if kv_len is None and cu_seqlens_k is None:
        return None
    batch, keys = k.shape[:2]
    whose, index, _ = sequences(keys, cu_seqlens_k, k.device)
    limit = keys_of_sequences(keys, cu_seqlens_k, k.device).expand(batch, -1)
    if kv_len is not None:
        many = kv_len.clamp(min=0).long()
        if kv_len.dim() == 2:  # the most of a sequence's rows
            rows = sequences(q.shape[1], cu_seqlens_q, k.device)[0].expand(batch, -1)
            many = torch.zeros_like(limit).scatter_reduce(1, rows, many, "amax")
        else:
            many = many[:, None] if cu_seqlens_q is None else torch.nn.functional.pad(many, (1, 1))[None]
        limit = torch.minimum(limit, many)
    return index < limit[:, whose]


def marks_of(count: int, marks: Tensor | None, device: torch.device) -> Tensor:
    """Where sequences begin, and where the last ends: within [0, count], never falling. Packed tokens before the first mark and
    after the last are sequences too, so that every token is in one."""
    first, last = (torch.full((1,), n, dtype=torch.int64, device=device) for n in (0, count))
    inner = [] if marks is None else [marks.long().clamp(0, count).cummax(0).values]
    return torch.cat([first, *inner, last])


def sequences(count: int, marks: Tensor | None, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """(which sequence each token is in, its index there, how many that sequence has), each [count]."""
    begins = marks_of(count, marks, device)
    token = torch.arange(count, device=device)
    whose = torch.searchsorted(begins[1:], token, right=True)
    return whose, token - begins[whose], (begins[1:] - begins[:-1])[whose]


def keys_of_sequences(count: int, marks: Tensor | None, device: torch.device) -> Tensor:
    """How many keys each sequence has: none before the first mark, and after the last."""
    begins = marks_of(count, marks, device)
    counts = begins[1:] - begins[:-1]
    if marks is not None:
        counts = torch.cat([torch.zeros_like(counts[:1]), counts[1:-1], torch.zeros_like(counts[:1])])
    return counts


def room(length: int, keys: int, by_row: bool, marks_q: Tensor, marks_k: Tensor) -> Tensor:
    """The most that `kv_len` may be: for each packed sequence, or for each row."""
    counts = keys_of_sequences(keys, marks_k, marks_k.device).int()
    return counts[sequences(length, marks_q, marks_q.device)[0]] if by_row else counts[1:-1]
