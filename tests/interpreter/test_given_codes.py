"""The kernel that JAX launches: the codes of `quantize`, as they lie or transposed."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.formats.given import given_codes

FORMAT = "e4m3:static:fp32:te"


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("shape", [(1, 1), (7, 203), (40, 128), (33, 257)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_codes_are_those_of_quantize(dtype, shape, transposed):
    x = (30.0 * torch.randn(shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    x.view(-1)[:3] = torch.tensor([torch.inf, -torch.nan, -1e30])[: x.numel()].to(dtype)
    scale = torch.tensor([0.0137])
    codes = torch.full(shape[::-1] if transposed else shape, 0x55, dtype=torch.uint8)
    given_codes(x, scale, *shape, codes, TRANSPOSED=transposed, FORMAT=FORMAT)
    there = tw.quantize(x, tw.fp8("tensor", scale=scale)).data.view(torch.uint8)
    assert torch.equal(codes.t() if transposed else codes, there)
