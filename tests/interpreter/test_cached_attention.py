"""Attention over caches: what pages, parts, trees, codes and batches must not change, and what writes the caches."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from triton.runtime.errors import InterpreterError

import tilewright as tw
from tests.mutants import Mutant, loaded
from tilewright.attention import cached_portable
from tilewright.attention.cache_parts import part_length

LOWEST = torch.iinfo(torch.int32).min
HEADS, KV_HEADS, WIDTH, VALUES = 4, 2, 24, 16


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def launched(*args, **options):
    with tw.force("triton"):
        return tw.cached_attention(*args, **options)


def near(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor], far: float = 2e-5) -> None:
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=far, atol=far, equal_nan=True)


def same(found: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, wanted):
        assert torch.equal(a, b)


def paged(x: Tensor, lengths: list[int], page: int, spare: int = 0) -> tuple[Tensor, Tensor]:
    """Keys [batch, most, heads, columns] in pages that lie in random order, and the table. What holds no key is NaN, and what no
    sequence reaches of the table, or of `spare` columns more, is no page."""
    batch, room = x.shape[0], -(-max(lengths) // page)
    order = torch.randperm(batch * room, generator=torch.Generator().manual_seed(page))
    table = torch.full((batch, room + spare), LOWEST, dtype=torch.int32)
    cache = torch.full((batch * room, page, *x.shape[2:]), math.nan, dtype=x.dtype)
    for b, length in enumerate(lengths):
        for j in range(length):
            at = int(order[b * room + j // page])
            table[b, j // page] = at
            cache[at, j % page] = x[b, j]
    return cache, table


def sequences(
    lengths: list[int], tokens: int = 1, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(q, keys, values, kv_len) of a batch with these many keys."""
    batch, most = len(lengths), max(lengths)
    q = drawn(batch, tokens, HEADS, WIDTH, seed=1, dtype=dtype)
    k, v = (drawn(batch, most, KV_HEADS, n, seed=n, dtype=dtype) for n in (WIDTH, VALUES))
    return q, k, v, torch.tensor(lengths, dtype=torch.int32)


@pytest.mark.parametrize("tokens, page", [(1, 1), (5, 3), (1, 16), (5, 16)])
def test_pages_hold_what_attention_sees(page, tokens):
    lengths = [37, 5, 64]
    q, k, v, kv_len = sequences(lengths, tokens)
    wanted = tw.attention_lse(q, k, v, causal=True, kv_len=kv_len)
    (k_cache, table), (v_cache, _) = (paged(t, lengths, page, spare=2) for t in (k, v))
    for split in (None, 25):
        near(launched(q, k_cache, v_cache, table, kv_len, split=split), wanted)


def test_every_page_size_has_the_same_bits():
    lengths = [37, 5, 64]
    q, k, v, kv_len = sequences(lengths, 3, torch.bfloat16)
    options = {"left": 30, "softcap": 2.0, "sink": drawn(HEADS, seed=7), "split": 20}
    fixed = launched(q, k, v, None, kv_len, **options)
    for page in (1, 3, 64):
        (k_cache, table), (v_cache, _) = (paged(t, lengths, page) for t in (k, v))
        same(launched(q, k_cache, v_cache, table, kv_len, **options), fixed)
    turned = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))  # heads before tokens
    same(launched(q, *turned, None, kv_len, **options), fixed)


