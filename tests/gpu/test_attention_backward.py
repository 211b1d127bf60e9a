"""Attention's backward for Hopper on hardware: against its portable sibling and float64 at every width and variant, with NaN in
what nobody sees, the same bits every time and in a graph, and more tiles than programs. The runner of these tests ends a process
that hangs."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tilewright.attention import portable
from tilewright.attention.attention import reference_lse
from tilewright.attention.hopper import backward as hopper
from tilewright.check.oracle import bits, rms
from tilewright.core.target import Target

pytestmark = pytest.mark.gpu
BARS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
OPTIONS = dict.fromkeys(
    ("scale", "left", "right", "sink", "slopes", "mask", "kv_len", "cu_seqlens_q", "cu_seqlens_k")
) | {"causal": False, "softcap": 0.0, "backend": "hopper"}
WIDTHS = [(64, 64), (128, 128), (192, 128), (96, 96), (72, 40), (64, 128), (128, 64), (8, 8), (160, 72)]
VARIANTS = {
    "full": {},
    "causal": {"causal": True},
    "window": {"left": 200, "right": 33},
    "left": {"causal": True, "left": 129},
    "softcap": {"causal": True, "softcap": 3.0},
    "slopes": {"causal": True, "slopes": [0.1, 0.02, 0.05, 0.3]},
    "sink": {"causal": True, "sink": [0.5, -1.0, 2.0, -math.inf]},
    "lengths": {"causal": True, "kv_len": [500, 0]},
    "packed": {"causal": True, "cu_seqlens_q": [5, 300, 300, 811], "cu_seqlens_k": [0, 420, 500, 900]},
    "packed window": {
        "left": 100, "right": 7, "softcap": 2.0, "cu_seqlens_q": [0, 300, 301, 830], "cu_seqlens_k": [0, 420, 500, 900],
        "kv_len": [420, 3, 333],
    },
}  # fmt: skip
INTEGERS = {"kv_len", "cu_seqlens_q", "cu_seqlens_k"}


@pytest.fixture(autouse=True)
def chip() -> None:
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("a kernel for Hopper")


def normal(*shape: int, seed: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator("cuda").manual_seed(seed), device="cuda").to(dtype)


def call(
    D: int, V: int, n: int, m: int, dtype: torch.dtype = torch.bfloat16, heads: int = 4, kv_heads: int = 2, batch: int = 2, **given
) -> tuple[SimpleNamespace, Tensor, Tensor]:  # fmt: skip
    """What the forward saves, and the gradients of its results."""
    options = dict(OPTIONS)
    for name, value in given.items():
        kind = torch.int32 if name in INTEGERS else torch.float32
        options[name] = torch.tensor(value, device="cuda", dtype=kind) if isinstance(value, list) else value
    batch = 1 if options["cu_seqlens_q"] is not None else batch
    q = normal(batch, n, heads, D, seed=0, dtype=dtype)
    k, v = (normal(batch, m, kv_heads, width, seed=1 + i, dtype=dtype) for i, width in enumerate((D, V)))
    o, lse = portable.forward(q, k, v, **options)
    needs = {"q", "k", "v"} | ({"sink"} if options["sink"] is not None else set())
    saved = SimpleNamespace(q=q, k=k, v=v, o=o, lse=lse, needs=needs, **options)
    assert hopper.fits_backward(Target.at(q.device), saved)
    return saved, normal(*o.shape, seed=3, dtype=dtype), normal(*lse.shape, seed=4, dtype=torch.float32)


def exact(saved: SimpleNamespace, do: Tensor, dlse: Tensor | None) -> tuple:
    options = {name: getattr(saved, name) for name in OPTIONS}
    leaves = [getattr(saved, name).double().requires_grad_() for name in ("q", "k", "v")]
    if saved.sink is not None:
        leaves.append(saved.sink.double().requires_grad_())
        options["sink"] = leaves[3]
    o, lse = reference_lse(*leaves[:3], **options)
    total = (o * do.double()).sum()
    if dlse is not None:
        alive = lse.detach() > -math.inf
        total = total + (lse * dlse.double())[alive].sum()
    return torch.autograd.grad(total, leaves)


def close(found: tuple, wanted: tuple, bar: float) -> None:
    for name, one, other in zip(("q", "k", "v", "sink"), found, wanted):
        if other is None:
            assert one is None, name
            continue
        assert one.isfinite().all(), f"d{name} is not finite"
        error = rms(one.double() - other.double()) / max(rms(other.double()), 1e-9)
        # That of a sink is a sum over all rows of their deltas, of which each has the rounding of o
        assert error <= (4 * bar if name == "sink" else bar), f"d{name}: relative RMS error {error:.2e}"


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("widths", WIDTHS, ids=str)
def test_against_float64_and_the_portable_sibling(widths, variant):
    """One dtype for a width and a variant, the other for their neighbours, so that each width and each variant has both: what a
    dtype changes, factors of products and what is stored, no width and no variant changes."""
    dtype = list(BARS)[(WIDTHS.index(widths) + list(VARIANTS).index(variant)) % 2]
    saved, do, dlse = call(*widths, 830, 900, dtype, **VARIANTS[variant])
    dlse = dlse if variant in ("full", "sink", "packed") else None
    found = hopper.backward(saved, do, dlse)
    close(found, exact(saved, do, dlse), BARS[dtype])
    close(found, portable.backward(saved, do, dlse), 2 * BARS[dtype])


@pytest.mark.parametrize("variant", ["left", "lengths", "packed", "packed window"])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (96, 96)], ids=str)
def test_what_nobody_sees_may_be_nan(widths, variant):
    saved, do, _ = call(*widths, 830, 1300 if variant == "left" else 900, **VARIANTS[variant])
    wanted = hopper.backward(saved, do, None)
    unseen = (wanted[1] == 0).all(-1) & (wanted[2] == 0).all(-1)
    alone = (saved.lse == -math.inf).all(1)
    assert unseen.any() or alone.any()
    for t in (saved.k, saved.v):
        t[unseen] = math.nan
    for t in (saved.q, do):
        t[alone] = math.nan
    for one, other in zip(hopper.backward(saved, do, None)[:3], wanted):
        assert torch.equal(one, other)


@pytest.mark.parametrize("variant", ["full", "causal", "packed window"])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128), (96, 96)], ids=str)
def test_a_hundred_runs_have_the_same_bits(widths, variant):
    """With other work beside it half of the time, so that programs begin at other times."""
    size = (830, 900) if "packed" in variant else (4099, 4099)
    saved, do, _ = call(*widths, *size, heads=8, **VARIANTS[variant])
    other, side = torch.cuda.Stream(), normal(4096, 4096, seed=9, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    first = hopper.backward(saved, do, None)[:3]
    for i in range(1, 100):
        if i % 2:
            with torch.cuda.stream(other):
                side @ side
        for name, t, wanted in zip("qkv", hopper.backward(saved, do, None), first):
            assert torch.equal(bits(t), bits(wanted)), f"d{name} of run {i}"


@pytest.mark.parametrize("variant", ["causal", "packed window"])
@pytest.mark.parametrize("widths", [(64, 64), (128, 128), (192, 128)], ids=str)
def test_a_graph_gives_the_same_bits(widths, variant):
    """Of other numbers than those that it was captured with, and again: turns are counted from the start in each replay."""
    saved, do, _ = call(*widths, 830, 900, **VARIANTS[variant])
    hopper.backward(saved, do, None)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = hopper.backward(saved, do, None)[:3]
    for round in range(3):
        for i, t in enumerate((saved.q, saved.k, saved.v, do)):
            t.copy_(normal(*t.shape, seed=10 * round + i, dtype=t.dtype))
        o, lse = portable.forward(saved.q, saved.k, saved.v, **{name: getattr(saved, name) for name in OPTIONS})
        saved.o.copy_(o), saved.lse.copy_(lse)
        wanted = hopper.backward(saved, do, None)
        for t in made:
            t.fill_(math.nan)
        graph.replay()
        assert all(torch.equal(one, other) for one, other in zip(made, wanted))


@pytest.mark.parametrize(
    ("widths", "n", "m", "heads", "kv_heads", "options"),
    [
        ((128, 128), 4099, 4099, 14, 2, {"causal": True}),  # seven heads to a key head
        ((128, 128), 64, 20_000, 2, 2, {}),  # more tiles than programs for one block
        ((64, 64), 1, 300, 4, 4, {"causal": True}),
        ((128, 128), 3000, 5, 4, 2, {"causal": True}),  # most queries see nothing
        ((192, 128), 2048, 2048, 16, 16, {"causal": True}),
    ],
)
def test_shapes_that_are_hard_to_share(widths, n, m, heads, kv_heads, options):
    saved, do, dlse = call(*widths, n, m, heads=heads, kv_heads=kv_heads, **options)
    close(hopper.backward(saved, do, dlse), portable.backward(saved, do, dlse), 2 * BARS[torch.bfloat16])


def test_gradients_of_any_strides():
    """The gradient of o may be expanded, the tensors parts of one projection."""
    saved, do, _ = call(128, 128, 300, 300, heads=4, kv_heads=4, causal=True)
    whole = torch.cat([saved.q, saved.k, saved.v], 2)
    wanted = hopper.backward(saved, do, None)
    for name, part in zip("qkv", whole.split(4, 2)):
        setattr(saved, name, part)
    for one, other in zip(hopper.backward(saved, do, None)[:3], wanted):
        assert torch.equal(one, other)
    ones = torch.ones(1, device="cuda", dtype=do.dtype).expand(do.shape)
    close(hopper.backward(saved, ones, None), portable.backward(saved, ones, None), 2 * BARS[torch.bfloat16])
