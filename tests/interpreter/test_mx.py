"""The kernels and device functions of MX and NVFP4 in the interpreter, bit for bit against the definitions."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from hypothesis import given, settings
from hypothesis import strategies as st

import tilewright as tw
from tests import mx_oracle as oracle
from tilewright.device.small_blocks import code_e2m1, mx_scale, scale_e8m0, widen_e2m1
from tilewright.formats.mx import CODES, RULES, mx
from tilewright.formats.nvfp4 import nvfp4
from tilewright.runtime.kernel import kernel

EVERY = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).float()


def over(a):
    return (triton.cdiv(a.N, 4096),)


@kernel(grid=over)
def code_kernel(X, Y, N):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    tl.store(Y + i, code_e2m1(tl.load(X + i, i < N, 0.0)) & 15, i < N)


@kernel(grid=over)
def decode_kernel(X, Y, E, N):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    code = tl.load(X + i, i < N, 0)
    tl.store(Y + i, widen_e2m1(code), i < N)
    tl.store(E + i, scale_e8m0(code), i < N)


def test_e2m1_codes_of_every_bf16_value_and_around_the_midpoints():
    midpoints = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    near = (midpoints.view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])).reshape(-1).view(torch.float32)
    x = torch.cat((EVERY[~EVERY.isnan()].abs(), near))
    y = torch.full(x.shape, -1, dtype=torch.int32)
    code_kernel(x, y, len(x))
    assert np.array_equal(y.numpy(), oracle.nearest(x.double().numpy(), "e2m1"))


def test_every_byte_decodes():
    x = torch.arange(256, dtype=torch.uint8)
    y, e = torch.full((256,), -7.0), torch.full((256,), -7.0)
    decode_kernel(x, y, e, 256)
    table = oracle.values("e2m1")
    assert y.tolist() == [float(np.copysign(table[c % 8], -1 if c & 8 else 1)) for c in range(256)]
    assert e[:255].tolist() == [2.0 ** (c - 127) for c in range(255)] and e[255].isnan()


def quantized(x: torch.Tensor, format, offsets=None):
    with tw.force("triton"):
        return tw.quantize(x, format, offsets=offsets)


def blocks_of(values: torch.Tensor, width: int) -> torch.Tensor:
    """Neighbours in blocks, each led by a number that is 4 times the largest, in rows of 256."""
    rows = values[: len(values) // (width - 1) * (width - 1)].reshape(-1, width - 1)
    lead = rows.abs().amax(1, keepdim=True) * 4
    blocks = torch.cat((torch.where(lead.isfinite(), lead, 0.0), rows), 1).reshape(-1)
    return torch.cat((blocks, blocks.new_zeros(-len(blocks) % 256))).reshape(-1, 256)


@pytest.mark.parametrize(
    "format",
    [
        mx("e4m3"),
        mx("e5m2", scale_rule="floor"),
        mx("e2m1", scale_rule="even"),
        nvfp4(),
        nvfp4(scale=torch.tensor([1e-3])),
    ],
    ids=str,
)
def test_every_bf16_value_gets_the_code_of_the_definition(format):
    x = blocks_of(EVERY[EVERY.isfinite()], format.block)
    static = None if format.tensor is None else format.tensor.item()
    assert not oracle.differences(quantized(x, format), x, static)


@kernel(grid=over)
def scale_kernel(X, Y, M, N, FORMAT: tl.constexpr):
    i = tl.program_id(0) * 4096 + tl.arange(0, 4096)
    code, mult = mx_scale(tl.load(X + i, i < N, 0.0), FORMAT)
    tl.store(Y + i, code, i < N)
    tl.store(M + i, mult, i < N)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("kind", CODES)
def test_scales_turn_where_the_rule_says(kind, rule):
    marks = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375])[:, None] * 2.0 ** torch.arange(-126, 128)
    near = (marks.reshape(-1).view(torch.int32)[:, None] + torch.tensor([-1, 0, 1])).reshape(-1).view(torch.float32)
    x = torch.cat((near, torch.tensor([0.0, 2.0**-149, 2.0**-127, float("inf"), float("nan")])))
    code, mult = torch.full(x.shape, -1, dtype=torch.int32), torch.full(x.shape, -7.0)
    scale_kernel(x, code, mult, len(x), FORMAT=mx(kind, scale_rule=rule).device_format(False))
    _, wanted = oracle.mx(x[:, None].numpy(), kind, rule)
    assert np.array_equal(code.numpy(), wanted[:, 0])
    torch.testing.assert_close(
        mult, (2.0 ** (127 - code.double())).float().where(code < 255, torch.nan), rtol=0, atol=0, equal_nan=True
    )


SHAPES = [(1, 2), (34, 70), (64, 64), (2, 33, 130)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "format", [mx("e4m3", ways="both"), mx("e5m2", ways="col"), mx("e2m1", ways="both"), nvfp4(ways="both")], ids=str
)
def test_both_ways_any_shape_any_stride(format, shape):
    if shape == (1, 2) and format.dtype == "e2m1":
        format = type(format)()  # one row has no twin of pairs
    wide = torch.randn(*shape[:-1], 2 * shape[-1], generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    x = (wide * 3.0 ** torch.arange(-8, 8).repeat(wide.shape[-1])[: wide.shape[-1]]).to(torch.bfloat16)[..., ::2]
    x[..., -1, 0] = float("nan")
    q = quantized(x, format)
    assert not oracle.differences(q, x)
    turned = x.reshape(-1, x.shape[-1]).t().contiguous().t()
    for a, b in zip(q.tensors(), quantized(turned, format).tensors()):
        assert torch.equal(a.view(torch.uint8).reshape(b.shape[0], -1), b.view(torch.uint8).reshape(b.shape[0], -1)), (
            "strides"
        )


@pytest.mark.parametrize("format", [mx("e2m1", ways="both"), nvfp4(ways="both")], ids=str)
@pytest.mark.parametrize("shape", [(0, 32), (4, 0)])
def test_nothing(format, shape):
    q = quantized(torch.empty(shape), format)
    assert all(t.numel() == 0 or t.tolist() == [1.0] for t in q.tensors())


def test_rows_past_the_last_group_are_not_read():
    x = torch.randn(6, 64)
    x[4:] = 1e30
    for format in (mx("e2m1"), nvfp4()):
        q, wanted = quantized(x, format, torch.tensor([1, 4])), format.quantize(x[:4])
        for a, b in zip(q.tensors(), wanted.tensors()):
            assert torch.equal(a[: len(b)].view(torch.uint8), b.view(torch.uint8)), format


@settings(max_examples=12, deadline=None)
@given(st.sampled_from([mx("e2m1"), mx("e4m3"), nvfp4()]), st.integers(0, 2**31), st.integers(0, 60))
def test_any_bits_get_the_codes_of_the_definition(format, seed, spread):
    """Random mantissas; exponents in a window of random place and width."""
    random = np.random.default_rng(seed)
    low = random.integers(0, 255 - spread)
    exponents = random.integers(low, low + spread + 1, (8, 256), np.int64)
    bits = (
        random.integers(0, 2**23, exponents.shape) | (exponents << 23) | (random.integers(0, 2, exponents.shape) << 31)
    )
    x = torch.from_numpy(bits.astype(np.uint32).view(np.float32))
    assert not oracle.differences(quantized(x, format), x)
