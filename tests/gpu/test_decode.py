"""Decoding over caches on hardware: Hopper's kernel against float64 and the portable one, of every kind and at the lengths where
blocks, parts and boxes end, with NaN in all that nobody sees; the same bits in a hundred runs, in any batch, and in a graph as
outside of it. A kernel that waits for ever ends the process."""

from __future__ import annotations

import math

import pytest
import torch

from tests.cached_oracle import LOWEST, call, coded, moved
from tests.decode_oracle import CODED, DECODES, GROUP, decode
from tests.decode_oracle import bits as bits_of
from tests.gpu import over_caches
from tests.gpu.over_caches import (
    alone_as_in_a_batch,
    go_where_they_are_told,
    in_the_last_of,
    laid_in_pages,
    replays,
    same,
)
from tests.gpu.test_attention import a_hundred_alike, near, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]


NAME = "hopper_decode"


def attend(a):
    return over_caches.attend(a, NAME)


def holds(a):
    over_caches.holds(a, NAME)


@pytest.mark.parametrize("name", [*DECODES, *CODED])
def test_kinds(name):
    holds(decode(name))


@pytest.mark.parametrize("keys", [1, 63, 64, 65, 127, 128, 129, 448, 449, 2048, 2049, 5000])
def test_lengths(keys):
    """As many blocks as there are stages, one more and many more; parts that end with a block and in one."""
    holds(call(keys, 3000, length=1, **GROUP, room=5056))
    holds(call(keys, length=2, **GROUP, page=16, room=5056, split=1024))
    holds(call(keys, length=2, **GROUP, page=1, room=5056, split=1024))


@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [1, 3, 4, 8])
def test_rows(group, length):
    holds(call(700, 66, length=length, heads=2 * group, kv_heads=2, D=128, split=256))
    holds(call(700, 66, length=length, heads=2 * group, kv_heads=2, D=64, page=16, left=100))
    holds(call(700, 66, length=length, heads=2 * group, kv_heads=2, D=128, page=1, left=100))


KINDS = (torch.float8_e4m3fn, torch.int8)
OF_HEADS = ("heads", "heads")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("keys", [1, 63, 64, 65, 129, 832, 833, 2048, 2049, 5000])
def test_lengths_over_codes(keys, kind):
    holds(coded(call(keys, 3000, length=1, **GROUP, room=5056), kind, OF_HEADS))
    holds(coded(call(keys, length=2, **GROUP, page=16, room=5056, split=1024), kind, OF_HEADS))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [1, 3, 8])
def test_rows_over_codes(group, length, kind):
    sizes = {"heads": 2 * group, "kv_heads": 2, "length": length}
    holds(coded(call(700, 66, **sizes, D=128, split=256), kind, OF_HEADS))
    holds(coded(call(700, 66, **sizes, D=64, V=48, page=16, left=100), kind, ("all", None)))


def test_every_code_is_the_number_that_it_is():
    """Values are all 256 codes, one key to each sequence, and keys are scored one column at a time."""
    for kind in KINDS:
        codes = torch.arange(256, dtype=torch.uint8).view(kind).reshape(2, 1, 1, 128)
        ones = torch.zeros(2, 1, 1, 128).to(kind)
        a = {"q": torch.eye(16, 128).reshape(1, 1, 16, 128).repeat(2, 1, 1, 1).bfloat16(), "scale": 1.0}
        a |= {"kv_len": torch.tensor([1, 1], dtype=torch.int32)}
        o, _ = attend(on_gpu({**a, "k_cache": ones, "v_cache": codes}))
        wanted = codes.float().expand(2, 1, 16, 128)
        assert torch.equal(o.isnan().cpu(), wanted.isnan())
        assert torch.equal(o.float().cpu().nan_to_num(), wanted.bfloat16().float().nan_to_num())
        for first in range(0, 128, 16):
            a["q"] = torch.zeros(2, 1, 16, 128, dtype=torch.bfloat16)
            a["q"][..., first : first + 16] = torch.eye(16)
            finite = codes.float().nan_to_num().to(kind)
            _, lse = attend(on_gpu({**a, "k_cache": finite, "v_cache": ones}))
            near(lse.cpu()[..., 0], finite.float()[:, 0, 0, first : first + 16])


