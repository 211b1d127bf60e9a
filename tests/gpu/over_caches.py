"""What tests of attention over caches ask of each kernel for Hopper."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

import tilewright as tw
from tests.cached_oracle import agrees
from tests.gpu.test_attention import bits, near, on_gpu

Call = dict[str, Any]
Results = tuple[Tensor, Tensor]


def attend(a: Call, backend: str) -> Results:
    return tw.cached_attention(**a, backend=backend)


def same(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> None:
    """Bit for bit, NaN too."""
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(bits(a.contiguous()), bits(b.contiguous()))


def holds(a: Call, backend: str) -> None:
    """By a kernel for Hopper: held to float64 and to the portable one."""
    given = on_gpu(a)
    o, lse = attend(given, backend)
    agrees(given, o, lse)
    other_o, other_lse = attend(given, "portable")
    near(o, other_o)
    assert torch.equal(lse.isnan(), other_lse.isnan())


def replays(calls: Sequence[Call], run: Callable[[Call], Results]) -> None:
    """One graph gives bit for bit what each of several calls of a kind gives by itself."""
    a = {name: t.clone() if torch.is_tensor(t) else t for name, t in calls[0].items()}
    eager = [run(one) for one in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run(a)
    for one, wanted in [*zip(calls, eager)] * 2:
        for name, t in one.items():
            if torch.is_tensor(t):
                a[name].copy_(t)
        for t in made:
            t.fill_(math.inf)
        graph.replay()
        same(made, wanted)


def alone_as_in_a_batch(a: Call, lengths: Sequence[int], nowhere: int, run: Callable[[Call], Results]) -> None:
    """Each sequence, in pages of 64, with a table no wider than it needs and with one that has room for far more."""
    whole = run(a)
    for b, length in enumerate(lengths):
        own = {name: a[name][b : b + 1] for name in ("q", "block_table", "kv_len")}
        table = own["block_table"]
        for width in (max(1, -(-length // 64)), table.shape[1], 512):
            room = torch.full((1, width), nowhere, dtype=torch.int32, device="cuda")
            both = min(width, table.shape[1])
            room[:, :both] = table[:, :both]
            same(run({**a, **own, "block_table": room}), (t[b : b + 1] for t in whole))


def go_where_they_are_told(a: Call, backend: str) -> None:
    """Results, to memory of other strides; what lies between its rows is left alone."""
    wanted = attend(a, backend)
    batch, length, heads, columns = wanted[0].shape
    room = torch.full((batch, length, heads, columns + 128), 7.0, dtype=torch.bfloat16, device="cuda")
    turned = torch.empty(batch, columns, heads, length, dtype=torch.bfloat16, device="cuda").permute(0, 3, 2, 1)
    for o in (room[..., :columns], turned):
        out = (o, torch.empty_like(wanted[1]))
        tw.cached_attention(**a, backend=backend, out=out)
        same(out, wanted)
    assert (room[..., columns:] == 7.0).all()


def in_the_last_of(pages: int, a: Call, run: Callable[[Call], Results]) -> None:
    """A call whose caches are the last of so many pages."""
    small = {n: a[n] for n in ("k_cache", "v_cache")}
    far = {n: torch.empty(pages, *t.shape[1:], dtype=t.dtype, device="cuda") for n, t in small.items()}
    first = pages - small["k_cache"].shape[0]
    for n, t in small.items():
        far[n][first:] = t.cuda()
    table = torch.where(a["block_table"] >= 0, a["block_table"] + first, a["block_table"])
    o, lse = run({**on_gpu(a), **far, "block_table": table.cuda()})
    agrees(a, o.cpu(), lse.cpu())


def laid_in_pages(a: Call, page: int) -> Call:
    """The same keys, of caches without a table and a whole number of pages a sequence, in pages that lie in any order."""
    sequences, room = a["k_cache"].shape[:2]
    order = torch.randperm(sequences * room // page, generator=torch.Generator().manual_seed(page))
    spread = {}
    for n in ("k_cache", "v_cache"):
        spread[n] = torch.empty_like(a[n]).reshape(-1, page, *a[n].shape[2:])
        spread[n][order] = a[n].reshape(spread[n].shape)
    return {**a, **spread, "block_table": order.reshape(sequences, -1).int()}
