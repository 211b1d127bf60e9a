"""How results lie where that is not plain: formats of what is padded or joined, and dimensions of 1, whose strides aten keeps."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tests.aten.compare import differences
from tests.aten.samples import DEVICE
from tilewright.aten import index_map

LAST, LAST_3D = torch.channels_last, torch.channels_last_3d


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape, device=DEVICE)


def check(calls: dict, overload: str) -> None:
    """All calls are ours, and give what aten's give: when they are new, when a plan is made, and by that."""
    aten = {what: call() for what, call in calls.items()}
    for what, call in calls.items():
        with tw.aten.use("all"):
            for _ in range(3):
                found = differences(call(), aten[what])
                assert not found, (what, found)
            assert tw.aten.report()[overload] == {"taken": 3, "declined": {}}, what


ODD = torch.ones(2, 3, 1, 1, device=DEVICE).as_strided((1, 3, 1, 1), (7, 1, 7, 7))
OPERANDS = {
    "plain": drawn(2, 3, 2, 2),
    "channels last": drawn(2, 3, 2, 2).to(memory_format=LAST),
    "one channel, by its strides last": drawn(2, 1, 3, 3).to(memory_format=LAST),
    "one channel": drawn(2, 1, 3, 3),
    "both at once": ODD,
    "one place": drawn(3, 4, 1, 1),
    "one place, by its strides last": drawn(3, 4, 1, 1).to(memory_format=LAST),
    "a part of channels last": drawn(2, 5, 4, 4).to(memory_format=LAST)[:, 1:4, ::2],
    "one row": drawn(1, 4, 1, 5).transpose(1, 3),
    "expanded channels": drawn(2, 1, 3, 3).expand(2, 4, 3, 3),
    "turned": drawn(2, 3, 4, 5).permute(3, 1, 0, 2),
    "channels last of three": drawn(2, 3, 2, 2, 2).to(memory_format=LAST_3D),
    "one channel of three": drawn(2, 1, 2, 2, 2).to(memory_format=LAST_3D),
    "a matrix, turned": drawn(3, 4).t(),
}


@pytest.mark.parametrize("what", OPERANDS)
def test_formats_of_what_is_padded(what):
    x = OPERANDS[what]
    check({pad: lambda pad=pad: F.pad(x, pad, value=2.0) for pad in ((1, 1), (1, 0, 0, 1), (-1, 1))}, "constant_pad_nd")


@pytest.mark.parametrize("what", OPERANDS)
def test_what_is_only_cut_keeps_its_strides(what):
    x = OPERANDS[what]
    pads = ((0, 0), (-1, 0), (0, 0, 0, -1))
    check({pad: lambda pad=pad: torch.ops.aten.constant_pad_nd(x, pad, 2.0) for pad in pads}, "constant_pad_nd")


@pytest.mark.parametrize("what", OPERANDS)
def test_formats_of_what_is_joined(what):
    x, none = OPERANDS[what], torch.zeros(0, device=DEVICE)
    calls = {d: lambda d=d: torch.cat([x, x + 1], d) for d in (1, -1)}
    calls |= {"beside nothing": lambda: torch.cat([x, none, x], 1), "after nothing": lambda: torch.cat([none, x], 0)}
    if x.dim() == 4:
        calls |= {
            "beside rows": lambda: torch.cat([x, x.contiguous()], 1),
            "beside none": lambda: torch.cat([x, x[:, :0]], 1),
        }
    check(calls, "cat")


def strided(rank: int, draw: random.Random) -> Tensor:
    """A tensor of few elements with strides of all kinds, many of them almost channels last."""
    shape = [draw.choice((1, 1, 2, 3)) for _ in range(rank)]
    strides, step = [0] * rank, 1
    for d in draw.choice((range(rank), [1, *range(rank - 1, 1, -1), 0], draw.sample(range(rank), rank))):
        strides[d] = step
        step *= shape[d] * draw.choice((1, 1, 1, 2))
    if draw.random() < 0.5:
        strides[draw.randrange(rank)] = draw.choice((0, 1, 2, 3, 6, 9))
    return torch.zeros(20_000, device=DEVICE).as_strided(shape, strides)


@pytest.mark.parametrize("rank", [3, 4, 5])
def test_the_format_of_strides_is_torchs(rank):
    """aten itself pads each of them."""
    draw, seen = random.Random(rank), set()
    for _ in range(2000):
        x = strided(rank, draw)
        form = index_map.lies(x)
        wanted = torch.ops.aten.constant_pad_nd(x, [1, 2]).stride()
        assert torch.empty([*x.shape[:-1], x.shape[-1] + 3], memory_format=form).stride() == wanted, (
            x.shape,
            x.stride(),
        )
        seen.add((form, x.is_contiguous()))
    assert len(seen) == (2 if rank == 3 else 4), seen


WEIGHTS = {"none": None, "plain": (1,), "odd": (7,)}
ROWS = [
    ((1, 4), (1, 1), 4), ((1, 4), (4, 1), 4), ((2, 1, 3), (3, 9, 1), 3), ((2, 1, 3), (3, 3, 1), 3), ((3, 1), (1, 5), 1),
    ((3, 1), (1, 1), 1),
]  # fmt: skip


@pytest.mark.parametrize(("at", "weight"), list(itertools.product(range(len(ROWS)), WEIGHTS)))
def test_rms_norm_of_dimensions_of_1(at, weight):
    """A processor's aten keeps their strides; ours is asked where they are as of new memory."""
    shape, strides, n = ROWS[at]
    x, w = drawn(64).as_strided(shape, strides), WEIGHTS[weight]
    if w is not None:
        w = drawn(64).as_strided((n,), (1,) if n > 1 else w)
    call = lambda: torch.ops.aten._fused_rms_norm(x, (n,), w, 1e-5)  # noqa: E731
    aten = call()
    with tw.aten.use("all"):
        for _ in range(3):
            made = call()
            assert [t.stride() for t in made] == [t.stride() for t in aten]
            torch.testing.assert_close(made, aten)
        plain = all(t.stride() == torch.empty(t.shape).stride() for t in (x, w) if t is not None)
        assert DEVICE != "cpu" or tw.aten.report()["_fused_rms_norm"]["taken"] == (3 if plain else 0)
