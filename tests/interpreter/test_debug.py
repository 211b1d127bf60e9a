"""TILEWRIGHT_DEBUG=1: labels and ends of groups on the device are read, and wrong ones named."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw

FP8 = tw.fp8("1x128")
CODES = torch.zeros(4, 16).to(torch.float8_e4m3fn)


def ends(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def rope(starts: torch.Tensor) -> object:
    x = torch.ones(1, 1, 4, 8)
    return tw.rope(x, x, freqs=torch.ones(1, 4, 4), cu_seqlens=starts)


WRONG = {
    "cross_entropy: labels": lambda: tw.cross_entropy(torch.ones(2, 5), torch.tensor([1, 5])),
    "linear_cross_entropy: labels": lambda: tw.linear_cross_entropy(
        torch.ones(2, 8), torch.ones(5, 8), torch.tensor([-1, 2])
    ),
    "cross_entropy_parts: labels": lambda: tw.cross_entropy_parts(torch.ones(2, 5), torch.tensor([0, 9]), classes=9),
    "rope: cu_seqlens": lambda: rope(ends(0, 3, 2)),
    "glu: offsets": lambda: tw.glu(torch.ones(4, 16), offsets=ends(3, 5)),
    "quantize: offsets": lambda: tw.quantize(torch.ones(4, 16), FP8, offsets=ends(-1, 4)),
    "smooth_quantize: offsets": lambda: tw.smooth_quantize(
        torch.ones(4, 16), torch.ones(2, 16), FP8, offsets=ends(4, 2)
    ),
    "column_amax: offsets": lambda: tw.column_amax(torch.ones(4, 16), offsets=ends(2, 9)),
    "grouped_mm_rows: offsets": lambda: tw.grouped_mm_rows(torch.ones(4, 16), torch.ones(2, 16, 8), ends(2, 9)),
    "grouped_mm_inner: offsets": lambda: tw.grouped_mm_inner(torch.ones(4, 6), torch.ones(6, 8), ends(5, 7)),
    "grouped_mm_inner_fp8: offsets": lambda: tw.grouped_mm_inner_fp8(
        CODES, torch.ones(1, 4), CODES.t(), torch.ones(1, 4), ends(20, 16)
    ),
}


@pytest.mark.parametrize("named", WRONG)
def test_wrong_numbers_on_the_device_are_named(named, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")  # before the first call: what is replayed is not looked at again
    with tw.force("triton"), torch.no_grad():
        with pytest.raises(ValueError, match=named):
            WRONG[named]()
        monkeypatch.delenv("TILEWRIGHT_DEBUG")
        WRONG[named]()  # without the variable they spoil nothing but their own rows


def test_right_numbers_pass(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    with tw.force("triton"), torch.no_grad():
        assert tw.cross_entropy(torch.ones(2, 5), torch.tensor([4, -100])).isfinite()
        assert rope(ends(0, 2, 4))[0].isfinite().all()
        assert tw.glu(torch.ones(4, 16), offsets=ends(0, 2, 2)).shape == (4, 8)
