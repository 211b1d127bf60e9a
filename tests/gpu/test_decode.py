"""Decoding over caches on hardware: Hopper's kernel against float64 and the portable one, of every kind and at the lengths where
blocks, parts and boxes end, with NaN in all that nobody sees; the same bits in a hundred runs, in any batch, and in a graph as
outside of it. A kernel that waits for ever ends the process."""

from __future__ import annotations

import faulthandler
import math

import pytest
import torch

import tilewright as tw
from tests.cached_oracle import LOWEST, agrees, call, coded, moved
from tests.decode_oracle import CODED, DECODES, GROUP, decode
from tests.decode_oracle import bits as bits_of
from tests.gpu.test_attention import a_hundred_alike, bits, near
from tilewright.core.target import Target

pytestmark = pytest.mark.gpu
LIMIT = 300  # seconds for a test, compiling included


@pytest.fixture(autouse=True)
def limited():
    """End the process, with what it was doing, if a test takes too long."""
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("the kernel is Hopper's")
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def on_gpu(a):
    return {name: t.cuda() if torch.is_tensor(t) else t for name, t in a.items()}


def attend(a, backend="hopper_decode"):
    return tw.cached_attention(**a, backend=backend)


def same(found, wanted):
    """Bit for bit, NaN too."""
    for a, b in zip(found, wanted, strict=True):
        assert torch.equal(bits(a.contiguous()), bits(b.contiguous()))


def holds(a):
    given = on_gpu(a)
    o, lse = attend(given)
    agrees(given, o, lse)
    other_o, other_lse = attend(given, "portable")
    near(o, other_o)
    assert torch.equal(lse.isnan(), other_lse.isnan())


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
        order = torch.randperm(3 * 1536 // page, generator=torch.Generator().manual_seed(page))
        spread = {}
        for n in ("k_cache", "v_cache"):
            spread[n] = torch.empty_like(a[n]).reshape(-1, page, *a[n].shape[2:])
            spread[n][order] = a[n].reshape(spread[n].shape)
        same(attend(on_gpu({**a, **spread, "block_table": order.reshape(3, -1).int()})), wanted)


def test_bits_are_a_sequence_s_own():
    """With a split that is given: alone, with a table no wider than it needs and with a far wider one, as in a batch."""
    lengths = (1000, 64, 0, 700, 65, 2048)
    a = on_gpu(call(*lengths, length=2, **GROUP, split=512))
    whole = attend(a)
    for b, length in enumerate(lengths):
        own = {name: a[name][b : b + 1] for name in ("q", "block_table", "kv_len")}
        table = own["block_table"]
        for width in (max(1, -(-length // 64)), table.shape[1], 512):
            room = torch.full((1, width), LOWEST, dtype=torch.int32, device="cuda")
            both = min(width, table.shape[1])
            room[:, :both] = table[:, :both]
            same(attend({**a, **own, "block_table": room}), (t[b : b + 1] for t in whole))


@pytest.mark.parametrize("page", [None, 1, 16, 64])
def test_a_hundred_runs_have_the_same_bits(page):
    a = on_gpu(call(3000, 1, 777, 64, 2500, length=1, **GROUP, page=page, room=4096))
    a_hundred_alike(lambda: attend(a))


@pytest.mark.parametrize("split", [512, None])
def test_a_graph_serves_other_lengths_and_tables(split):
    """Bit for bit what each call gives by itself; there is room for 1024 keys."""
    steps = ((1000, 65, 300), (64, 1000, 1), (0, 1024, 513), (1025, 700, 999))
    calls = [on_gpu(moved(call(*n, length=1, **GROUP, room=1024, split=split), i)) for i, n in enumerate(steps)]
    a = {name: t.clone() if torch.is_tensor(t) else t for name, t in calls[0].items()}
    eager = [attend(one) for one in calls]
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = attend(a)
    for one, wanted in [*zip(calls, eager)] * 2:
        for name, t in one.items():
            if torch.is_tensor(t):
                a[name].copy_(t)
        for t in made:
            t.fill_(math.inf)
        graph.replay()
        same(made, wanted)


@pytest.mark.parametrize("split", [64, 512])
def test_results_go_where_they_are_told(split):
    """Memory of other strides, and what lies between its rows is left alone."""
    a = on_gpu(call(300, 65, length=1, **GROUP, split=split, room=512))
    wanted = attend(a)
    room = torch.full((2, 1, 8, 192), 7.0, dtype=torch.bfloat16, device="cuda")
    turned = torch.empty(2, 128, 8, 1, dtype=torch.bfloat16, device="cuda").permute(0, 3, 2, 1)
    for o in (room[..., :128], turned):
        out = (o, torch.empty_like(wanted[1]))
        tw.cached_attention(**a, backend="hopper_decode", out=out)
        same(out, wanted)
    assert (room[..., 128:] == 7.0).all()


def test_a_cache_of_many_keys_in_pages_of_one():
    """Past 2**31 elements, copied by threads: the last of 19,200,000 keys of two heads."""
    keys = 19_200_000
    a = call(250, 130, length=1, heads=4, kv_heads=2, D=64, page=1)
    small = {n: a[n] for n in ("k_cache", "v_cache")}
    far = {n: torch.empty(keys, 1, 2, 64, dtype=torch.bfloat16, device="cuda") for n in small}
    first = keys - small["k_cache"].shape[0]
    for n, t in small.items():
        far[n][first:] = t.cuda()
    table = torch.where(a["block_table"] >= 0, a["block_table"] + first, a["block_table"])
    o, lse = attend({**on_gpu(a), **far, "block_table": table.cuda()})
    agrees(a, o.cpu(), lse.cpu())


def test_a_cache_of_many_pages():
    """Past 2**31 elements: the last of 300,000 pages of 64 keys of two heads."""
    pages = 300_000
    a = call(250, 130, length=1, heads=4, kv_heads=2, D=64)
    small = {n: a[n] for n in ("k_cache", "v_cache")}
    far = {n: torch.empty(pages, 64, 2, 64, dtype=torch.bfloat16, device="cuda") for n in small}
    first = pages - small["k_cache"].shape[0]
    for n, t in small.items():
        far[n][first:] = t.cuda()
    table = torch.where(a["block_table"] >= 0, a["block_table"] + first, a["block_table"])
    o, lse = attend({**on_gpu(a), **far, "block_table": table.cuda()})
    agrees(a, o.cpu(), lse.cpu())
