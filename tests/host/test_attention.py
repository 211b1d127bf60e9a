"""What attention is, in float64: identities between calls, torch's own function, ring attention of two ranks, and refusals."""

from __future__ import annotations

import importlib
import sys
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

import tilewright as tw

BATCH, LENGTH, KEYS, HEADS, KV_HEADS, WIDTH, VALUES = 2, 5, 7, 4, 2, 8, 6


def numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def given(batch: int = BATCH, length: int = LENGTH, keys: int = KEYS, values: int = VALUES) -> tuple[Tensor, ...]:
    shapes = (length, HEADS, WIDTH), (keys, KV_HEADS, WIDTH), (keys, KV_HEADS, values)
    return tuple(numbers(batch, *shape, seed=i).requires_grad_() for i, shape in enumerate(shapes))


def gradients(results: Any, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    results = results if isinstance(results, tuple) else (results,)
    return torch.autograd.grad(results, inputs, [numbers(*r.shape, seed=9) for r in results])


def same(found: Any, wanted: Any) -> None:
    torch.testing.assert_close(found, wanted, rtol=1e-11, atol=1e-11)


MASKS = {
    "all": {},
    "causal": {"causal": True},
    "window": {"left": 2, "right": 1},
    "capped": {"softcap": 1.5, "scale": 0.7, "causal": True, "left": 3},
    "lengths": {"kv_len": torch.tensor([4, 0])},
    "rows": {"kv_len": torch.tensor([[4, 0, 7, 1, 2]] * BATCH), "slopes": numbers(HEADS).abs(), "causal": True},
}
masks = pytest.mark.parametrize("options", MASKS.values(), ids=list(MASKS))


@masks
def test_shared_heads_are_repeated_heads(options):
    q, k, v = given()
    repeated = (q, *(t.repeat_interleave(HEADS // KV_HEADS, 2) for t in (k, v)))
    shared, whole = (tw.attention_lse(*tensors, **options) for tensors in ((q, k, v), repeated))
    same(shared, whole)
    rows = (0,) if "kv_len" in options and options["kv_len"].dim() == 1 else (0, 1)  # that lse is finite in
    found, wanted = (gradients(tuple(t[list(rows)] for t in made), (q, k, v)) for made in (shared, whole))
    same(found, wanted)


@pytest.mark.parametrize("cut", range(KEYS + 1))
def test_merged_parts_are_the_whole(cut):
    q, k, v = given()
    # Positions are those of a call's own keys, so that a mask says what parts see
    mask = torch.arange(KEYS) <= torch.arange(LENGTH)[:, None] + 2
    mask[1] = False
    mask[2, :3] = False
    whole = tw.attention_lse(q, k, v, mask=mask.expand(1, 1, -1, -1))
    halves = [
        tw.attention_lse(q, k[:, i:j], v[:, i:j], mask=mask[:, i:j].expand(1, 1, -1, -1))
        for i, j in ((0, cut), (cut, KEYS))
    ]
    merged = tw.attention_merge(*(torch.stack(parts) for parts in zip(*halves)))
    same(merged, whole)
    assert bool((merged[0][:, 1] == 0).all()) and bool((merged[1][:, :, 1] == -torch.inf).all())
    same(gradients(merged, (q, k, v)), gradients(whole, (q, k, v)))


def test_the_order_of_parts_does_not_matter():
    o, lse = numbers(3, BATCH, LENGTH, HEADS, VALUES), 3 * numbers(3, BATCH, HEADS, LENGTH)
    lse[1] = -torch.inf
    same(tw.attention_merge(o, lse), tw.attention_merge(o.flip(0), lse.flip(0)))
    same(tw.attention_merge(o, lse), tw.attention_merge(o[::2], lse[::2]))


def test_a_sink_is_one_more_key_of_value_0():
    q, k, v = given()
    sink = numbers(HEADS, seed=4).requires_grad_()
    more = [torch.cat([t, torch.zeros_like(t[:, :1])], 1) for t in (k, v)]
    score = torch.cat([torch.zeros(1, HEADS, 1, KEYS), sink.view(1, -1, 1, 1)], -1)
    found, wanted = tw.attention_lse(q, k, v, sink=sink), tw.attention_lse(q, *more, mask=score.detach())
    same(found, wanted)
    same(gradients(found, (q, k, v)), gradients(wanted, (q, k, v)))
    # A row that sees nothing has its sink for lse, which then has a gradient of its own
    _, lse = tw.attention_lse(q, k, v, sink=sink, kv_len=torch.zeros(BATCH, dtype=torch.int64))
    same(lse, sink.view(1, -1, 1).expand_as(lse))
    same(torch.autograd.grad(lse.sum(), sink)[0], torch.full_like(sink, BATCH * LENGTH))


def test_a_shift_of_all_scores_shifts_lse():
    q, k, v = given()
    shift = numbers(BATCH, HEADS, LENGTH, 1, seed=5)
    o, lse = tw.attention_lse(q, k, v)
    same(tw.attention_lse(q, k, v, mask=shift), (o, lse + shift.squeeze(-1)))


@pytest.mark.parametrize("options", [{}, {"causal": True}, {"left": 1, "right": 2, "softcap": 2.0}], ids=str)
@pytest.mark.parametrize("some", [False, True], ids=["whole", "kv_len"])
def test_packed_is_one_by_one(options, some):
    tensors = q, k, v = given(batch=1, length=11, keys=13)
    marks = torch.tensor([1, 4, 4, 9]), torch.tensor([0, 5, 8, 12])
    count = torch.tensor([3, 2, 4]) if some else None
    o, lse = tw.attention_lse(*tensors, cu_seqlens_q=marks[0], cu_seqlens_k=marks[1], kv_len=count, **options)
    assert not bool(o[:, [0, 9, 10]].any()) and bool((lse[:, :, [0, 9, 10]] == -torch.inf).all())
    apart = []
    for s in range(3):
        (i, j), (a, b) = (tuple(m[s : s + 2].tolist()) for m in marks)
        b = b if count is None else a + int(count[s])
        apart.append(tw.attention_lse(q[:, i:j], k[:, a:b], v[:, a:b], **options))
    wanted = torch.cat([one[0] for one in apart], 1), torch.cat([one[1] for one in apart], 2)
    found = o[:, 1:9], lse[:, :, 1:9]
    same(found, wanted)
    same(gradients(found[0], tensors), gradients(wanted[0], tensors))


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"causal": True}, {"is_causal": True}),
        ({"scale": 0.3}, {"scale": 0.3}),
    ],
    ids=str,
)
def test_torch_s_function_agrees(ours, theirs):
    tensors = given(length=KEYS)
    turned = [t.transpose(1, 2) for t in tensors]
    found = tw.attention(*tensors, **ours)
    wanted = scaled_dot_product_attention(*turned, enable_gqa=True, **theirs).transpose(1, 2)
    same(found, wanted)
    same(gradients(found, tensors), gradients(wanted, tensors))


