"""What the MoE permutation promises beyond the properties of every op: the very map, whatever experts, blocks and bad indices."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.moe import moe_map


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def expected_map(pairs: list[list[int]], experts: int, align: int, capacity: int, width: int) -> tuple:
    """Row map, source, offsets and overflow by walking through experts and tokens; `pairs` are the experts of each token."""
    usable = capacity // align * align
    rows: list[list[int]] = [[] for _ in pairs]
    source, offsets, at, dropped = [-1] * capacity, [], 0, 0
    for e in range(experts):
        for t, mine in enumerate(pairs):
            if e in mine:
                if at < usable:
                    rows[t].append(at)
                    source[at] = t
                else:
                    dropped += 1
                at += 1
        at = -(-at // align) * align
        offsets.append(min(at, usable))
    return [r + [-1] * (width - len(r)) for r in rows], source, offsets, dropped


def same_map(found: tuple, wanted: tuple) -> None:
    for name, t, there in zip(("row_map", "source", "offsets", "overflow"), found, wanted):
        assert t.dtype == torch.int32 and t.tolist() == there, name


def indices(tokens: int, experts: int, slots: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.rand(tokens, experts, generator=source).topk(slots, 1).indices


@pytest.mark.parametrize(
    "tokens, experts, slots, align",
    [
        (70, 160, 8, 16),
        (33, 384, 6, 128),
        (5, 1024, 8, 16),
        (129, 3, 1, 1),
        (64, 7, 7, 5),
        (1, 256, 8, 16),
        (9, 40, 20, 4),
    ],
)
def test_map_from_indices_and_from_a_map(tokens, experts, slots, align):
    chosen = indices(tokens, experts, slots)
    flags = torch.zeros(tokens, experts, dtype=torch.bool).scatter(1, chosen, True)
    capacity = (tokens * slots + min(experts, tokens * slots) * (align - 1)) // align * align
    wanted = expected_map(chosen.tolist(), experts, align, capacity, slots)
    assert wanted[3] == 0
    same_map(tw.moe_row_map(chosen, experts=experts, align=align), wanted)
    same_map(tw.moe_row_map(flags, topk=slots, align=align), wanted)


@pytest.mark.parametrize("blocks", [1, 2])
def test_blocks_of_several_tiles(blocks, monkeypatch):
    """More than one tile of tokens in a program, and counts that no byte holds."""
    monkeypatch.setattr(moe_map, "BLOCKS", blocks)
    chosen = indices(300, 5, 4)
    wanted = expected_map(chosen.tolist(), 5, 8, 1232, 4)
    same_map(tw.moe_row_map(chosen, experts=5, align=8, capacity=1232), wanted)


@pytest.mark.parametrize("capacity", [1, 4, 20, 33, 61])
def test_what_does_not_fit_is_dropped_from_the_end(capacity):
    chosen = indices(13, 6, 3)
    wanted = expected_map(chosen.tolist(), 6, 4, capacity, 3)
    assert (wanted[3] > 0) == (capacity < 56)
    same_map(tw.moe_row_map(chosen, experts=6, align=4, capacity=capacity), wanted)
    x = torch.randn(13, 40)
    rows, probs, row_map, source, offsets, _ = tw.moe_permute(x, chosen, experts=6, align=4, capacity=capacity)
    end = int(offsets[-1])
    live = source[:end] >= 0
    assert torch.equal(rows[:end][live], x[source[:end][live]])
    assert not bool(rows[:end][~live].any()) and torch.equal(probs[:end], live.float())


def test_indices_that_are_none_or_twice():
    top = torch.iinfo(torch.int64)
    chosen = torch.tensor([[2, 2, 0], [-1, 3, 3], [top.min, top.max, 1 << 32], [4, 1, -7]])
    wanted = expected_map([[2, 0], [3], [], [1]], 4, 2, 12, 3)
    same_map(tw.moe_row_map(chosen, experts=4, align=2, capacity=12), wanted)
    probs = torch.arange(12.0).reshape(4, 3).requires_grad_()
    row_probs = tw.moe_permute(torch.ones(4, 8), chosen, probs, experts=4, align=2, capacity=12)[1]
    assert row_probs[:8].tolist() == [2.0, 0.0, 10.0, 0.0, 1.0, 0.0, 9.0, 0.0]
    (d,) = torch.autograd.grad(row_probs, probs, torch.arange(12.0) + 1)
    assert d.tolist() == [[5.0, 5.0, 1.0], [0.0, 7.0, 7.0], [0.0] * 3, [0.0, 3.0, 0.0]]
    counts = tw.moe_permute(torch.ones(4, 8), chosen, experts=4, align=2, capacity=12)[1]
    assert counts[:8].tolist() == [1.0, 0.0, 1.0, 0.0, 2.0, 0.0, 2.0, 0.0]


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("slots", [2, 5])
def test_repeated_experts_are_added(weighted, slots):
    """As if each slot were a token of its own. Some tiles of tokens have repeated experts, others none."""
    draw = torch.Generator().manual_seed(0)
    tokens, E, hidden, ffn = 140, 6, 16, 16
    chosen = torch.cat([indices(100, E, slots), torch.randint(-1, E, (tokens - 100, slots), generator=draw)])
    chosen[-1] = 3
    x, gate_up, down, probs = (
        torch.randn(*shape, generator=draw, dtype=torch.float64).mul(0.5).float().requires_grad_()
        for shape in ((tokens, hidden), (E, 2 * ffn, hidden), (E, hidden, ffn), (tokens, slots))
    )
    given = [x, gate_up, down, *([probs] if weighted else [])]
    y = tw.moe_feed_forward(x, gate_up, down, chosen, probs if weighted else None)
    dy = torch.randn(y.shape, generator=draw)
    wide = [t.detach().double().requires_grad_() for t in given]
    e = chosen.clamp(min=0)
    gate, up = torch.einsum("th,tkfh->tkf", wide[0], wide[1][e]).chunk(2, -1)
    each = torch.einsum("tkf,tkhf->tkh", torch.nn.functional.silu(gate) * up, wide[2][e]) * (chosen >= 0)[..., None]
    expected = (each * wide[3][..., None] if weighted else each).sum(1)
    torch.testing.assert_close(y.double(), expected, rtol=1e-4, atol=1e-5)
    for ours, theirs in zip(torch.autograd.grad(y, given, dy), torch.autograd.grad(expected, wide, dy.double())):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-3, atol=1e-4)


def test_topk_of_a_map_keeps_the_lowest_experts():
    flags = torch.ones(3, 5, dtype=torch.int32)
    same_map(tw.moe_row_map(flags, topk=2, align=1), expected_map([[0, 1]] * 3, 5, 1, 6, 2))


@pytest.mark.parametrize("slots", [8, 17])
def test_there_and_back(slots):
    """The weighted sum of a token's rows, whatever lies in padding and past the last group."""
    x, chosen = torch.randn(37, 65), indices(37, 20, slots)
    weights = torch.rand(37, slots)
    rows, probs, row_map, source, offsets, overflow = tw.moe_permute(x, chosen, weights, experts=20)
    assert int(overflow) == 0
    rows = torch.where((source >= 0)[:, None], rows, torch.nan)
    probs = torch.where(source >= 0, probs, torch.nan)
    y = tw.moe_unpermute(rows, row_map, probs)
    torch.testing.assert_close(y, x * weights.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
    expected = torch.zeros(37, 65)
    for row in range(int(offsets[-1])):  # ascending, one rounding each
        if source[row] >= 0:
            expected[source[row]] += rows[row]
    assert torch.equal(tw.moe_unpermute(rows, row_map), expected)


def test_a_bad_row_stays_its_own():
    x, chosen = torch.randn(9, 130), indices(9, 4, 2)
    bad = x.clone()
    bad[3, 5] = torch.inf
    fmt = tw.fp8("1x128")
    for options in ({}, {"out_format": fmt}):
        clean, dirty = (tw.moe_permute(v, chosen, experts=4, **options) for v in (x, bad))
        others = (clean[3] >= 0) & (clean[3] != 3)
        plain = [r[0].dequantize() if options else r[0] for r in (clean, dirty)]
        assert torch.equal(plain[0][others], plain[1][others])
        assert not bool(plain[1][clean[3] == 3].isfinite().all())


def test_a_row_of_two_tokens_gives_its_gradient_to_the_last():
    row_map = torch.tensor([[0, 1], [1, -1], [1, 9]], dtype=torch.int32)
    rows = torch.randn(4, 20, requires_grad=True)
    y = tw.moe_unpermute(rows, row_map)
    torch.testing.assert_close(y, torch.stack([rows[0] + rows[1], rows[1], rows[1]]))
    dy = torch.randn(3, 20)
    (d,) = torch.autograd.grad(y, rows, dy)
    assert torch.equal(d, torch.stack([dy[0], dy[2], torch.zeros(20), torch.zeros(20)]))


def test_unpermute_keeps_no_rows_that_its_gradient_does_not_read():
    rows = torch.randn(12, 24, requires_grad=True)
    row_map = torch.tensor([[0, 5], [3, -1]], dtype=torch.int32)
    kept = tw.moe_unpermute(rows, row_map).grad_fn.saved_tensors
    assert all(t is None or t.untyped_storage().nbytes() < rows.nbytes for t in kept)
    kept = tw.moe_unpermute(rows, row_map, torch.rand(12)).grad_fn.saved_tensors
    assert any(t is not None and t.untyped_storage().nbytes() == rows.nbytes for t in kept)


def test_debug_names_bad_indices(monkeypatch):
    chosen = torch.tensor([[0, 7], [1, -1]])
    good = tw.moe_row_map(chosen.clamp(max=1), experts=4)
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with pytest.raises(ValueError, match=r"moe_row_map: routing must be in \[-1, 4\), got values from -1 to 7"):
        tw.moe_row_map(chosen, experts=4, align=8)
    with pytest.raises(ValueError, match="moe_unpermute: row_map"):
        tw.moe_unpermute(torch.ones(3, 4), torch.tensor([[3]], dtype=torch.int32))
    same_map(tw.moe_row_map(chosen.clamp(max=1), experts=4), tuple(t.tolist() for t in good))


def test_codes_and_their_scales_go_together():
    codes = torch.randint(256, (7, 300), dtype=torch.uint8, generator=torch.Generator().manual_seed(2))
    scale, chosen = torch.rand(7, 3), indices(7, 5, 2)
    rows, row_scale, _, row_map, source, offsets, _ = tw.moe_permute_codes(codes, scale, chosen, experts=5, align=4)
    end = int(offsets[-1])
    live = source[:end] >= 0
    for there, here in ((codes, rows), (scale, row_scale)):
        assert torch.equal(here[:end][live], there[source[:end][live]]) and not bool(here[:end][~live].any())
    assert torch.equal(row_map, tw.moe_row_map(chosen, experts=5, align=4)[0])
