"""Attention over more than 2^31 elements of q, k, v and a cache: the last rows, whose addresses are the largest, against a call on
them alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.gpu.test_large import FREE
from tilewright.attention.attention import reference_lse
from tilewright.check.oracle import rms

pytestmark = pytest.mark.gpu
TOKENS, HEADS, WIDTH = 131_200, 128, 128  # 2^31 elements and some
LEFT = 63  # keys before its own that a query sees: what is far away costs nothing
LAST = 512
BAR = 6e-3  # of two roundings to bf16


@pytest.fixture(autouse=True)
def room() -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of the device's memory, free")


def normal(*shape: int, seed: int) -> Tensor:
    source = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=source, device="cuda", dtype=torch.bfloat16)


def same(found: Tensor, wanted: Tensor) -> None:
    error = rms(found.double() - wanted.double())
    assert error <= BAR * rms(wanted.double()), f"relative RMS error {error / rms(wanted.double()):.2e}"


@pytest.mark.parametrize("backend", ["portable", "hopper"])
def test_attention(backend):
    q, k, v = (normal(1, TOKENS, HEADS, WIDTH, seed=i).requires_grad_() for i in range(3))
    o, lse = tw.attention_lse(q, k, v, causal=True, left=LEFT, backend=backend)
    do = normal(*o.shape, seed=3)
    do[:, : TOKENS - LAST] = 0.0
    grads = torch.autograd.grad(o, (q, k, v), do)
    # Queries of the last rows see keys among the last rows and the LEFT before them
    few = [t.detach()[:, TOKENS - LAST - 128 :].double().requires_grad_() for t in (q, k, v)]
    exact, exact_lse = reference_lse(*few, causal=True, left=LEFT)
    wanted = torch.autograd.grad(exact, few, do[:, TOKENS - LAST - 128 :].double())
    same(o[:, TOKENS - LAST :], exact[:, 128:])
    assert (lse[..., TOKENS - LAST :] - exact_lse[..., 128:]).abs().max() < 1e-4
    for found, one in zip(grads, wanted):
        same(found[:, TOKENS - LAST :], one[:, 128:])
        assert not found[:, : TOKENS - LAST - 128].any()


def test_cache():
    """Written at its last places, which are then read."""
    pages, page = TOKENS // 64, 64
    k_cache, v_cache = (torch.zeros(pages, page, HEADS, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    k, v = (normal(3 * page, HEADS, WIDTH, seed=i) for i in range(2))
    slots = torch.arange(TOKENS - 3 * page, TOKENS, device="cuda")
    tw.cache_write(k, v, k_cache, v_cache, slots)
    assert torch.equal(k_cache[-3:].flatten(0, 1), k) and torch.equal(v_cache[-3:].flatten(0, 1), v)
    assert not k_cache[:-3].any() and not v_cache[:-3].any()
    q = normal(1, 1, HEADS, WIDTH, seed=2)
    table = torch.tensor([[pages - 3, pages - 2, pages - 1]], dtype=torch.int32, device="cuda")
    o, _ = tw.cached_attention(q, k_cache, v_cache, table, torch.tensor([3 * page], dtype=torch.int32, device="cuda"))
    same(o, reference_lse(q.double(), k[None].double(), v[None].double(), causal=True)[0])


def last_pages(pages: int) -> tuple[Tensor, Tensor, Tensor]:
    """(the table of one sequence over the last three pages of 64 keys, how many keys it has, their slots)."""
    table = torch.arange(pages - 3, pages, dtype=torch.int32, device="cuda").unsqueeze(0)
    slots = torch.arange(64 * (pages - 3), 64 * pages, device="cuda")
    return table, torch.tensor([slots.numel()], dtype=torch.int32, device="cuda"), slots


@pytest.mark.parametrize("backend", ["portable", "hopper_latent", "hopper_latent_few"])
def test_cache_of_latents(backend):
    """The same of one cache, whose first 512 columns are the values."""
    pages = 60_000  # 2^31 elements are 58,255 pages of 64 keys and 576 columns
    cache = torch.zeros(pages, 64, 1, 576, device="cuda", dtype=torch.bfloat16)
    assert cache.numel() > 1 << 31
    table, count, slots = last_pages(pages)
    k, q = normal(slots.numel(), 1, 576, seed=0), normal(1, 2, 16, 576, seed=1)
    tw.cache_write(k, None, cache, None, slots)
    assert torch.equal(cache[-3:].flatten(0, 1), k) and not cache[:-3].any()
    o, lse = tw.cached_attention(q, cache, None, table, count, value_dim=512, backend=backend)
    wide = k[None].double()
    wanted, wanted_lse = reference_lse(q.double(), wide, wide[..., :512], causal=True)
    same(o, wanted)
    assert (lse - wanted_lse).abs().max() < 1e-4


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8], ids=["fp8", "int8"])
def test_cache_of_codes(dtype):
    """The same of codes with a scale for each token and head, which are written too."""
    pages, heads = 33_000, 8  # 2^31 elements are 32,768 pages of 64 keys, 8 heads and 128 columns
    caches = [torch.zeros(pages, 64, heads, WIDTH, device="cuda", dtype=torch.int8).view(dtype) for _ in range(2)]
    scales = [torch.zeros(pages, 64, heads, 1, device="cuda") for _ in range(2)]
    assert caches[0].numel() > 1 << 31
    table, count, slots = last_pages(pages)
    k, v = (normal(slots.numel(), heads, WIDTH, seed=i) for i in range(2))
    tw.cache_write(k, v, *caches, slots, k_scale=scales[0], v_scale=scales[1])
    for x, cache, scale in zip((k, v), caches, scales):
        near = (cache[-3:].float() * scale[-3:]).flatten(0, 1)
        assert (near - x.float()).abs().max() <= 0.07 * x.float().abs().max()
        assert not cache[:-3].view(torch.int8).any() and not scale[:-3].any()
    q = normal(1, 2, 4 * heads, WIDTH, seed=2)
    o, lse = tw.cached_attention(q, *caches, table, count, k_scale=scales[0], v_scale=scales[1])
    wide = [(c[-3:].double() * s[-3:].double()).flatten(0, 1)[None] for c, s in zip(caches, scales)]
    wanted, wanted_lse = reference_lse(q.double(), *wide, causal=True)
    same(o, wanted)
    assert (lse - wanted_lse).abs().max() < 1e-3
