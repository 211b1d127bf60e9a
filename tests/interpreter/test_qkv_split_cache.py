"""What `qkv_split_cache` promises beyond the properties of every op: the caches of `cache_write`, and nothing beside its slots."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.runtime.kernel import collect

HEADS, KV, WIDTH, PAGES, PAGE = 6, 2, 32, 4, 8


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def angles(rotary_dim: int, known: int = 40) -> Tensor:
    return 3 * drawn(known, rotary_dim // 2, seed=3, dtype=torch.float32)


def called(slots: Tensor, positions: Tensor | None, caches: dict[str, Tensor], **options) -> Tensor:
    batch, length = slots.shape
    weights = [drawn(WIDTH, seed=s, dtype=torch.float32).abs() + 0.5 for s in (1, 2)]
    return tw.qkv_split_cache(
        drawn(batch, length, (HEADS + 2 * KV) * WIDTH), HEADS, KV, WIDTH, slots=slots, q_weight=weights[0], k_weight=weights[1],
        freqs=angles(options.get("rotary_dim", WIDTH), max(40, length)), positions=positions, **caches, **options,
    )  # fmt: skip


def blank(dtype: torch.dtype = torch.bfloat16, scale: tuple | None = None) -> dict[str, Tensor]:
    made = {n: torch.full((PAGES, PAGE, KV, WIDTH), 7.0).to(dtype) for n in ("k_cache", "v_cache")}
    if scale is not None:
        made |= {n: torch.full(scale, 0.02) for n in ("k_scale", "v_scale")}
    return made


SLOTS = torch.tensor([[3, -1, 17], [31, 0, 32]], dtype=torch.int32)  # one below 0, one past the last
POSITIONS = torch.tensor([[0, 5, 39], [11, 2, 2]])
WRITTEN = [3, 17, 31, 0]


@pytest.mark.parametrize("tokens", [3, 300], ids=["few", "many"])
@pytest.mark.parametrize("codes", [None, torch.float8_e4m3fn, torch.int8], ids=["numbers", "fp8", "int8"])
@pytest.mark.parametrize("positions", [True, False], ids=["given", "by order"])
def test_it_is_one_launch(tokens, codes, positions):
    """Of every kind of cache, with scales that are written or read, and wherever positions come from."""
    scales = [(PAGES, PAGE, KV, 1), (1, 1, KV, 1)] if codes else [None]
    slots = torch.arange(2 * tokens).reshape(2, tokens) % (PAGES * PAGE)
    place = slots % 40 if positions else None
    for scale in scales:
        with collect() as found:
            called(slots, place, blank(codes or torch.bfloat16, scale), rotary_dim=12)
        assert [one.kernel.name for one in found] == ["qkv_split_cache_rows"]


@pytest.mark.parametrize("packing", ["grouped", "plain"])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("rotary_dim", [WIDTH, 12])
def test_it_is_split_and_write(packing, pairing, rotary_dim):
    options = {"packing": packing, "pairing": pairing, "rotary_dim": rotary_dim}
    caches, others = blank(), blank()
    q = called(SLOTS, POSITIONS, caches, **options)
    weights = [drawn(WIDTH, seed=s, dtype=torch.float32).abs() + 0.5 for s in (1, 2)]
    expected, k, v = tw.qkv_split(
        drawn(2, 3, (HEADS + 2 * KV) * WIDTH), HEADS, KV, WIDTH, *weights,
        angles(rotary_dim), positions=POSITIONS, **options,
    )  # fmt: skip
    tw.cache_write(k, v, slots=SLOTS, **others)
    assert torch.equal(q, expected)
    assert all(torch.equal(caches[n], others[n]) for n in caches)
    flat = caches["k_cache"].flatten(0, 1)
    beside = torch.ones(PAGES * PAGE, dtype=torch.bool)
    beside[WRITTEN] = False
    assert bool((flat[beside] == 7.0).all()) and bool((flat[~beside] != 7.0).any(-1).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("size", [(PAGES, PAGE, KV, 1), (1, 1, KV, 1), (1, 1, 1, 1)])
def test_codes_are_of_what_was_not_rounded(dtype, size):
    caches = blank(dtype, size)
    numbers = {n: t.float() for n, t in blank().items()}
    called(SLOTS, POSITIONS, caches)
    qkv = drawn(2, 3, (HEADS + 2 * KV) * WIDTH).float()
    weights = [drawn(WIDTH, seed=s, dtype=torch.float32).abs() + 0.5 for s in (1, 2)]
    freqs = angles(WIDTH)
    tw.qkv_split_cache(qkv, HEADS, KV, WIDTH, **numbers, slots=SLOTS, q_weight=weights[0], k_weight=weights[1], freqs=freqs,
                       positions=POSITIONS)  # fmt: skip
    for name in ("k", "v"):
        codes, scale, exact = caches[f"{name}_cache"], caches[f"{name}_scale"], numbers[f"{name}_cache"]
        found = (codes.float() * scale).flatten(0, 1)[WRITTEN]
        exact = exact.flatten(0, 1)[WRITTEN]
        top = 448.0 if dtype == torch.float8_e4m3fn else 127.0
        if size[0] == 1:
            exact = exact.clamp(-0.02 * top, 0.02 * top)  # which saturates
        if size[0] > 1:
            torch.testing.assert_close(scale.flatten(0, 1)[WRITTEN, ..., 0], exact.abs().amax(-1) / top)
        step = 2.0**-3 if dtype == torch.float8_e4m3fn else 0.0  # of e4m3, half of which a code may be off
        s = scale.expand(PAGES, PAGE, KV, 1).flatten(0, 1)[WRITTEN]
        assert bool(((found - exact).abs() <= exact.abs() * step / 2 + s * 0.5001).all())


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("pairing", ["half", "interleaved"])
@pytest.mark.parametrize("head_dim, rotary_dim", [(200, 200), (200, 12), (136, 136), (256, 130), (300, None)])
def test_a_scale_for_each_128_columns(head_dim, rotary_dim, pairing, dtype):
    """In fp32 there is no rounding in between, so that codes and scales are `cache_write`'s to the bit. A column is in its block
    wherever the pairs of a rotation put it."""
    qkv = drawn(2, 3, (HEADS + 2 * KV) * head_dim, dtype=torch.float32)
    qkv *= torch.logspace(-3, 3, qkv.shape[-1])  # blocks of a head are of different sizes
    qkv[1, 1, -3] = float("nan")
    shape = (PAGES, PAGE, KV)
    caches, others = (
        {
            **{f"{n}_cache": torch.full((*shape, head_dim), 7.0).to(dtype) for n in ("k", "v")},
            **{f"{n}_scale": torch.full((*shape, -(-head_dim // 128)), 0.5) for n in ("k", "v")},
        }
        for _ in range(2)
    )
    turned = {} if rotary_dim is None else {"freqs": angles(rotary_dim), "rotary_dim": rotary_dim}
    options = {**turned, "pairing": pairing, "positions": POSITIONS}
    q = tw.qkv_split_cache(qkv, HEADS, KV, head_dim, slots=SLOTS, **caches, **options)
    expected, k, v = tw.qkv_split(qkv, HEADS, KV, head_dim, **options)
    tw.cache_write(k, v, slots=SLOTS, **others)
    assert torch.equal(q, expected)
    for name, found in caches.items():
        bits = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (found, others[name]))
        torch.testing.assert_close(*bits, rtol=0, atol=0, equal_nan=True, msg=name)
    assert bool((caches["k_scale"].flatten(0, 1)[WRITTEN] != 0.5).all())


@pytest.mark.parametrize("value", [-1, 40, 2**40])
def test_a_position_without_an_angle_is_nan_where_it_is_written(value):
    caches, clean = blank(), blank()
    wrong = POSITIONS.clone()
    wrong[1, 0] = value
    q, right = called(SLOTS, wrong, caches), called(SLOTS, POSITIONS, clean)
    assert bool(q[1, 0].isnan().all()) and torch.equal(q[0], right[0]) and torch.equal(q[1, 1:], right[1, 1:])
    flat, other = caches["k_cache"].flatten(0, 1), clean["k_cache"].flatten(0, 1)
    assert bool(flat[31].isnan().all()) and torch.equal(flat[:31], other[:31])
    assert torch.equal(caches["v_cache"], clean["v_cache"])


@pytest.mark.parametrize("change, said", [
    ({"k_cache": torch.zeros(PAGES, PAGE, KV, 16, dtype=torch.bfloat16)}, "k_cache"),
    ({"v_scale": torch.ones(1, 1, 1, 1)}, "v_scale is for codes"),
    ({"k_cache": torch.zeros(PAGES, PAGE, KV, WIDTH, dtype=torch.int8)}, "k_scale is for codes"),
    ({"k_cache": torch.zeros(PAGES, PAGE, KV, WIDTH, dtype=torch.int8), "k_scale": torch.ones(1, 1, 3, 1)}, "k_scale"),
    ({"k_cache": torch.zeros(PAGES, PAGE, KV, WIDTH, dtype=torch.int8), "k_scale": torch.ones(PAGES, PAGE, KV, 2)}, "k_scale"),
    ({"k_cache": torch.zeros(PAGES, PAGE, KV, WIDTH)}, "k_cache must be torch.bfloat16"),
    ({"v_cache": "k_cache"}, "share|overlap|memory"),
])  # fmt: skip
def test_caches_that_do_not_fit_are_refused(change, said):
    caches = blank()
    caches |= {n: caches[t] if isinstance(t, str) else t for n, t in change.items()}
    with pytest.raises(ValueError, match=f"qkv_split_cache: .*{said}"):
        called(SLOTS, POSITIONS, caches)