def test_parts_fill_the_chip():
    """Of 396 programs at a time: not a little more than one or two rounds, and never parts too short to be worth it."""
    for programs in (1, 3, 8, 64, 256, 1000, 5000):
        for capacity in (0, 1, 700, 8192, 8208, 32768, 131072):
            length = part_length(capacity, programs, 396, 512, 64)
            parts = max(1, -(-capacity // length))
            assert length % 64 == 0 and (parts == 1 or length >= 512)
            assert parts == 1 or parts * programs < 18 * 396
            rounds = parts * programs / 396
            assert parts == 1 or not (1.0 < rounds < 1.5 or 2.0 < rounds < 2.5), (programs, capacity, length)
    assert part_length(32768, 8, 396, 512, 64) == 704  # 47 parts are 376 programs


def test_few_programs_have_short_parts():
    """Where parts of 512 keys would leave some of the chip idle, shorter ones fill it once, down to a block or what they may be."""
    for programs in (1, 3, 8, 16, 32, 64, 395, 1000):
        for capacity in (0, 1, 130, 4112, 8208, 32768):
            for least, step in ((64, 64), (128, 128), (200, 32)):
                length = part_length(capacity, programs, 396, least, step)
                parts = max(1, -(-capacity // length))
                assert length % step == 0 and (parts == 1 or length >= least)
                assert parts == 1 or capacity > 2 * step
                if length < 512 and parts > 1:
                    assert parts * programs <= 396, (programs, capacity, length)
                    shorter = length - step  # would be too short, or too many for one round
                    assert shorter < least or -(-capacity // shorter) * programs > 396 or not shorter
                elif parts > 1:
                    assert length == part_length(capacity, programs, 396, 512, step)
    assert part_length(4112, 8, 396, 128, 128) == 128 and part_length(4112, 8, 396, 64, 64) == 128
    assert part_length(4112, 32, 396, 128, 128) == 384
    assert part_length(4112, 64, 396, 128, 128) == part_length(4112, 64, 396, 512, 128)


@pytest.mark.parametrize("tree, left", [(False, None), (True, None), (False, 170)])
def test_pages_that_are_looked_up_ahead_are_those_of_each_block(tree, left):
    """Codes come in blocks of 128 keys, whose pages are looked up a block before: parts of several blocks, before and after whole
    ones too, whose pages lie in random order, and sequences that end within each."""
    lengths = [440, 256, 129, 3]
    q, k, v, kv_len = sequences(lengths, 3, torch.bfloat16)
    k, v = ((16.0 * t.float()).to(torch.float8_e4m3fn) for t in (k, v.repeat(1, 1, 1, 2)))
    blocks = cached_portable.blocks(q, k, 6, 32, 32, 16, tree)
    assert blocks.ahead and blocks.other == 128
    drafts = torch.tensor([0b1, 0b11, 0b101]).repeat(len(lengths), 1)
    given = {"left": left, **({"tree": drafts} if tree else {})}
    for split in (384, 128, None):
        dense = launched(q, k, v, None, kv_len, split=split or 512, **given)
        (k_cache, table), (v_cache, _) = (paged_codes(t, lengths, 16) for t in (k, v))
        found = launched(q, k_cache, v_cache, table, kv_len, split=split, **given)
        (same if split else near)(found, dense, *(() if split else (1e-2,)))


def paged_codes(x: Tensor, lengths: list[int], page: int) -> tuple[Tensor, Tensor]:
    cache, table = paged(x.float(), lengths, page, spare=1)
    return cache.to(x.dtype), table


def test_bits_do_not_depend_on_the_batch():
    lengths = [37, 5, 64, 23]
    q, k, v, kv_len = sequences(lengths, 2, torch.bfloat16)
    (k_cache, table), (v_cache, _) = (paged(t, lengths, 16, spare=5) for t in (k, v))
    together = launched(q, k_cache, v_cache, table, kv_len, split=16)
    for b, length in enumerate(lengths):
        own = table[b : b + 1, : -(-length // 16)]  # a narrower table: fewer parts that see nothing
        alone = launched(q[b : b + 1], k_cache, v_cache, own, kv_len[b : b + 1], split=16)
        same(alone, tuple(t[b : b + 1] for t in together))


@pytest.mark.parametrize("tree", [False, True], ids=["causal", "tree"])
@pytest.mark.parametrize("latent", [False, True], ids=["keys and values", "latents"])
def test_bits_do_not_depend_on_the_packed_batch(latent, tree):
    """A chunk, a step, a draft and a sequence without tokens, each as by itself, with a table no wider than it needs."""
    lengths, marks = [40, 17, 29, 64, 5], [0, 9, 10, 14, 14, 19]
    _, k, v, kv_len = sequences(lengths, dtype=torch.bfloat16)
    (k_cache, table), (v_cache, _) = (paged(t, lengths, 3, spare=4) for t in (k, v))
    v_cache = None if latent else v_cache
    q = drawn(1, marks[-1], HEADS, WIDTH, seed=3, dtype=torch.bfloat16)
    seen = torch.randint(1, 1 << 9, (1, marks[-1]), generator=torch.Generator().manual_seed(4)) if tree else None
    packed = {"tree": seen, "cu_seqlens_q": torch.tensor(marks, dtype=torch.int32)}
    o, lse = launched(q, k_cache, v_cache, table, kv_len, split=16, **packed)
    for b, (first, last) in enumerate(zip(marks, marks[1:])):
        own = {"tree": seen[:, first:last] if tree else None, "cu_seqlens_q": torch.tensor([0, last - first])}
        given = table[b : b + 1, : -(-lengths[b] // 3)], kv_len[b : b + 1]
        alone = launched(q[:, first:last], k_cache, v_cache, *given, split=16, **own)
        same(alone, (o[:, first:last], lse[:, :, first:last]))


def test_packed_sequences_are_a_mixed_batch():
    """A chunk of a prompt, a step, and a draft, with tokens of no sequence before and after."""
    lengths, counts = [40, 17, 29], [9, 1, 4]
    _, k, v, kv_len = sequences(lengths)
    (k_cache, table), (v_cache, _) = (paged(t, lengths, 3) for t in (k, v))
    q = drawn(1, 17, HEADS, WIDTH, seed=3)
    marks = torch.tensor([2, 11, 12, 16], dtype=torch.int32)
    o, lse = launched(q, k_cache, v_cache, table, kv_len, cu_seqlens_q=marks, split=16)
    for b, (first, count) in enumerate(zip(marks.tolist(), counts)):
        own = slice(first, first + count)
        wanted = launched(q[:, own], k_cache, v_cache, table[b : b + 1], kv_len[b : b + 1], split=16)
        near((o[:, own], lse[:, :, own]), wanted)
    for outside in (slice(0, 2), slice(16, 17)):
        assert not o[:, outside].any() and (lse[:, :, outside] == -math.inf).all()


def test_prefill_and_steps_are_one_prefill():
    """Tokens written as they come, two, then one at a time, into pages that hold NaN before."""
    tokens, page = 11, 4
    q, k, v = (drawn(1, tokens, n, w, seed=w) for n, w in ((HEADS, WIDTH), (KV_HEADS, WIDTH), (KV_HEADS, VALUES)))
    wanted = tw.attention_lse(q, k, v, causal=True)
    k_cache, v_cache = (torch.full((5, page, KV_HEADS, n), math.nan) for n in (WIDTH, VALUES))
    table = torch.tensor([[3, 0, 4]], dtype=torch.int32)
    place = torch.arange(tokens)
    slots = table[0, place // page].long() * page + place % page
    for first, last in ((0, 6), (6, 8), (8, 9), (9, 10), (10, 11)):
        with tw.force("triton"):
            tw.cache_write(k[0, first:last], v[0, first:last], k_cache, v_cache, slots[first:last])
        o, lse = launched(q[:, first:last], k_cache, v_cache, table, torch.tensor([last]), split=4)
        near((o, lse), (wanted[0][:, first:last], wanted[1][:, :, first:last]))


def test_a_chain_is_causal_and_a_tree_is_a_mask():
    lengths, nodes = [37, 8], 7
    q, k, v, kv_len = sequences(lengths, nodes)
    chain = ((1 << (torch.arange(nodes) + 1)) - 1).expand(2, nodes)
    same(launched(q, k, v, None, kv_len, tree=chain, split=16), launched(q, k, v, None, kv_len, split=16))
    parents = [-1, 0, 0, 1, 1, 2, 5]
    bits = []
    for node, parent in enumerate(parents):
        bits.append(1 << node | (bits[parent] if parent >= 0 else 0))
    tree = torch.tensor([bits, bits])
    j = torch.arange(max(lengths))
    draft = j - (kv_len.long() - nodes)[:, None, None]  # [batch, 1, keys]
    seen = (draft < 0) | ((draft < nodes) & ((tree[:, :, None] >> draft.clamp(0, 63)) & 1 == 1))
    wanted = tw.attention_lse(q, k, v, mask=seen[:, None], kv_len=kv_len)
    near(launched(q, k, v, None, kv_len, tree=tree, split=16), wanted)
    tree = tree & ~(1 << 4)  # what nobody sees may hold NaN
    k[0, 37 - nodes + 4], v[0, 37 - nodes + 4] = math.nan, math.nan
    assert not launched(q, k, v, None, kv_len, tree=tree)[0].isnan().any()


def test_codes_take_queries_of_any_size():
    """They are multiplied in fp16, by queries times a power of two for each row: rows may be as far apart as bf16 goes, and an
    infinity or a NaN is that of its own row."""
    dtype, scale = torch.bfloat16, torch.full((1, 1, KV_HEADS, 1), 2.0**-6)
    q, k, v, kv_len = sequences([150], 5)
    k, v = ((32.0 * t).to(torch.float8_e4m3fn) for t in (k, v[..., :16].repeat(1, 1, 1, 2)))
    q = q * torch.tensor([2.0**-120, 2.0**-40, 0.0, 1.0, 2.0**100])[:, None, None]
    q[0, 3, 0, 3] = 2.0**-30  # beside the others' 1 it is exact as well
    far = 2.0 ** torch.tensor([120, 40, 0, 0, -100])  # makes scores of about 1, whatever the row
    for i in range(5):
        given = (q[:, i : i + 1].to(dtype), k, v, None, kv_len)
        options = {"k_scale": scale * far[i], "v_scale": scale}
        (o, lse), (wanted, wanted_lse) = launched(*given, **options), tw.cached_attention(*given, **options)
        torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(o, wanted, rtol=1e-2, atol=2e-3)
    q[0, 0, 0, 1], q[0, 1, 1, 2] = math.inf, math.nan
    together = launched(q.to(dtype), k, v, None, kv_len, k_scale=scale, v_scale=scale)
    broken = together[0].isnan().any(-1)[0]
    assert broken.sum() == 2 and broken[0, 0] and broken[1, 1]


def test_weights_below_a_sink_keep_their_digits():
    """The values of codes are summed with weights in fp16, which are relative to the keys alone."""
    q, k, v, kv_len = sequences([40])
    v = (32.0 * v.repeat(1, 1, 1, 2)).to(torch.float8_e4m3fn)
    given = (q.to(torch.bfloat16), (32.0 * k).to(torch.float8_e4m3fn), v, None, kv_len)
    sink = torch.full((HEADS,), 40.0)
    (o, lse), (wanted, wanted_lse) = launched(*given, sink=sink), tw.cached_attention(*given, sink=sink)
    torch.testing.assert_close(o, wanted, rtol=1e-2, atol=0.01 * wanted.abs().max().item())
    torch.testing.assert_close(lse, wanted_lse, rtol=1e-5, atol=1e-5)


def test_absorbed_latent_attention_is_the_expanded_one():
    batch, tokens, keys, heads, latent, nope, rope, values = 2, 1, 33, 3, 32, 16, 8, 12
    c, turned = drawn(batch, keys, latent), drawn(batch, keys, rope, seed=1)
    up_k, up_v = drawn(heads, nope, latent, seed=2) / 6, drawn(heads, values, latent, seed=3) / 6
    q_nope, q_rope = drawn(batch, tokens, heads, nope, seed=4), drawn(batch, tokens, heads, rope, seed=5)
    k = torch.cat([torch.einsum("bkc,hnc->bkhn", c, up_k), turned[:, :, None].expand(-1, -1, heads, -1)], -1)
    v = torch.einsum("bkc,hvc->bkhv", c, up_v)
    o, lse = tw.attention_lse(torch.cat([q_nope, q_rope], -1), k, v, causal=True)
    q = torch.cat([torch.einsum("blhn,hnc->blhc", q_nope, up_k), q_rope], -1)
    scale = 1.0 / math.sqrt(nope + rope)
    cache = torch.cat([c, turned], -1)[:, :, None]
    apart = {"k_rope": turned[:, :, None]}
    for given, options in (
        (cache, {"value_dim": latent}),
        (c[:, :, None], apart),
        (c[:, :, None], {**apart, "value_dim": latent}),
    ):
        found, found_lse = launched(q, given, scale=scale, split=16, **options)
        near((torch.einsum("blhc,hvc->blhv", found, up_v), found_lse), (o, lse), 5e-5)


@pytest.mark.parametrize(
    ("kind", "dtype"), [(torch.float8_e4m3fn, torch.float16), (torch.int8, torch.float32)], ids=["e4m3", "int8"]
)
@pytest.mark.parametrize("scales", ["all", "heads", "tokens", "blocks"])
def test_codes_are_the_numbers_that_they_stand_for(kind, dtype, scales):
    batch, keys, width = 2, 21, 200
    shape = {
        "all": (1, 1, 1, 1),
        "heads": (1, 1, KV_HEADS, 1),
        "tokens": (batch, keys, KV_HEADS, 1),
        "blocks": (batch, keys, KV_HEADS, 2),
    }
    q = drawn(batch, 2, HEADS, width, seed=1, dtype=dtype)
    codes = [(drawn(batch, keys, KV_HEADS, width, seed=n) * 40).clamp(-127, 127).to(kind) for n in (2, 3)]
    scale = [drawn(*shape[scales], seed=n).abs() * 0.01 + 0.003 for n in (4, 5)]
    wide = [
        t.double() * s.double().repeat_interleave(128, 3)[..., :width].expand(batch, keys, KV_HEADS, -1)
        if s.shape[3] > 1
        else t.double() * s
        for t, s in zip(codes, scale)
    ]
    wanted = tw.cached_attention(q.double(), *wide)
    found = launched(q, *codes, k_scale=scale[0], v_scale=scale[1], split=8)
    near((found[0].double(), found[1].double()), wanted, 2e-5 if dtype == torch.float32 else 1.5e-3)
    if scales != "blocks":
        return
    # The first columns of the keys are the values, with their scales
    found = launched(q, codes[0], k_scale=scale[0], value_dim=150, split=8)
    wanted = tw.cached_attention(q.double(), wide[0], value_dim=150)
    near((found[0].double(), found[1].double()), wanted, 2e-5 if dtype == torch.float32 else 1.5e-3)


def test_a_record_is_three_views():
    """FlashMLA's: 512 codes, four scales of 128 columns, 64 numbers that were rotated."""
    pages, page, keys = 3, 4, 10
    record = torch.zeros(pages, page, 1, 656, dtype=torch.uint8)
    codes = record[..., :512].view(torch.float8_e4m3fn)
    scale = record[..., 512:528].view(torch.float32)
    rope = record[..., 528:].view(torch.bfloat16)
    latent, turned = drawn(keys, 1, 512, dtype=torch.bfloat16), drawn(keys, 1, 64, seed=1, dtype=torch.bfloat16)
    with tw.force("triton"):
        tw.cache_write(latent, None, codes, None, torch.arange(keys), k_scale=scale)
        tw.cache_write(turned, None, rope, None, torch.arange(keys))
    wanted = tw.fp8("1x128", pow2=False, rule="exact").quantize(latent.reshape(keys, 512))
    assert torch.equal(codes.reshape(-1, 512)[:keys].view(torch.uint8), wanted.data.view(torch.uint8))
    assert torch.equal(scale.reshape(-1, 4)[:keys], wanted.scale.t())
    assert not record.reshape(-1, 656)[keys:].any()
    q = drawn(1, 1, 16, 576, seed=2, dtype=torch.bfloat16)
    table, kv_len = torch.tensor([[0, 1, 2]], dtype=torch.int32), torch.tensor([keys])
    found = launched(q, codes, None, table, kv_len, k_rope=rope, k_scale=scale)
    whole = torch.cat([wanted.dequantize(torch.float64), turned[:, 0].double()], -1).reshape(1, keys, 1, 576)
    exact = tw.cached_attention(q.double(), whole, value_dim=512)
    near((found[0].double(), found[1].double()), exact, 1e-2)


def test_a_table_for_each_query_chooses_tokens():
    tokens, keys, chosen = 3, 20, 6
    q = drawn(tokens, 1, HEADS, WIDTH)
    k, v = (drawn(keys, 1, KV_HEADS, n, seed=n) for n in (WIDTH, VALUES))
    table = torch.stack(
        [torch.randperm(keys, generator=torch.Generator().manual_seed(i))[:chosen] for i in range(tokens)]
    )
    kv_len = torch.tensor([6, 2, 4])
    found = launched(q, k, v, table, kv_len)
    for t in range(tokens):
        some = table[t, : kv_len[t]]
        wanted = tw.attention_lse(q[t : t + 1], k[some].transpose(0, 1), v[some].transpose(0, 1))
        near((found[0][t : t + 1], found[1][t : t + 1]), wanted)


@pytest.mark.parametrize("split", [None, 16])
def test_what_is_not_there_makes_nan_and_is_not_read(split):
    lengths = [37, 37, 37, 37]
    q, k, v, kv_len = sequences(lengths, 2)
    (k_cache, table), (v_cache, _) = (paged(t, lengths, 4, spare=1) for t in (k, v))
    clean = launched(q, k_cache, v_cache, table, kv_len, left=20, split=split)
    table[0, 8], table[1, 6] = k_cache.shape[0], -1
    table[2, 2] = 2**31 - 1  # before what its queries see
    kv_len[3] = 4 * table.shape[1] + 1
    o, lse = launched(q, k_cache, v_cache, table, kv_len, left=20, split=split)
    for b in (0, 1, 3):
        assert o[b].isnan().all() and lse[b].isnan().all()
    same((o[2], lse[2]), (clean[0][2], clean[1][2]))
    near((o, lse), tw.cached_attention(q, k_cache, v_cache, table, kv_len, left=20))


def test_moves_are_read_before_they_are_written():
    k_cache, v_cache = drawn(3, 4, 2, 24), drawn(3, 4, 2, 40, seed=1).to(torch.float8_e4m3fn)
    before = [t.clone().flatten(0, 1) for t in (k_cache, v_cache)]
    source, target = torch.tensor([5, 7, 9, 2, -1, 12, 3]), torch.tensor([4, 5, 6, 12, 1, 0, -5])
    with tw.force("triton"):
        tw.cache_move(k_cache, v_cache, source, target)
    for cache, old in zip((k_cache, v_cache), before):
        wanted = old.view(torch.uint8).clone()
        wanted[[4, 5, 6]] = wanted[[5, 7, 9]]
        assert torch.equal(cache.flatten(0, 1).view(torch.uint8), wanted)


def refused(words: str, **changed) -> None:
    q, k, v, kv_len = sequences([8, 8])
    given = {"q": q, "k_cache": k, "v_cache": v, "kv_len": kv_len, **changed}
    with pytest.raises(ValueError, match=words):
        launched(**given)


def test_calls_that_make_no_sense_are_refused():
    refused("block_table needs kv_len", block_table=torch.zeros(2, 1, dtype=torch.int32), kv_len=None)
    refused("tree has bits for 64 tokens", q=drawn(2, 65, HEADS, WIDTH), tree=torch.zeros(2, 65, dtype=torch.int64))
    refused("slopes cannot be given with a tree", tree=torch.ones(2, 1, dtype=torch.int64), slopes=torch.ones(HEADS))
    refused("k_scale is for codes", k_scale=torch.ones(1, 1, 1, 1))
    codes = torch.zeros(2, 8, KV_HEADS, WIDTH, dtype=torch.int8)
    refused("k_scale must have 1 or 1", k_cache=codes, k_scale=torch.ones(2, 8, KV_HEADS, 2))
    refused("k_scale", k_cache=codes, k_scale=torch.ones(2, 7, KV_HEADS, 1))
    refused("value_dim is 8, but v_cache", value_dim=8)
    cache = torch.zeros(2, 8, KV_HEADS, WIDTH)
    with pytest.raises(ValueError, match="k_cache, which is written, shares memory with v_cache"):
        tw.cache_write(cache[0].clone(), cache[1].clone(), cache, cache, torch.arange(8))


KERNELS, READING = (f"tilewright/attention/{name}.py" for name in ("cached_portable", "cache_read"))
BROKEN = {
    "the last part dropped": (KERNELS, "parts = max(1, cdiv(capacity, split))", "parts = max(1, capacity // split)"),
    "a page read twice": (READING, "(j.to(tl.uint32) // PAGE).to(tl.int32)", "(j.to(tl.uint32) // PAGE // 2).to(tl.int32)"),
    "a page not clamped": (READING, "known = there & (page >= 0) & (page < PAGES)", "known = there"),
    "a part that begins late": (KERNELS, "begin = part * SPLIT", "begin = part * SPLIT + (part > 0)"),
    "a sink in every part": (KERNELS, "live & (part == 0), float", "live, float"),
    "what a tree hides is multiplied": (
        KERNELS, "there = there & is_drawn(seen.drafts, j - seen.shift)", "there = there",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_broken_kernels_are_noticed(name, tmp_path):
    """The kernels with one edit: the identities above do not hold for them."""
    file, old, new = BROKEN[name]
    mutant = Mutant(name, old, new, "", "", file, through=(KERNELS,) if file == READING else ())
    lengths, nodes = [37, 5], 2
    q, k, v, kv_len = sequences(lengths, nodes)
    (k_cache, table), (v_cache, _) = (paged(t, lengths, 4, spare=1) for t in (k, v))
    tree = torch.tensor([[1, 2], [1, 3]])
    if name == "what a tree hides is multiplied":
        tree[0] = 2
        at = 37 - nodes  # the first draft of the first sequence, which then none of its queries sees
        v_cache[table[0, at // 4], at % 4] = math.nan
    table[1, 1] = -7 if name == "a page not clamped" else table[1, 1]
    values = tw.cached_attention.op.signature.bind((q, k_cache, v_cache, table, kv_len), {"tree": tree, "split": 16})
    values["sink"] = torch.zeros(HEADS)
    wanted = tw.cached_attention(**values)
    near(launched(**values), wanted)
    options = {n: value for n, value in values.items() if n not in ("backend", "out")}
    with loaded(mutant, tmp_path, "broken") as module, pytest.raises((AssertionError, InterpreterError)):
        near(module.forward(**options), wanted)


def test_a_window_past_every_key_is_none():
    """Also of more queries than keys, where a position less such a window would not fit into 32 bits."""
    q, k, v = (drawn(1, n, 1, 16, seed=n) for n in (5, 12, 13))
    for there in (3, 12):
        given = q, k, v[:, :12], None, torch.tensor([there], dtype=torch.int32)
        for far in (2**31 - 1, 2**31 - 5, 2**40):
            same(launched(*given, left=far), launched(*given))


def test_a_cache_of_one_slot_has_one_scale_for_all_heads_that_is_read():
    k, cache = drawn(1, 2, 16), torch.zeros(1, 1, 2, 16, dtype=torch.int8)
    scale = torch.full((1, 1, 1, 1), 0.05)
    with tw.force("triton"):
        tw.cache_write(k, None, cache, None, torch.tensor([0]), k_scale=scale)
    assert scale.item() == pytest.approx(0.05)
    assert torch.equal(cache[0, 0].int(), (k[0] / scale.item()).round().clamp(-127, 127).int())
