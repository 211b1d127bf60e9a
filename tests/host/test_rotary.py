"""The references of the rotary family against formulas from elsewhere: Hugging Face's, complex numbers, chunks of a sequence."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.rotary.rope import positions_of


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def hugging_face(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [batch, heads, length, head_dim], cos and sin [batch, length, head_dim]: each angle twice."""
    half = x.shape[-1] // 2
    swapped = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos.unsqueeze(1) + swapped * sin.unsqueeze(1)


def test_hugging_face():
    angle = drawn(2, 5, 4, seed=1).repeat(1, 1, 2)
    q, k = drawn(2, 6, 5, 8), drawn(2, 3, 5, 8, seed=2)
    found = tw.rope(q, k, angle.cos(), angle.sin())
    for actual, x in zip(found, (q, k)):
        torch.testing.assert_close(actual, hugging_face(x, angle.cos(), angle.sin()))


def test_interleaved_pairs_are_complex_numbers():
    angle, x = drawn(7, 4, seed=1), drawn(7, 2, 3, 8)
    turned = torch.view_as_complex(x.unflatten(-1, (4, 2))) * torch.polar(torch.ones_like(angle), angle)[:, None, None]
    for freqs in (angle, angle.repeat_interleave(2, -1)):
        actual = tw.rope_one(x, freqs=freqs[None], layout="sbhd", pairing="interleaved")
        torch.testing.assert_close(actual, torch.view_as_real(turned).flatten(-2))


@pytest.mark.parametrize("layout, order", [("bhsd", (0, 1, 2, 3)), ("bshd", (0, 2, 1, 3)), ("sbhd", (2, 0, 1, 3))])
def test_layouts_differ_in_order_alone(layout, order):
    x, freqs = drawn(2, 3, 5, 8), drawn(2, 5, 2, seed=1)
    expected = tw.rope_one(x, freqs=freqs, rotary_dim=4)
    actual = tw.rope_one(x.permute(order), freqs=freqs, rotary_dim=4, layout=layout)
    assert torch.equal(actual, expected.permute(order))
    assert torch.equal(expected[..., 4:], x[..., 4:])


def test_mscale_multiplies_what_is_turned():
    x, freqs = drawn(1, 3, 2, 8), drawn(1, 3, 2, seed=1)
    plain, scaled = (tw.rope_one(x, freqs=freqs, rotary_dim=4, layout="bshd", mscale=m) for m in (1.0, 1.5))
    torch.testing.assert_close(scaled[..., :4], 1.5 * plain[..., :4])
    assert torch.equal(scaled[..., 4:], plain[..., 4:])


@pytest.mark.parametrize("lengths", [[12], [4, 8, 12]])
def test_ranks_have_two_chunks_of_each_sequence(lengths):
    """The first of 2 * size chunks and the last, the second and the last but one, and so on."""
    size = 2
    ends = torch.tensor([0, *lengths]).cumsum(0)
    for rank in range(size):
        expected = []
        for length in lengths:
            chunks = torch.arange(length).chunk(2 * size)
            expected += [chunks[rank], chunks[2 * size - 1 - rank]]
        local = sum(lengths) // size
        actual = positions_of(local, None, ends if len(lengths) > 1 else None, size, rank, torch.device("cpu"))
        assert actual.tolist() == torch.cat(expected).tolist()


def test_tokens_past_the_last_sequence_are_one_more():
    ends = torch.tensor([0, 2, 5])
    assert positions_of(8, None, ends, 1, 0, torch.device("cpu")).tolist() == [0, 1, 0, 1, 2, 0, 1, 2]


