"""Chunks of prompts over caches on hardware: Hopper's kernel against float64 and the portable one, over pages of every size and of
every kind, with NaN in all that nobody sees; the same bits in a hundred runs, and in a graph as outside of it. A kernel that waits
for ever ends the process."""

from __future__ import annotations

import hashlib

import pytest
import torch

from tests.attention_oracle import ints
from tests.cached_oracle import CHUNKS, call, chunk, moved
from tests.gpu import over_caches
from tests.gpu.over_caches import in_the_last_of, laid_in_pages, replays
from tests.gpu.test_attention import a_hundred_alike, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]
WIDTHS = [(24, 24), (64, 64), (96, 72), (128, 128), (192, 128), (256, 256)]
SIZES = (1300, 900, 1100)  # of sequences whose chunks of 600 queries, 14 heads each, are more tiles than programs
LONG = {"length": 600, "heads": 14, "kv_heads": 2}
# What changes from step to step where one graph is replayed: lengths, also such as there is no room for, pages and marks
OTHERS = {
    "a chunk": ({"of": (150, 299)}, {"of": (0, 320)}, {"of": (321, 7)}, {"strays": ((1, 2, 99),)}),
    "packed": (
        {"of": (7, 200, 150, 90), "cu_seqlens_q": ints(0, 1, 200, 350, 420)},
        {"of": (224, 0, 31, 225), "cu_seqlens_q": ints(0, 224, 224, 255, 400)},
    ),
}


def attend(a, backend="hopper_chunks"):
    return over_caches.attend(a, backend)


def digest(*results):
    return hashlib.sha256(b"".join(t.cpu().view(torch.uint8).numpy().tobytes() for t in results)).hexdigest()


def holds(a):
    over_caches.holds(a, "hopper_chunks")


@pytest.mark.parametrize("name", CHUNKS)
def test_kinds(name):
    holds(chunk(name))


@pytest.mark.parametrize(("D", "V"), WIDTHS)
def test_widths(D, V):
    """Of several tiles a program; a page of one sequence is not there."""
    holds(call(*SIZES, **LONG, D=D, V=V, strays=((1, 9, -1),)))
    holds(call(*SIZES, **LONG, D=D, V=V, dtype=torch.float16, page=16, left=333, sink=torch.linspace(-1, 1, 14)))


@pytest.mark.parametrize("group", [1, 4, 8])
def test_heads_that_share_keys(group):
    holds(call(700, 512, length=300, heads=8, kv_heads=8 // group, D=128))


def test_every_page_size_has_the_same_bits():
    """A sequence's keys are walked over in the same blocks, wherever they lie."""
    a = call(*SIZES, **LONG, D=128, page=None, room=1536)
    wanted = digest(*attend(on_gpu(a)))
    for page in (16, 48, 64, 128, 512):
        assert digest(*attend(on_gpu(laid_in_pages(a, page)))) == wanted


def test_packed_sequences_are_each_their_own():
    """A chunk, a step and a draft among others in one call, against one call for each."""
    counts, sizes = [600, 1, 4, 0, 129, 64], [1300, 900, 64, 70, 129, 500]
    marks = torch.tensor([0, *counts]).cumsum(0).int()
    a = on_gpu(call(*sizes, length=int(marks[-1]), heads=8, kv_heads=2, D=128, cu_seqlens_q=marks))
    o, lse = attend(a)
    for b, (begin, end) in enumerate(zip(marks[:-1].tolist(), marks[1:].tolist())):
        if end > begin:
            own = {n: a[n][b : b + 1] for n in ("block_table", "kv_len")}
            alone_o, alone_lse = attend({**a, **own, "q": a["q"][:, begin:end], "cu_seqlens_q": None})
            assert torch.equal(o[:, begin:end], alone_o) and torch.equal(lse[..., begin:end], alone_lse)


@pytest.mark.parametrize("backend", ["hopper_chunks", "portable"])
@pytest.mark.parametrize("kind", ["a chunk", "no such page", "packed"])
def test_a_hundred_runs_have_the_same_bits(kind, backend):
    a = on_gpu(chunk(kind, **({"of": SIZES, **LONG, "D": 128} if kind == "a chunk" else {})))
    a_hundred_alike(lambda: attend(a, backend))


@pytest.mark.parametrize("backend", ["hopper_chunks", "portable"])
@pytest.mark.parametrize("kind", OTHERS)
def test_a_graph_serves_other_lengths_and_tables(kind, backend):
    """Bit for bit what each call gives by itself."""
    room = max(CHUNKS[kind]["of"])
    calls = [on_gpu(moved(chunk(kind, room=room, **other), i)) for i, other in enumerate(({}, *OTHERS[kind]))]
    assert len({digest(*attend(one, backend)) for one in calls}) == len(calls)
    replays(calls, lambda one: attend(one, backend))


def test_a_cache_of_many_pages():
    """Past 2**31 elements: the last of 300,000 pages of 64 keys of two heads."""
    a = call(250, 130, length=100, heads=4, kv_heads=2, D=64)
    assert a["block_table"].shape == (2, 4) and a["k_cache"].shape[1:] == (64, 2, 64)
    in_the_last_of(300_000, a, attend)
