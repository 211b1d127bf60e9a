"""What `transpose_pad` promises beyond the properties of every op: elements of any bytes, and sides that no tile divides."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.oracle import bits

DTYPES = (torch.float8_e5m2, torch.bool, torch.float16, torch.int32, torch.float64, torch.complex64)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_elements_of_every_size(dtype):
    x = torch.randint(256, (2, 67, 130 * dtype.itemsize), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    x = (x % 2 if dtype == torch.bool else x).view(dtype)
    with tw.force("triton"):
        y = tw.transpose_pad(x, multiple=32)
    assert y.dtype == dtype and y.shape == (2, 130, 96)
    assert torch.equal(bits(y)[..., :67], bits(x).transpose(1, 2))
    assert not bits(y)[..., 67:].any()
    with tw.force("reference"):
        assert torch.equal(bits(tw.transpose_pad(x, multiple=32)), bits(y))
