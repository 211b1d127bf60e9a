"""Which backwards of attention Hopper's own kernel takes, what it is launched with, and that the others are the portable one's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tilewright.attention.hopper import backward as hopper
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

HOPPER = replace(TARGETS["sm_90"], gluon=True)
BF16, HALF, FP32, INT32 = torch.bfloat16, torch.float16, torch.float32, torch.int32
OPTIONS = dict.fromkeys(
    ("scale", "left", "right", "sink", "slopes", "mask", "kv_len", "cu_seqlens_q", "cu_seqlens_k")
) | {"causal": True, "softcap": 0.0}


def blank(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def saved(D=128, V=None, n=300, m=310, heads=4, kv_heads=2, batch=2, dtype=BF16, **given) -> SimpleNamespace:
    V = D if V is None else V
    q, k, v = (blank(batch, *size, dtype=dtype) for size in ((n, heads, D), (m, kv_heads, D), (m, kv_heads, V)))
    made = {"q": q, "k": k, "v": v, **OPTIONS, "needs": frozenset({"q", "k", "v"}), "backend": "hopper", **given}
    o, lse = blank(batch, n, heads, V, dtype=dtype), blank(batch, heads, n, dtype=FP32)
    return SimpleNamespace(**made, o=o, lse=lse)


def launched(a: SimpleNamespace, do: torch.Tensor | None) -> list:
    with pretend(HOPPER), collect() as found:
        hopper.backward(a, do, None)
    return [(w.kernel.name, dict(zip(w.kernel.names, w.ordered))) for w in found]


@pytest.mark.parametrize(
    ("a", "fits"),
    [
        (saved(), True),
        (saved(dtype=HALF), True),
        (saved(D=8), True),
        (saved(D=192, V=128), True),
        (saved(D=64, V=128), True),
        (saved(D=96, left=5, softcap=3.0, slopes=blank(4, dtype=FP32)), True),
        (saved(kv_len=blank(2, dtype=INT32)), True),
        (saved(batch=1, cu_seqlens_q=blank(5, dtype=INT32), cu_seqlens_k=blank(5, dtype=INT32)), True),
        (saved(q=blank(2, 300, 12, 128)[:, :, :4]), True),  # a part of a projection
        (saved(q=blank(2, 4, 300, 128).transpose(1, 2)), True),
        (saved(kv_len=blank(2, 300, dtype=INT32)), False),
        (saved(mask=blank(1, 1, 300, 310)), False),
        (saved(dtype=FP32), False),
        (saved(D=192), False),  # dk and dv would not fit into registers
        (saved(D=256, V=128), False),
        (saved(D=100), False),
        (saved(n=0), False),
        (saved(m=0), False),
        (saved(q=blank(2, 300, 4, 256)[..., ::2]), False),
        (saved(q=blank(2, 300, 4, 132)[..., :128]), False),  # rows that do not begin at multiples of 16 bytes
    ],
)
def test_what_it_takes(a, fits):
    assert hopper.fits_backward(HOPPER, a) == fits
    assert not hopper.fits_backward(TARGETS["sm_100"], a)


def test_shapes_fit_into_the_chip():
    """A block in flight while another is used; sums, weights and a product in 240 registers."""
    for D, V in itertools.product(range(8, 193, 8), range(8, 129, 8)):
        shape = hopper.shape_of(blank(1, 1, 1, D), blank(1, 1, 1, V))
        columns = shape.D0 + shape.D1 + shape.V0 + shape.V1
        assert D <= shape.D0 + shape.D1 and V <= shape.V0 + shape.V1 and shape.STAGES >= 2
        shared = 128 * columns * 2 + 4 * 64 * shape.QUERIES * 2 + shape.STAGES * shape.QUERIES * (columns * 2 + 16)
        assert shared + 1024 <= HOPPER.shared_memory
        weights = shape.QUERIES // (4 if shape.ROUNDS else 2)
        assert columns // 2 + weights + shape.QUERIES // 2 <= 208


def test_what_is_launched():
    a = saved(n=300, m=310, batch=2, sink=blank(4, dtype=FP32), needs=frozenset({"q", "k", "v", "sink"}))
    found = launched(a, blank(2, 300, 4, 128))
    names = [
        "attention_delta",
        "attention_sink_gradient",
        "attention_lines",
        "attention_backward_hopper",
        "attention_dq",
    ]
    assert [name for name, _ in found] == names
    main = found[3][1]
    assert (main["TILES"], main["SLOTS"], main["GROUP"], main["PROGRAMS"]) == (3, 5, 2, 12)
    assert main["DQ"].shape == (2 * 4 * 5, 64 * 128) and main["TURN"].shape == (2 * 4 * 5,)


def test_dq_alone_is_left_out_and_an_expanded_gradient_is_copied():
    a = saved(needs=frozenset({"k"}))
    found = launched(a, blank(1).expand(2, 300, 4, 128))
    assert [name for name, _ in found] == ["attention_delta", "attention_lines", "attention_backward_hopper"]
    assert found[2][1]["DO"].base.is_contiguous() or found[2][1]["DO"].base.stride(-1) == 1


@pytest.mark.parametrize(
    "change",
    [
        {"mask": blank(1, 1, 300, 310), "backend": "auto"},
        {"D": 256, "backend": "auto"},
        {"needs": frozenset({"sink"}), "sink": blank(4, dtype=FP32)},
    ],
)
def test_the_rest_is_the_portable_backward_s(change):
    a = saved(**change)
    assert all("hopper" not in name for name, _ in launched(a, blank(2, 300, 4, a.v.shape[-1])))


@pytest.mark.parametrize("change", [{"D": 256}, {"D": 192}, {"mask": blank(1, 1, 300, 310)}])
def test_who_asks_by_name_gets_no_other(change):
    a = saved(**change)
    with pytest.raises(RuntimeError, match="backend hopper has no backward for q") as refused:
        launched(a, blank(2, 300, 4, a.v.shape[-1]))
    assert "\n" not in str(refused.value)


def test_a_gradient_of_lse_alone():
    """Is the portable backward's, which needs no gradient of o, unless these kernels were asked for."""
    assert all("hopper" not in name for name, _ in launched(saved(backend="auto"), None))
    assert "attention_backward_hopper" in [name for name, _ in launched(saved(), None)]
