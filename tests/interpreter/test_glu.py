"""What glu promises beyond the properties of every op: activations everywhere, clamps at edges, groups, quantised gradients."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.core.format import Quantized
from tilewright.ops.activation.glu import ACTIVATIONS, glu, list_blocks, sum_tiles

SMALLEST = 1e-36  # below it sigmoids are 0, not subnormal


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def all_bf16() -> Tensor:
    """Every finite bf16 value below 2^60, where no activation or slope overflows."""
    values = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    return values[values.isfinite() & (values.abs() < 2.0**60)]


def nearly_rounded(actual: Tensor, exact: Tensor, share: float) -> None:
    """One step from the exact value at most, and correctly rounded but for a share."""
    rounded = exact.to(actual.dtype)
    large = exact.abs() > SMALLEST
    assert bool(actual.isfinite().all())
    assert bool((actual[~large].abs() <= 2 * SMALLEST).all())
    step = torch.exp2(torch.floor(torch.log2(exact[large].abs())) - 7)
    assert bool(((actual.double() - exact)[large].abs() <= step).all())
    assert float((actual != rounded)[large].double().mean()) <= share


@pytest.mark.parametrize("act", ACTIVATIONS)
def test_every_bf16_value_and_slope(act):
    a = all_bf16()
    x, up = a[None].clone().requires_grad_(), torch.ones_like(a)[None]
    y = tw.glu(x, up, act=act)
    (slope,) = torch.autograd.grad(y, x, torch.ones_like(y))
    exact_x = a.double().requires_grad_()
    exact = ACTIVATIONS[act](exact_x, 1.0)
    (exact_slope,) = torch.autograd.grad(exact.sum(), exact_x)
    nearly_rounded(y[0].detach(), exact.detach(), 0.005)
    near_zero = exact_slope.abs() < 2e-3  # where the slope changes sign its terms cancel
    nearly_rounded(slope[0][~near_zero], exact_slope[~near_zero], 0.005)
    assert float((slope[0].double() - exact_slope)[near_zero].abs().max()) < 1e-5


@pytest.mark.parametrize("alpha", [1.702, -0.5, 0.0])
def test_alpha(alpha):
    x = torch.linspace(-30, 30, 600).reshape(2, 300).requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    g = torch.randn(2, 150, generator=torch.Generator().manual_seed(0))
    (found,) = torch.autograd.grad(tw.glu(x, alpha=alpha), x, g)
    (exact,) = torch.autograd.grad(glu.reference(exact_x, alpha=alpha), exact_x, g.double())
    assert torch.allclose(found.double(), exact, rtol=2e-6, atol=1e-7)


def test_a_value_at_the_limit_passes_and_one_beyond_does_not():
    gate = torch.tensor([[-9.0, 1.9, 2.0, 2.1, 1.0, 1.0, 1.0, 1.0]], requires_grad=True)
    up = torch.tensor([[1.0, 1.0, 1.0, 1.0, 2.0, -2.0, 2.5, -2.5]], requires_grad=True)
    y = tw.glu(gate, up, act="relu", limit=2.0)
    assert torch.equal(y, torch.tensor([[0.0, 1.9, 2.0, 2.0, 2.0, -2.0, 2.0, -2.0]]))
    dgate, dup = torch.autograd.grad(y, (gate, up), torch.full_like(y, 3.0))
    assert torch.equal(dgate, torch.tensor([[0.0, 3.0, 3.0, 0.0, 6.0, -6.0, 6.0, -6.0]]))
    assert torch.equal(dup[0, 4:], torch.tensor([3.0, 3.0, 0.0, 0.0]))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("ends", [[3, 5], [0, 0, 7], [9, 20], [-4, 2**31 - 1], [6, 2, -1]])
def test_rows_past_the_last_offset_are_neither_read_nor_written(ends, dtype):
    offsets = torch.tensor(ends, dtype=dtype)
    live = min(max(ends[-1], 0), 9)
    x = torch.randn(9, 40, generator=torch.Generator().manual_seed(1))
    expected = tw.glu(x)
    x[live:] = math.nan
    out = torch.full((9, 20), 7.0)
    tw.glu(x, offsets=offsets, out=out)
    assert torch.equal(out[:live], expected[:live])
    assert bool((out[live:] == 7.0).all())
    scale = torch.ones(9, requires_grad=True)
    y = tw.glu(x, scale=scale, offsets=offsets)
    (dscale,) = torch.autograd.grad(y, scale, torch.ones_like(y))
    assert torch.allclose(dscale[:live], expected[:live].sum(1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("ends", [[100, 60, 290], [-5, 2**31 - 1], [10**6, 10**6], [0, 300, 0]])
def test_offsets_out_of_range_or_order_stay_inside(ends):
    """The interpreter refuses accesses outside every tensor."""
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    q = tw.glu(x, offsets=torch.tensor(ends), out_format=tw.fp8("1x128", ways="both"))
    assert q.data.shape == (300, 128)


def same_bits(q: Quantized, r: Quantized, rows: int | None = None) -> None:
    for name, a, b in zip(q.format.tensor_names, q.tensors(), r.tensors()):
        kind = torch.uint8 if name.startswith("data") else torch.int32
        a, b = a.contiguous().view(kind), b.contiguous().view(kind)
        if rows is not None and name in ("data", "data_t"):
            a, b = (t[:rows] if name == "data" else t[:, :rows] for t in (a, b))
        elif rows is not None and name == "scale":
            a, b = a[..., :rows], b[..., :rows]
        assert torch.equal(a, b), f"{name}: {int((a != b).sum())} of {a.numel()} differ"


def gradient(x: Tensor, dy: Tensor, fmt, **options) -> tuple:
    values = glu.signature.bind((x,), options)
    needs = frozenset(n for n in glu.differentiable if values[n] is not None)
    return glu.run_backward(values, {}, [dy], needs, grad_format=fmt)


@pytest.mark.parametrize("granularity", ["1x128", "128x128", "row", "tensor"])
@pytest.mark.parametrize("grouped", [False, True])
def test_quantised_gradient(granularity, grouped):
    """Codes and scales of [dgate | dup] are those of the plain gradient in fp32; dscale comes along."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(200, 256, generator=draw)
    dy = torch.randn(200, 128, generator=draw)
    scale = torch.rand(200, generator=draw)
    offsets = torch.tensor([70, 70, 200], dtype=torch.int32) if grouped else None
    fmt = tw.fp8(granularity, ways="both")
    limit = 1.5 if grouped else None  # some of gate and of up are clamped, and their gradients are zero
    dx, dup, dscale = gradient(x, dy, fmt, scale=scale, offsets=offsets, limit=limit)
    plain, _, plain_dscale = gradient(x, dy, None, scale=scale, offsets=offsets, limit=limit)
    assert dup is None
    assert torch.equal(dscale, plain_dscale)
    expected = fmt.quantize(plain, torch.float32, offsets)
    if granularity.endswith("128") and grouped:  # blocks that no group has are unspecified
        used = 3
        for name in ("scale", "scale_t"):
            for q in (dx, expected):
                t = getattr(q, name)
                if granularity == "128x128" or name == "scale_t":
                    (t.t() if granularity == "128x128" and name == "scale_t" else t)[used:] = 0
    same_bits(dx, expected)


