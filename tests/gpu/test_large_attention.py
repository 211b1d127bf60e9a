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
