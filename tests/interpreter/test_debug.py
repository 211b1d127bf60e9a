"""TILEWRIGHT_DEBUG=1: what is on the device and says where to read or write, or what to draw, is read, and wrong numbers named."""

from __future__ import annotations

import math

import pytest
import torch

import tilewright as tw
from tilewright.core.debug import check_pages

LOWEST = torch.iinfo(torch.int32).min
FP8 = tw.fp8("1x128")
CODES = torch.zeros(4, 16).to(torch.float8_e4m3fn)


def ends(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rope(starts: torch.Tensor) -> object:
    x = torch.ones(1, 1, 4, 8)
    return tw.rope(x, x, freqs=torch.ones(1, 4, 4), cu_seqlens=starts)


def rope_one(*positions: int) -> object:
    return tw.rope_one(torch.ones(1, 1, 2, 8), freqs=torch.ones(1, 4, 4), positions=ends(*positions).unsqueeze(0))


def cached(kv_len=(5, 3), table=((2, 0, LOWEST), (1, LOWEST, LOWEST)), tokens=1, **options) -> object:
    """Two sequences, or packed ones, over four pages of 4 keys."""
    batch = 1 if "cu_seqlens_q" in options else 2
    q, cache = torch.ones(batch, tokens, 1, 16), torch.ones(4, 4, 1, 16)
    return tw.cached_attention(
        q, cache, cache.clone(), torch.tensor(table, dtype=torch.int32), ends(*kv_len), **options
    )


def split_cache(slots=(0, 7), positions=(0, 3)) -> object:
    caches = torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8)
    options = {"freqs": torch.ones(4, 4), "positions": ends(*positions).unsqueeze(0)}
    return tw.qkv_split_cache(torch.ones(1, 2, 24), 1, 1, 8, *caches, ends(*slots).unsqueeze(0), **options)


def write(*slots: int) -> None:
    caches = torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8)
    tw.cache_write(*(torch.ones(2, 1, 8) for _ in range(2)), *caches, ends(*slots))


def move(source: tuple[int, ...], target: tuple[int, ...]) -> None:
    tw.cache_move(torch.ones(2, 4, 1, 8), torch.ones(2, 4, 1, 8), ends(*source), ends(*target))


def attended(*kv_len: int) -> object:
    q = torch.ones(2, 1, 1, 16)
    return tw.attention(q, torch.ones(2, 4, 1, 16), torch.ones(2, 4, 1, 16), causal=False, kv_len=ends(*kv_len))


def state_step(*slots: int) -> object:
    return tw.linear_attention_step(
        *(torch.ones(2, 1, 16) for _ in range(3)), torch.zeros(3, 1, 16, 16), slots=ends(*slots)
    )


def conv_step(*slots: int) -> object:
    return tw.causal_conv1d_step(torch.ones(2, 8), torch.ones(8, 4), None, torch.zeros(3, 8, 3), ends(*slots))


def of_experts(*counts: int) -> object:
    rows, weights = torch.ones(2, 4, 16), torch.ones(2, 16, 8)
    return tw.grouped_mm_masked(rows.bfloat16(), weights.bfloat16(), ends(*counts))


def sample(logit=1.0, temperature=1.0) -> object:
    return tw.sample(torch.tensor([[logit, 0.0, -math.inf]]), torch.tensor([7]), torch.tensor([temperature]))