@pytest.mark.parametrize("page", [None, 16])
def test_a_hundred_runs_over_codes_have_the_same_bits(page):
    a = on_gpu(coded(call(3000, 1, 777, 64, 2500, length=1, **GROUP, page=page, room=4096), KINDS[0], OF_HEADS))
    a_hundred_alike(lambda: attend(a))


@pytest.mark.parametrize("length", [1, 2, 31, 32, 33, 64])
@pytest.mark.parametrize("page", [None, 16])
def test_trees(length, page):
    """Drafts that end with a block, in it and a block further on, and more of them than keys; some that nobody sees."""
    lengths = (length, 64, 65, 100, 128, 700, 1, 0, 511, 575)
    tree = bits_of(len(lengths), length, (0, length // 2, length - 1)[: length // 2])
    for split in (None, 64):
        holds(call(*lengths, length=length, heads=2, kv_heads=2, D=128, page=page, room=720, tree=tree, split=split))


def test_a_batch_as_a_server_has_it():
    """More programs than run at a time, uneven, some without keys, one of more than there is room for."""
    lengths = tuple((97 * i * i) % 4097 for i in range(60)) + (0, 4097, 4096, 1)
    holds(call(*lengths, length=1, **GROUP, room=4096))
    holds(call(*lengths, length=1, **GROUP, room=4096, page=16))
    holds(call(*lengths, length=1, **GROUP, room=4096, page=1))


@pytest.mark.parametrize("by_head", [False, True])
def test_caches_of_other_strides(by_head):
    """Heads before tokens, or keys and values of one allocation."""
    a = on_gpu(decode("parts"))
    wanted = attend(a)
    for name in ("k_cache", "v_cache"):
        t = a[name]
        wide = torch.full((*t.shape[:3], 2 * t.shape[3]), math.nan, dtype=t.dtype, device="cuda")
        laid = t.transpose(1, 2).contiguous().transpose(1, 2) if by_head else wide[..., : t.shape[3]].copy_(t)
        a[name] = laid
    same(attend(a), wanted)


def test_every_page_size_has_the_same_bits():
    """A sequence's keys are walked over in the same blocks, wherever they lie."""
    a = call(1300, 900, 1100, length=2, **GROUP, page=None, room=1536, split=512)
    wanted = attend(on_gpu(a))
    for page in (1, 2, 3, 8, 16, 24, 32, 48, 64, 128, 512):
        same(attend(on_gpu(laid_in_pages(a, page))), wanted)


def test_bits_are_a_sequence_s_own():
    """With a split that is given: alone, with a table no wider than it needs and with a far wider one, as in a batch."""
    lengths = (1000, 64, 0, 700, 65, 2048)
    a = on_gpu(call(*lengths, length=2, **GROUP, split=512))
    alone_as_in_a_batch(a, lengths, LOWEST, attend)


@pytest.mark.parametrize("page", [None, 1, 16, 64])
def test_a_hundred_runs_have_the_same_bits(page):
    a = on_gpu(call(3000, 1, 777, 64, 2500, length=1, **GROUP, page=page, room=4096))
    a_hundred_alike(lambda: attend(a))


@pytest.mark.parametrize("split", [512, None])
def test_a_graph_serves_other_lengths_and_tables(split):
    """Bit for bit what each call gives by itself; there is room for 1024 keys."""
    steps = ((1000, 65, 300), (64, 1000, 1), (0, 1024, 513), (1025, 700, 999))
    calls = [on_gpu(moved(call(*n, length=1, **GROUP, room=1024, split=split), i)) for i, n in enumerate(steps)]
    replays(calls, attend)


@pytest.mark.parametrize("split", [64, 512])
def test_results_go_where_they_are_told(split):
    go_where_they_are_told(on_gpu(call(300, 65, length=1, **GROUP, split=split, room=512)), NAME)


def test_a_cache_of_many_keys_in_pages_of_one():
    """Past 2**31 elements, copied by threads: the last of 19,200,000 keys of two heads."""
    in_the_last_of(19_200_000, call(250, 130, length=1, heads=4, kv_heads=2, D=64, page=1), attend)


def test_a_cache_of_many_pages():
    """Past 2**31 elements: the last of 300,000 pages of 64 keys of two heads."""
    in_the_last_of(300_000, call(250, 130, length=1, heads=4, kv_heads=2, D=64), attend)
