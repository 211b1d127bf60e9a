"""Attention over caches of latents on hardware: Hopper's kernels against float64 and the portable one, of every kind and at the
lengths where blocks, parts and tiles end, with NaN in all that nobody sees; the same bits in a hundred runs, in any batch, and in a
graph as outside of it. A kernel that waits for ever ends the process."""

from __future__ import annotations

import pytest
import torch

from tests.cached_oracle import agrees, moved
from tests.gpu.over_caches import alone_as_in_a_batch, attend, go_where_they_are_told, replays, same
from tests.gpu.test_attention import a_hundred_alike, on_gpu
from tests.latent_oracle import CALLS, FEW, NOWHERE, call

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_hopper")]
OURS = ("hopper_latent", "hopper_latent_few")


def in_parts(a, o, lse, sequences=4, heads=8):
    """A call as several, with the results of each: the truth has keys and values for every head, in float64."""
    apart = ("q", "kv_len", *(("k_cache", "k_rope") if a["block_table"] is None else ("block_table",)))
    for first in range(0, len(o), sequences):
        these = slice(first, first + sequences)
        own = {name: a[name][these] for name in apart if a[name] is not None}
        for head in range(0, o.shape[2], heads):
            some = slice(head, head + heads)
            yield {**a, **own, "q": own["q"][:, :, some]}, o[these, :, some], lse[these, some]


def held(a, backend):
    """Results by a kernel of Hopper's, held to float64 and to the portable one."""
    given = on_gpu(a)
    o, lse = attend(given, backend)
    for part in in_parts(given, o, lse):
        agrees(*part)
    other, other_lse = attend(given, "portable")
    assert torch.equal(o.isnan(), other.isnan()) and torch.equal(lse.isnan(), other_lse.isnan())
    gap, size = ((t.double()).nan_to_num(0.0).square().mean().sqrt() for t in (o.double() - other.double(), other))
    assert gap <= 4e-3 * max(1e-3, size)
    return o, lse


@pytest.mark.parametrize("name", CALLS)
def test_kinds(name):
    held(CALLS[name](), "hopper_latent")


@pytest.mark.parametrize("name", FEW)
def test_kinds_of_few_rows(name):
    held(CALLS[name](), "hopper_latent_few")


@pytest.mark.parametrize("heads", [16, 13, 1])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 8192])
def test_lengths_of_few_rows(length, heads):
    held(call((length,), room=8192, heads=heads), "hopper_latent_few")
    held(call((length, 3000), room=8192, heads=heads, page=64, tokens=2), "hopper_latent_few")


@pytest.mark.parametrize("heads", [128, 64, 16, 1])
@pytest.mark.parametrize("length", [1, 63, 64, 65, 128, 129, 8192])
def test_lengths(length, heads):
    held(call((length,), room=8192, heads=heads), "hopper_latent")
    held(call((length, 3000), room=8192, heads=heads, page=64, tokens=2), "hopper_latent")


@pytest.mark.parametrize("backend", OURS)
def test_a_batch_as_a_server_has_it(backend):
    """More programs than SMs, uneven, some without keys, one of more than there is room for."""
    lengths = tuple((97 * i * i) % 4097 for i in range(36)) + (0, 4097, 4096, 1)
    held(call(lengths, room=4096, heads=16, page=64), backend)
    heads = 16 if backend == "hopper_latent_few" else 128
    held(call(lengths[-5:], room=4096, heads=heads, tokens=2, page=64, dtype=torch.float16), backend)


@pytest.mark.parametrize(
    ("backend", "heads"), [*((one, 72) for one in ("hopper_latent", "portable", "auto")), ("hopper_latent_few", 8)]
)
@pytest.mark.parametrize("values", [512, 256])
def test_bits_are_a_sequence_s_own(values, backend, heads):
    """Alone, with a table no wider than it needs and with one that has room for far more, as in a batch."""
    lengths = (1000, 64, 0, 700, 65, 2048)
    a = on_gpu(call(lengths, page=64, heads=heads, tokens=2, values=values, split=512))
    alone_as_in_a_batch(a, lengths, NOWHERE, lambda one: attend(one, backend))


def test_a_batch_that_is_measured_has_the_bits_of_one_sequence():
    """At sizes at which `auto` without a split takes Hopper's kernel for the batch and the portable one for a sequence of it."""
    lengths = tuple(4096 - 61 * i for i in range(64))
    a = on_gpu(call(lengths, room=4096, heads=16, page=64, split=1024))
    whole = attend(a, "auto")
    for b in (0, 31, 63):
        own = {name: a[name][b : b + 1] for name in ("q", "block_table", "kv_len")}
        same(attend({**a, **own}, "auto"), (t[b : b + 1] for t in whole))


@pytest.mark.parametrize(
    ("backend", "heads"),
    [*((one, n) for one in ("hopper_latent", "portable") for n in (16, 128)), ("hopper_latent_few", 16)],
)
def test_a_hundred_runs_have_the_same_bits(heads, backend):
    a = on_gpu(call((3000, 1, 777, 64, 2500), room=4096, heads=heads, tokens=2, page=64))
    a_hundred_alike(lambda: attend(a, backend))


@pytest.mark.parametrize("backend", [*OURS, "portable"])
@pytest.mark.parametrize("split", [512, None])
def test_a_graph_serves_other_lengths_and_tables(split, backend):
    """Bit for bit what each call gives by itself; there is room for 1024 keys."""
    steps = ((1000, 65, 300), (64, 1000, 1), (0, 1024, 513), (1025, 700, 999))
    calls = [on_gpu(moved(call(lengths, room=1024, page=64, split=split), i)) for i, lengths in enumerate(steps)]
    replays(calls, lambda one: attend(one, backend))


@pytest.mark.parametrize("backend", OURS)
def test_results_go_where_they_are_told(backend):
    go_where_they_are_told(on_gpu(call((300, 65), heads=16, split=512)), backend)
