"""The engine `attention`: aten's flash attention, forward, by `tw.attention_lse`.

The backward stays aten's, and reads what is made here: o, which lies as q does, and the natural logarithms of the sums of what
enters each softmax, +inf for a row that sees nothing. Without dropout nothing is drawn: the two tensors that would say where the
generator stood are memory that nobody writes, as aten's are then.
"""

from __future__ import annotations

import contextlib
import math
from typing import Any

import torch
from torch import Tensor

from ..attention.attention import attention_lse
from ..op import force
from . import plans
from .row import Declined, taken

TAKEN = (torch.bfloat16, torch.float16)
WIDEST = 256  # columns of a head, of aten's kernels


def flash_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cum_seq_q: Tensor | None,
    cum_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    dropout_p: float,
    is_causal: bool,
    return_debug_mask: bool,
    *,
    scale: float | None = None,
    window_size_left: int | None = None,
    window_size_right: int | None = None,
    **others: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Of q [batch, length, heads, width], k and v; or of packed sequences, without the first dimension and between marks."""
    if dropout_p or return_debug_mask:
        raise Declined("dropout, or a mask to debug with")
    if any(other is not None for other in others.values()):
        raise Declined("lengths, slopes, pages or splits")
    if torch.version.hip:
        raise Declined("a generator's state as AMD's kernels have it")
    packed = cum_seq_q is not None
    fits(query, key, value, cum_seq_q, cum_seq_k)
    plans.only_now()
    # Flash counts windows from the last key too, and takes less than 0 for no end
    left, right = (None if size is None or size < 0 else size for size in (window_size_left, window_size_right))
    o = torch.empty_like(query)
    rows = (query.shape[1], query.shape[0]) if packed else (query.shape[0], query.shape[2], query.shape[1])
    lse = torch.empty(rows, dtype=torch.float32, device=query.device)
    given = [t[None] if packed else t for t in (query, key, value, o, lse)]
    # For the interpreter's tensors, which are a CPU's, an op has its reference
    with torch.no_grad(), contextlib.nullcontext() if query.is_cuda else force("triton"):
        attention_lse.function(
            *given[:3], scale=scale, causal=is_causal, left=left, right=None if is_causal else right, cu_seqlens_q=cum_seq_q,
            cu_seqlens_k=cum_seq_k, out=tuple(given[3:]),
        )  # fmt: skip
    if packed or query.shape[1] > key.shape[1]:
        mark_empty(lse)
    state = [torch.empty(shape, dtype=torch.uint64, device=query.device) for shape in ((2,), ())]
    return o, lse, *state, query.new_empty(0)


def mark_empty(lse: Tensor) -> None:
    """Give rows that see nothing flash attention's mark in the place of ours, with which its backward would make NaN of them."""
    lse.masked_fill_(lse == -math.inf, math.inf)


def fits(query: Tensor, key: Tensor, value: Tensor, *marks: Tensor | None) -> None:
    """Leave to aten what its kernels refuse, and empty operands."""
    there = [t for t in marks if t is not None]
    taken(query, key, value, *there)
    if query.dtype not in TAKEN or key.dtype != query.dtype or value.dtype != query.dtype:
        raise Declined("other dtypes than 16 bits, or several")
    rank = 3 if there else 4
    if any(t.dim() != rank for t in (query, key, value)) or len(there) not in (0, 2) or key.shape != value.shape:
        raise Declined("no queries, keys and values that fit")
    heads, width = query.shape[-2:]
    if not query.numel() or not key.numel():
        raise Declined("no elements")
    if key.shape[-1] != width or (rank == 4 and key.shape[0] != query.shape[0]) or heads % key.shape[-2]:
        raise Declined("no queries, keys and values that fit")
    if width % 8 or width > WIDEST or any(t.stride(-1) != 1 for t in (query, key, value)):
        raise Declined("widths or strides that aten's kernels do not take")
    if any(t.dtype != torch.int32 or t.dim() != 1 or not t.is_contiguous() for t in there) or (
        there and there[0].shape != there[1].shape
    ):
        raise Declined("marks that are no int32, or not one for one")


FORMS = {"_flash_attention_forward": flash_attention_forward}