def split_by_hand(qkv: Tensor, heads: int, kv_heads: int, head_dim: int, grouped: bool) -> list[list[Tensor]]:
    """Heads of q, k and v, cut out one by one."""
    columns = iter(qkv.split(head_dim, -1))
    if not grouped:
        return [[next(columns) for _ in range(count)] for count in (heads, kv_heads, kv_heads)]
    q, k, v = [], [], []
    for _ in range(kv_heads):
        q += [next(columns) for _ in range(heads // kv_heads)]
        k.append(next(columns))
        v.append(next(columns))
    return [q, k, v]


@pytest.mark.parametrize("packing", ["grouped", "plain"])
@pytest.mark.parametrize("shards", [1, 2])
def test_split_norm_and_turn(packing, shards):
    heads, kv_heads, head_dim = 6, 2, 8
    qkv, freqs = drawn(5, 2, (heads + 2 * kv_heads) * head_dim), drawn(5, 2, seed=1)
    weights = drawn(head_dim, seed=2), drawn(head_dim, seed=3)
    found = tw.qkv_split(
        qkv, heads * shards, kv_heads * shards, head_dim, *weights, freqs, rotary_dim=4, packing=packing, transposed=True,
        silu=True, eps=1e-3,
    )  # fmt: skip
    parts = split_by_hand(torch.nn.functional.silu(qkv), heads, kv_heads, head_dim, packing == "grouped")
    for t, part, weight in zip(found, parts, (*weights, None)):
        expected = torch.stack(part, 2).transpose(0, 1)
        if weight is not None:
            expected = torch.nn.functional.rms_norm(expected, (head_dim,), weight, 1e-3)
            expected = tw.rope_one(expected, freqs=freqs[None], rotary_dim=4, layout="bshd")
        torch.testing.assert_close(t, expected)


def test_latent_attention():
    q, kv, k_pos, freqs = drawn(5, 2, 3, 12), drawn(5, 2, 3, 15, seed=1), drawn(5, 2, 1, 4, seed=2), drawn(5, 2, seed=3)
    q_out, k, v = tw.mla_rope(q, kv, k_pos, freqs=freqs)
    order = [0, 2, 1, 3]  # interleaved columns as halves

    def turned(x: Tensor) -> Tensor:
        return tw.rope_one(x[..., order], freqs=freqs[None], layout="sbhd")

    torch.testing.assert_close(q_out, torch.cat([q[..., :8], turned(q[..., 8:])], -1))
    torch.testing.assert_close(k, torch.cat([kv[..., :8], turned(k_pos).expand(5, 2, 3, 4)], -1))
    assert torch.equal(v, kv[..., 8:])


@pytest.mark.parametrize(
    "change, name",
    [
        ({"cos": torch.ones(1, 5, 4)}, "sin"),
        ({"cos": torch.ones(1, 5, 4), "sin": torch.ones(1, 5, 4), "freqs": torch.ones(1, 5, 4)}, "cos"),
        ({}, "freqs"),
        ({"freqs": torch.ones(1, 5, 3)}, "freqs"),
        ({"freqs": torch.ones(1, 4, 4)}, "freqs"),
        ({"freqs": torch.ones(3, 5, 4)}, "freqs"),
        ({"freqs": torch.ones(1, 5, 4), "rotary_dim": 3}, "rotary_dim"),
        ({"freqs": torch.ones(1, 5, 4), "rotary_dim": 10}, "rotary_dim"),
        ({"freqs": torch.ones(1, 5, 4), "cp_rank": 1}, "cp_rank"),
        ({"freqs": torch.ones(1, 5, 4), "cp_size": 2}, "freqs"),
    ],
)
def test_angles_that_do_not_fit_are_refused(change, name):
    with pytest.raises(ValueError, match=rf"rope: {name}\b"):
        tw.rope(torch.ones(2, 3, 5, 8), torch.ones(2, 1, 5, 8), **change)


@pytest.mark.parametrize("layout", ["bhsd", "bshd", "sbhd"])
@pytest.mark.parametrize("tables", [1, 2])
def test_positions_are_rows_of_the_tables(layout, tables):
    """Rotating by given positions is rotating by the tables' rows, picked out beforehand."""
    order = {"bhsd": (0, 2, 1, 3), "bshd": (0, 1, 2, 3), "sbhd": (1, 0, 2, 3)}[layout]
    x, freqs = drawn(2, 5, 3, 8), drawn(tables, 11, 4, seed=1)
    where = torch.tensor([[3, 10, 0, 3, 7], [9, 1, 2, 0, 10]])
    picked = torch.stack([freqs[b % tables, where[b]] for b in range(2)])
    expected = tw.rope_one(x, freqs=picked, layout="bshd")
    actual = tw.rope_one(x.permute(order), freqs=freqs, layout=layout, positions=where)
    assert torch.equal(actual, expected.permute(order))


def test_positions_of_split_heads_and_latent_ones():
    where, freqs = torch.tensor([[4, 0, 6], [1, 1, 5]]), drawn(7, 4, seed=1)
    qkv, weight = drawn(2, 3, 5 * 8), drawn(8, seed=2)
    found = tw.qkv_split(qkv, 3, 1, 8, weight, weight, freqs, positions=where)
    for b in range(2):
        alone = tw.qkv_split(qkv[b : b + 1], 3, 1, 8, weight, weight, freqs[where[b]])
        assert all(torch.equal(t[b], one[0]) for t, one in zip(found, alone))
    q, kv, k_pos = drawn(3, 2, 2, 12), drawn(3, 2, 2, 9, seed=3), drawn(3, 2, 1, 8, seed=4)
    latent = tw.mla_rope(q, kv, k_pos, freqs=freqs, positions=where)
    for b in range(2):
        alone = tw.mla_rope(*(t[:, b : b + 1] for t in (q, kv, k_pos)), freqs=freqs[where[b]])
        assert all(torch.equal(t[:, b], one[:, 0]) for t, one in zip(latent, alone))


@pytest.mark.parametrize(
    "change, said",
    [
        ({"positions": torch.zeros(2, 4, dtype=torch.int64)}, r"positions must be \[batch, length\] = \[2, 5\]"),
        ({"positions": torch.zeros(2, 5, dtype=torch.int64), "cu_seqlens": torch.zeros(1).int()}, "beside cu_seqlens"),
        ({"positions": torch.zeros(2, 5, dtype=torch.int64), "cp_size": 2}, "beside cp_size"),
        ({"positions": torch.zeros(2, 5)}, "positions"),
    ],
)
def test_positions_that_do_not_fit_are_refused(change, said):
    with pytest.raises((ValueError, TypeError), match=f"rope_one: .*{said}"):
        tw.rope_one(torch.ones(2, 3, 5, 8), freqs=torch.ones(1, 20, 4), **change)