@pytest.mark.parametrize("kind", ["seen", "added"])
def test_torch_s_function_agrees_on_masks(kind):
    tensors = given()
    mask = numbers(BATCH, 1, LENGTH, KEYS, seed=6)
    mask = mask > -0.5 if kind == "seen" else mask
    turned = [t.transpose(1, 2) for t in tensors]
    wanted = scaled_dot_product_attention(*turned, attn_mask=mask, enable_gqa=True).transpose(1, 2)
    same(tw.attention(*tensors, mask=mask), wanted)


@masks
def test_gradients_through_both_results(options):
    q, k, v = given(length=LENGTH, values=2)
    sink = numbers(HEADS, seed=4).requires_grad_()

    def call(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return tw.attention_lse(*tensors[:3], sink=tensors[3], **options)

    assert torch.autograd.gradcheck(call, (q, k, v, sink), fast_mode=True)


def test_merging_has_gradients_through_both_results():
    o, lse = numbers(3, 1, 2, 2, 3).requires_grad_(), numbers(3, 1, 2, 2, seed=1)
    lse[1, :, 1] = -torch.inf
    assert torch.autograd.gradcheck(tw.attention_merge, (o, lse.requires_grad_()), fast_mode=True)


def test_compiled_in_one_graph():
    tensors = tuple(t.detach().float().requires_grad_() for t in given())
    sink = numbers(HEADS, seed=4).float().requires_grad_()

    def step(q: Tensor, k: Tensor, v: Tensor, sink: Tensor) -> Tensor:
        o, lse = tw.attention_lse(q, k, v, sink=sink, causal=True, left=3)
        return tw.attention(q, k, v).square().sum() + (o * lse.transpose(1, 2).unsqueeze(-1)).sum()

    made = []
    for call in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        loss = call(*tensors, sink)
        made.append((loss.detach(), *torch.autograd.grad(loss, (*tensors, sink))))
    torch.testing.assert_close(*made)


# ---------------------------------------------------------------- ring attention


class Turn(torch.autograd.Function):
    """What the rank before has; its gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, t: Tensor) -> Tensor:
        return passed(t, 1)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return passed(g, -1)


def passed(t: Tensor, by: int) -> Tensor:
    rank, ranks, got = dist.get_rank(), dist.get_world_size(), torch.empty_like(t)
    for work in [dist.isend(t.contiguous(), (rank + by) % ranks), dist.irecv(got, (rank - by) % ranks)]:
        work.wait()
    return got


def ring(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention over the keys of all ranks, each of which has as many of them as of queries."""
    rank, ranks, kv = dist.get_rank(), dist.get_world_size(), torch.cat([k, v], -1)
    parts = []
    for step in range(ranks):
        k, v = kv.split([k.shape[-1], v.shape[-1]], -1)
        hidden = torch.full((q.shape[0],), k.shape[1] if step <= rank else 0)  # keys of later ranks are not seen
        parts.append(tw.attention_lse(q, k, v, causal=step == 0, kv_len=hidden))
        kv = Turn.apply(kv)
    return tw.attention_merge(*(torch.stack(some) for some in zip(*parts)))


def on_two_ranks(rank: int, file: str) -> None:
    torch.set_num_threads(1)
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=limit)
    try:
        tensors = given(length=6, keys=6)
        wanted = tw.attention_lse(*tensors, causal=True)
        own = [t.detach().chunk(2, 1)[rank].requires_grad_() for t in tensors]
        made = ring(*own)
        o, lse = (t.chunk(2, dim)[rank] for t, dim in zip(wanted, (1, 2)))
        same(made, (o, lse))
        upstream = [numbers(*t.shape, seed=9) for t in wanted]
        grads = torch.autograd.grad(made, own, [g.chunk(2, dim)[rank] for g, dim in zip(upstream, (1, 2))])
        whole = torch.autograd.grad(wanted, tensors, upstream)
        same(grads, tuple(g.chunk(2, 1)[rank] for g in whole))
    finally:
        dist.destroy_process_group()


