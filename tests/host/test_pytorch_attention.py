"""Our `scaled_dot_product_attention` against torch's own, values and gradients, for every way in which it may be called."""

from __future__ import annotations

import inspect

import pytest
import torch
import torch.nn.functional as F

from tilewright.integrations.pytorch import attention as adapter
from tilewright.integrations.pytorch import scaled_dot_product_attention

BAR = 1e-5  # of the largest value, or of 1 where a gradient cancels, in fp32


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def held(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **named: object) -> None:
    """Values and the gradients of all three by both."""
    found = []
    for function in (scaled_dot_product_attention, F.scaled_dot_product_attention):
        given = [t.detach().clone().requires_grad_() for t in (q, k, v)]
        made = function(*given, **named)
        (made * draw(*made.shape, seed=7)).sum().backward()
        found.append([made.detach(), *(t.grad for t in given)])
    for ours, theirs in zip(*found, strict=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=0, atol=BAR * max(1.0, float(theirs.abs().max())))


def heads(length: int, keys: int, q_heads: int = 4, k_heads: int = 4, width: int = 8, wide: int = 8) -> tuple:
    return (
        draw(2, q_heads, length, width),
        draw(2, k_heads, keys, width, seed=1),
        draw(2, k_heads, keys, wide, seed=2),
    )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("length", "keys"), [(7, 7), (5, 9), (9, 5), (1, 6), (6, 1)])
def test_lengths_that_differ(length, keys, causal):
    """Causal is aligned to the upper left."""
    held(*heads(length, keys), is_causal=causal)


@pytest.mark.parametrize("k_heads", [1, 2, 4])
def test_heads_that_share_keys(k_heads):
    held(*heads(5, 7, 4, k_heads), enable_gqa=True, is_causal=True)
    held(*heads(5, 7, 4, k_heads, wide=3), enable_gqa=True, scale=0.3)


@pytest.mark.parametrize("shape", [(5, 7), (1, 7), (4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 7), (2, 1, 5, 1)])
def test_masks(shape):
    held(*heads(5, 7), attn_mask=draw(*shape, seed=3))
    mask = draw(*shape, seed=3) > 0
    if shape[-1] > 1:
        mask[..., 3:5, :] = False  # rows that see nothing, where the mask has rows
    held(*heads(5, 7), attn_mask=mask)


@pytest.mark.parametrize("leading", [(), (3,), (2, 3), (2, 2, 3), (2, 1, 2, 3)])
def test_leading_dimensions(leading):
    q, k, v = (draw(*leading, rows, 8, seed=rows) for rows in (5, 7, 7))
    held(q, k, v, is_causal=True)
    held(q, k, v, attn_mask=draw(5, 7, seed=3))
    if leading:
        held(q, k, v, attn_mask=draw(*leading, 5, 7, seed=3))


def test_dimensions_that_broadcast():
    held(draw(2, 4, 5, 8), draw(1, 4, 7, 8), draw(2, 1, 7, 8))
    held(draw(2, 1, 5, 8), draw(2, 4, 7, 8), draw(2, 4, 7, 8))
    held(draw(2, 4, 5, 8), draw(7, 8), draw(7, 8))
    held(draw(2, 2, 4, 5, 8), draw(2, 4, 7, 8), draw(2, 1, 4, 7, 8), attn_mask=draw(2, 1, 1, 5, 7) > 0)


def test_heads_are_read_where_they_lie(monkeypatch):
    given = {}
    op = adapter.attention.function
    monkeypatch.setattr(
        adapter.attention, "function", lambda q, k, v, **n: given.update(q=q, k=k, v=v) or op(q, k, v, **n)
    )
    packed = draw(2, 6, 3, 4, 8)  # batch, length, q k v, heads, head_dim
    q, k, v = packed.permute(2, 0, 3, 1, 4)
    made = scaled_dot_product_attention(q, k, v, is_causal=True)
    torch.testing.assert_close(made, F.scaled_dot_product_attention(q, k, v, is_causal=True), rtol=0, atol=1e-5)
    assert all(t.untyped_storage().data_ptr() == packed.untyped_storage().data_ptr() for t in given.values())
    assert made.transpose(1, 2).is_contiguous()


def test_what_is_refused():
    q, k, v = heads(5, 7)
    with pytest.raises(ValueError, match="there is no dropout: dropout_p must be 0, got 0.1"):
        scaled_dot_product_attention(q, k, v, dropout_p=0.1)
    with pytest.raises(ValueError, match="is_causal and attn_mask are not given together"):
        scaled_dot_product_attention(q, k, v, torch.ones(5, 7, dtype=torch.bool), is_causal=True)
    with pytest.raises(ValueError, match="q has 4 heads, which the 3 of k do not divide"):
        scaled_dot_product_attention(q, k[:, :3], v[:, :3], enable_gqa=True)
    with pytest.raises(RuntimeError, match="shape"):
        scaled_dot_product_attention(q, k[:, :2], v[:, :2])  # without enable_gqa
    with pytest.raises(ValueError, match="2 dimensions"):
        scaled_dot_product_attention(q[0, 0, 0], k, v)


def test_the_signature_is_torchs():
    ours = inspect.signature(scaled_dot_product_attention).parameters
    documented = F.scaled_dot_product_attention.__doc__.partition("(")[2].partition(")")[0].replace("\n", " ")
    names = [part.partition("=")[0].strip() for part in documented.split(",") if part.strip() not in ("", "*")]
    assert [*ours] == names
    assert [p.default for p in ours.values()][3:] == [None, 0.0, False, None, False]
