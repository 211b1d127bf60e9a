"""Attention over keys in codes on hardware: Hopper's own kernel against the reference and the portable one, of every
kind, with NaN in all that nobody sees; the same bits in a hundred runs. A kernel that waits for ever ends the process."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.attention_oracle import CALLS
from tests.gpu.test_attention import LONG, a_hundred_alike, limited, near, on_gpu  # noqa: F401
from tests.interpreter.test_hopper_coded import KINDS, MATHS, MORE, agrees, coded_call, even_call, tiny_call
from tilewright.attention.coded import attention_codes, attention_codes_pv
from tilewright.attention.hopper import coded

pytestmark = pytest.mark.gpu
# Of the widths that it takes
EVERY = {
    name: given for name, given in {**CALLS, **MORE}.items() if {given.get("D", 64), given.get("V", 64)} <= {64, 128}
}


# Of lse and of o in bf16, relative RMS: Hopper's sums of e4m3 products keep about 14 bits of the largest, those of int8 all
BARS = {"int8": (2e-5, 2.4e-3), "fp8": (2e-4, 3e-3), "fp8_pv": (2e-4, 3e-2)}
APART = {"int8": 4e-3, "fp8": 4e-3, "fp8_pv": 5e-2}  # from the portable kernels: weights are other codes there


def attend(a, backend="hopper"):
    op = attention_codes if a["v_scale"] is None else attention_codes_pv
    return op.function(**on_gpu(a), backend=backend)


# Half of them, each name with several kinds and each kind with several names: what hides keys and what multiplies codes are apart
# in the kernel, and the interpreter plays its source with all kinds of ten names
PAIRS = [(name, kind) for i, name in enumerate(EVERY) for j, kind in enumerate(KINDS) if (i + j) % 2 == 0]


@pytest.mark.parametrize(("name", "kind"), PAIRS, ids=lambda word: word if isinstance(word, str) else " ".join(word))
def test_kinds(name, kind):
    a = coded_call(*kind, **EVERY[name])
    o, lse = attend(a)
    agrees(a, o.cpu(), lse.cpu(), *BARS[kind[0]])
    near(o, attend(a, "portable")[0], APART[kind[0]])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("D", "V"), [(D, V) for D in coded.WIDTHS for V in coded.WIDTHS])
def test_more_tiles_than_programs(D, V, kind):
    a = on_gpu(coded_call(*kind, **LONG, D=D, V=V, causal=True, mean=True))
    o, lse = attend(a)
    agrees(a, o, lse, *BARS[kind[0]])
    near(o, attend(a, "portable")[0], APART[kind[0]])


@pytest.mark.parametrize("scaled", ["key", "block"])
@pytest.mark.parametrize("name", [name for name, given in EVERY.items() if "slopes" not in given])
def test_weights_that_codes_hold(name, scaled):
    a = even_call(scaled, **EVERY[name])
    o, lse = attend(a)
    agrees(a, o.cpu(), lse.cpu(), *BARS["fp8"])


def test_factors_too_small_for_a_number():
    a = tiny_call()
    o, lse = attend(a)
    agrees(a, o.cpu(), lse.cpu(), *BARS["fp8_pv"])


@pytest.mark.parametrize("mean", [0.5, 3.0])
def test_long_sums_of_one_sign(mean):
    """Of which tensor cores cut off a part of each product: what they add up is set aside in time."""
    source = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(1, 16384, h, 128, generator=source, device="cuda") + m for h, m in ((2, 0), (1, 0), (1, mean))
    )
    q, k, v = (t.to(torch.bfloat16) for t in (q, k, v))
    o, exact = (tw.attention(q, k, v, causal=True, math=math, backend="hopper") for math in ("fp8_pv", "auto"))
    near(o[:, -1024:], exact[:, -1024:], 2e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_runs_have_the_same_bits(kind):
    a = on_gpu(coded_call(*kind, **LONG, D=128, causal=True))
    a_hundred_alike(lambda: attend(a))


@pytest.mark.parametrize("kind", MATHS)
def test_a_public_call(kind):
    """Codes are made on the way, and cost what they cost by the portable kernels."""
    q, k, v = (torch.randn(2, 1000, heads, 128, device="cuda", dtype=torch.bfloat16) for heads in (8, 2, 2))
    for smooth in (False, True):
        found = [
            tw.attention(q, k, v, math=kind, smooth=smooth, causal=True, backend=b) for b in ("hopper", "portable")
        ]
        near(*found, APART[kind])