def test_ring_attention_of_two_ranks(tmp_path):
    mp.get_context("forkserver").set_forkserver_preload([tw.__name__, "tilewright.attention.merge"])
    mp.start_processes(on_two_ranks, (str(tmp_path / "meeting"),), nprocs=2, start_method="forkserver")


# ---------------------------------------------------------------- refusals and names


REFUSED = {
    "heads": ({"k": numbers(BATCH, KEYS, 3, WIDTH), "v": numbers(BATCH, KEYS, 3, VALUES)}, "the 3 of k do not divide"),
    "widths": ({"k": numbers(BATCH, KEYS, KV_HEADS, WIDTH + 1)}, "k "),
    "wide": ({"v": numbers(BATCH, KEYS, KV_HEADS, 577)}, "v must have 1 to 576 columns, got 577"),
    "dtypes": ({"k": numbers(BATCH, KEYS, KV_HEADS, WIDTH).float()}, "k must be"),
    "left": ({"left": -1}, "left must be"),
    "right": ({"right": -1}, "right must be"),
    "causal": ({"causal": True, "right": 2}, "causal means right=0, got right=2"),
    "softcap": ({"softcap": -1.0}, "softcap must be"),
    "sink": ({"sink": numbers(3)}, "sink "),
    "mask": ({"mask": numbers(1, 1, LENGTH, KEYS + 1)}, "mask "),
    "kv_len": ({"kv_len": torch.zeros(3, dtype=torch.int64)}, r"kv_len must be \[batch\] = \[2\] or \[batch, length\] = \[2, 5\]"),
    "one mark": ({"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)}, "are given together or not at all"),
    "marks": (
        {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32), "cu_seqlens_k": torch.zeros(3, dtype=torch.int32)}, "cu_seqlens_k",
    ),
    "batch": (
        {n: torch.zeros(2, dtype=torch.int32) for n in ("cu_seqlens_q", "cu_seqlens_k")},
        "packed sequences lie in a batch of 1, got q with a batch of 2",
    ),
}  # fmt: skip


@pytest.mark.parametrize("op", ["attention", "attention_lse"])
@pytest.mark.parametrize(("options", "words"), REFUSED.values(), ids=list(REFUSED))
def test_refused_in_one_line(op, options, words):
    tensors = dict(zip("qkv", (t.detach() for t in given())))
    with pytest.raises((ValueError, TypeError), match=words) as error:
        getattr(tw, op)(**{**tensors, **options})
    assert str(error.value).startswith(f"{op}: ") and "\n" not in str(error.value)


def test_the_folder_does_not_take_the_op_s_name():
    merge = importlib.import_module("tilewright.attention.merge")
    from tilewright import attention

    quantised = importlib.import_module("tilewright.attention.quantised")
    assert callable(attention) and attention is tw.attention is quantised.attention
    assert merge.attention_merge.function is tw.attention_merge
    folder = sys.modules["tilewright.attention"]
    assert folder.__path__ and importlib.import_module("tilewright.attention") is folder
