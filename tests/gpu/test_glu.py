"""The Gluon kernels of glu against their Triton sibling: whole and ragged tiles, groups anywhere, poison."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.core.format import Quantized
from tilewright.core.target import Target
from tilewright.ops.activation import glu as module

pytestmark = pytest.mark.gpu
GROUPS = {
    "none": None,
    "aligned": [128, 128, 512],
    "sixteens": [48, 304, 304, 1008],
    "anywhere": [1, 77, 300, 301, 1001],
    "one short": [5],
    "empty": [0, 0],
    "hostile": [700, 90, -3, 10**6],
}
CASES = [
    (M, hidden, groups)
    for M, hidden in ((128, 128), (1024, 256), (1008, 2048), (16, 384), (8192, 2048))
    for groups in GROUPS
]


def bits(q: Quantized, live: int, blocks: int) -> dict[str, Tensor]:
    """What is specified of a value, as integers."""
    return {
        "data": q.data[:live].view(torch.uint8),
        "scale": q.scale[:, :live].contiguous().view(torch.int32),
        "data_t": q.data_t[:, :live].contiguous().view(torch.uint8),
        "scale_t": q.scale_t[:blocks].contiguous().view(torch.int32),
    }


def specified(M: int, ends: list[int] | None) -> tuple[int, int]:
    """(rows, 128-row blocks) that groups have."""
    if ends is None:
        return M, -(-M // 128)
    clamped = [min(max(e, 0), M) for e in ends]
    counts = [max(0, e - s) for s, e in zip([0, *clamped], clamped)]
    if clamped != sorted(clamped):  # groups overlap: nothing is specified but that memory is safe
        return 0, 0
    return clamped[-1], sum(-(-c // 128) for c in counts)


@pytest.mark.parametrize("M, hidden, groups", CASES)
@pytest.mark.parametrize("poisoned", [False, True])
def test_same_bits_as_the_triton_kernel(monkeypatch, M, hidden, groups, poisoned):
    draw = torch.Generator("cuda").manual_seed(M + hidden)
    x = (2 * torch.randn(M, 2 * hidden, generator=draw, device="cuda")).to(torch.bfloat16)
    dy = torch.randn(M, hidden, generator=draw, device="cuda").to(torch.bfloat16)
    scale = torch.rand(M, generator=draw, device="cuda") if groups != "aligned" else None
    if poisoned:
        for row, value in ((M // 3, float("nan")), (M // 2, float("inf")), (M - 1, float("-inf"))):
            x[row, (7 * row) % (2 * hidden)] = value
        dy[M // 4, 3] = float("nan")
    ends = GROUPS[groups]
    offsets = None if ends is None else torch.tensor(ends, device="cuda")
    fmt = tw.fp8("1x128", ways="both")
    options = {
        "act": "silu",
        "limit": 5.0 if groups == "sixteens" else None,
        "alpha": 1.0,
        "scale": scale,
        "offsets": offsets,
    }
    assert module.takes(Target.at(x.device), x, None, fmt)
    needs = frozenset(("x", "scale") if scale is not None else ("x",))
    saved = SimpleNamespace(x=x, up=None, needs=needs, **options)
    mine = module.forward_pairs(x, None, **options, out_format=fmt, out=None)
    dmine, _, dscale = module.backward(saved, dy, fmt)
    monkeypatch.setattr(module, "takes", lambda *_: False)
    other = module.forward(x, None, **options, out_format=fmt, out=None)
    dother, _, dscale_other = module.backward(saved, dy, fmt)
    live, blocks = specified(M, ends)
    for q, r, what in ((mine, other, "y"), (dmine, dother, "dx")):
        for name, found in bits(q, live, blocks).items():
            wanted = bits(r, live, blocks)[name]
            apart = (found.int() - wanted.int()).abs()
            if not apart.numel():
                continue
            # The compiler contracts the two kernels' products and sums differently: a code on the edge may be the next one
            few = (
                name.startswith("data") and int((apart > 0).sum()) <= 1e-6 * apart.numel() + 1 and int(apart.max()) <= 1
            )
            assert few or torch.equal(found, wanted), (
                f"{what}.{name}: {int((apart > 0).sum())} of {found.numel()} differ, by up to {int(apart.max())}"
            )
    if scale is not None:
        torch.testing.assert_close(dscale[:live], dscale_other[:live], rtol=2e-5, atol=2e-4, equal_nan=True)


@pytest.mark.parametrize("act", module.ACTIVATIONS)
def test_every_activation(monkeypatch, act):
    x = torch.randn(256, 512, device="cuda").to(torch.bfloat16)
    fmt = tw.fp8("1x128", ways="both")
    mine = tw.glu(x, act=act, out_format=fmt)
    options = {"act": act, "limit": None, "alpha": 1.0, "scale": None, "offsets": None}
    other = module.forward(x, None, **options, out_format=fmt, out=None)
    for found, wanted in zip(bits(mine, 256, 2).values(), bits(other, 256, 2).values()):
        assert torch.equal(found, wanted)


def test_repeatable():
    x = torch.randn(8192, 4096, device="cuda").to(torch.bfloat16)
    fmt = tw.fp8("1x128", ways="both")
    first = bits(tw.glu(x, out_format=fmt), 8192, 64)
    for _ in range(20):
        for a, b in zip(first.values(), bits(tw.glu(x, out_format=fmt), 8192, 64).values()):
            assert torch.equal(a, b)