def test_quantised_gradient_refuses_what_it_cannot_hold():
    fmt = tw.fp8("1x128", ways="both")
    with pytest.raises(ValueError, match="128-column"):
        gradient(torch.randn(4, 100), torch.randn(4, 50), fmt)
    with pytest.raises(ValueError, match="merged"):
        gradient(torch.randn(4, 128), torch.randn(4, 128), fmt, up=torch.randn(4, 128))


def test_out_that_is_quantised():
    x = torch.randn(6, 256, generator=torch.Generator().manual_seed(4)).to(torch.bfloat16)
    fmt = tw.fp8("1x128", ways="both")
    expected = tw.glu(x, out_format=fmt)
    out = fmt.empty((6, 128), torch.bfloat16, "cpu")
    assert tw.glu(x, out_format=fmt, out=out) is out
    same_bits(out, expected)


def test_out_whose_leading_dimensions_do_not_merge():
    x = torch.randn(2, 3, 10, generator=torch.Generator().manual_seed(5))
    out = torch.zeros(3, 2, 5).transpose(0, 1)
    assert tw.glu(x, out=out) is out
    assert torch.equal(out, tw.glu(x))


@pytest.mark.parametrize("ends", [[300], [0, 5, 5, 290], [128, 256, 300], [40, 20, 700]])
def test_list_of_blocks(ends):
    """The kernel that tells the Hopper kernels where the blocks of groups are."""
    M, blocks = 300, torch.full((3 + len(ends), 2), -1, dtype=torch.int32)
    list_blocks(torch.tensor(ends), blocks, M, len(ends), blocks.shape[0], BLOCK_E=8)
    clamped = [min(max(e, 0), M) for e in ends]
    expected = [
        (row, end - row) for start, end in zip([0, *clamped], clamped) for row in range(start, max(start, end), 128)
    ]
    expected += [(0, 0)] * (len(blocks) - len(expected))
    assert [tuple(row) for row in blocks.tolist()] == expected


def test_sum_of_tiles():
    part = torch.randn(3, 700, generator=torch.Generator().manual_seed(6))
    found = torch.full((700,), 7.0)
    sum_tiles(part, found, torch.tensor([5, 650]), 700, 3, 2)
    assert torch.equal(found[:650], (part[0] + part[1] + part[2])[:650])
    assert bool((found[650:] == 7.0).all())