TREE = ends(-1, 0, 2, -1)  # a node that is its own parent
WRONG = {
    "cached_attention: kv_len": lambda: cached(kv_len=(5, 13)),
    "cached_attention: cu_seqlens_q": lambda: cached(tokens=3, cu_seqlens_q=ends(0, 4, 3)),
    "cached_attention: block_table must be .* got 4 at \\[0, 1\\]": lambda: cached(table=((2, 4, 0), (1, 0, 0))),
    "cached_attention: block_table must be .* at \\[1, 0\\]": lambda: cached(table=((2, 0, 0), (LOWEST, 0, 0))),
    "cached_attention: block_table .* at \\[0, 2\\]": lambda: cached((12, 12), ((-1, -1, -1), (-1, -1, 2)), left=2),
    "attention: kv_len must be in \\[0, 5\\), got values from 4 to 5": lambda: attended(4, 5),
    "cache_write: slots": lambda: write(0, 8),
    "cache_move: target": lambda: move((0, 1), (2, -2)),
    "qkv_split_cache: slots": lambda: split_cache(slots=(0, 8)),
    "qkv_split_cache: positions": lambda: split_cache(positions=(0, 4)),
    "rope_one: positions": lambda: rope_one(0, 4),
    "sample: temperature must not be NaN or below 0": lambda: sample(temperature=-0.5),
    "sample: temperature .* got \\[nan\\]": lambda: sample(temperature=math.nan),
    "sample: logits must not be NaN, got": lambda: sample(logit=math.nan),
    "tree_bits: parents must be before their nodes, got 2 for node 2": lambda: tw.tree_bits(TREE),
    "tree_accept: parents": lambda: tw.tree_accept(TREE, TREE, TREE),
    "linear_attention_step: slots": lambda: state_step(0, 3),
    "causal_conv1d_step: slots": lambda: conv_step(-2, 1),
    "embedding: ids": lambda: tw.embedding(ends(0, 5), torch.ones(5, 8)),
    "grouped_mm_masked: counts": lambda: of_experts(5, 2),
    "cross_entropy: labels": lambda: tw.cross_entropy(torch.ones(2, 5), torch.tensor([1, 5])),
    "linear_cross_entropy: labels": lambda: tw.linear_cross_entropy(
        torch.ones(2, 8), torch.ones(5, 8), torch.tensor([-1, 2])
    ),
    "cross_entropy_parts: labels": lambda: tw.cross_entropy_parts(torch.ones(2, 5), torch.tensor([0, 9]), classes=9),
    "rope: cu_seqlens": lambda: rope(ends(0, 3, 2)),
    "glu: offsets": lambda: tw.glu(torch.ones(4, 16), offsets=ends(3, 5)),
    "quantize: offsets": lambda: tw.quantize(torch.ones(4, 16), FP8, offsets=ends(-1, 4)),
    "smooth_quantize: offsets": lambda: tw.smooth_quantize(
        torch.ones(4, 16), torch.ones(2, 16), FP8, offsets=ends(4, 2)
    ),
    "column_amax: offsets": lambda: tw.column_amax(torch.ones(4, 16), offsets=ends(2, 9)),
    "grouped_mm_rows: offsets": lambda: tw.grouped_mm_rows(torch.ones(4, 16), torch.ones(2, 16, 8), ends(2, 9)),
    "grouped_mm_inner: offsets": lambda: tw.grouped_mm_inner(torch.ones(4, 6), torch.ones(6, 8), ends(5, 7)),
    "grouped_mm_inner_fp8: offsets": lambda: tw.grouped_mm_inner_fp8(
        CODES, torch.ones(1, 4), CODES.t(), torch.ones(1, 4), ends(20, 16)
    ),
}


@pytest.fixture(autouse=True)
def nothing_recorded():
    """What is replayed is not looked at again, and calls here have few shapes."""
    for op in tw.catalogue().values():
        op.plans.clear()


@pytest.mark.parametrize("named", WRONG)
def test_wrong_numbers_on_the_device_are_named(named, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with tw.force("triton"), torch.no_grad():
        with pytest.raises(ValueError, match=named):
            WRONG[named]()
        monkeypatch.delenv("TILEWRIGHT_DEBUG")
        WRONG[named]()  # without the variable they spoil nothing but their own rows


def test_right_numbers_pass(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with tw.force("triton"), torch.no_grad():
        assert tw.cross_entropy(torch.ones(2, 5), torch.tensor([4, -100])).isfinite()
        assert rope(ends(0, 2, 4))[0].isfinite().all()
        assert tw.glu(torch.ones(4, 16), offsets=ends(0, 2, 2)).shape == (4, 8)
        split_cache(slots=(-1, 7))
        write(-1, 7)
        move((0, -1), (7, 7))
        assert attended(4, 1).isfinite().all() and tw.embedding(ends(4, 0), torch.ones(5, 8)).isfinite().all()
        assert not state_step(-1, 2)[0].any() and not conv_step(2, -1)[1].any()
        assert of_experts(4, 0)[0].isfinite().all()
        assert sample(temperature=0.0) == 0 and sample(logit=-math.inf) == 1
        assert tw.tree_bits(ends(-5, 0, 1, 0))[1].tolist() == [0, 1, 2, 1]


def test_entries_of_a_table_that_nobody_reads_may_be_anything(monkeypatch):
    """Past a sequence's keys, before every window, and of sequences without queries or keys."""
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with tw.force("triton"), torch.no_grad():
        calls = [
            cached(),
            cached(kv_len=(0, 4), table=((LOWEST, 4, -1), (3, LOWEST, 4))),
            cached(kv_len=(12, 9), table=((LOWEST, -1, 3), (4, 0, 1)), left=2),
            cached(kv_len=(12, 9), table=((1, 2, 3), (2, 0, 1)), left=10**12),
            cached((9, 12), ((-1, 3, 0), (-1, -1, -1)), 4, cu_seqlens_q=ends(0, 2, 2), left=3),
        ]
        for o, _ in calls:
            assert not o.isnan().any()


@pytest.mark.parametrize(("first", "last", "read"), [(0, 12, 3), (0, 9, 3), (0, 8, 2), (3, 8, 2), (4, 5, 1), (4, 4, 0)])
def test_pages_that_hold_keys_are_looked_at(first, last, read, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    wrong = 0
    for entry in range(3):
        table = torch.where(torch.arange(3) == entry, -1, 0).unsqueeze(0)
        try:
            check_pages("op", "table", table, 4, 1, torch.tensor([first]), torch.tensor([last]))
        except ValueError as error:
            wrong += f"got -1 at [0, {entry}]" in str(error)
    assert wrong == read
