"""Few rows of FP8 are stored in pieces of rows: the same codes and scales as in tiles, which many rows are stored in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import tilewright as tw
from tilewright.formats import fill

SCALE = torch.tensor([0.037])
FORMATS = {
    "static": tw.fp8("tensor", scale=SCALE),
    "static e5m2": tw.fp8("tensor", "e5m2", scale=SCALE),
    "tensor": tw.fp8("tensor"),
    "tensor fp32": tw.fp8("tensor", pow2=False),
    "blocks": tw.fp8("1x128"),
    "blocks fp32": tw.fp8("1x128", pow2=False),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("op", ["glu", "quantize"])
def test_pieces_hold_what_tiles_hold(op, name, monkeypatch):
    for rows, columns in ((1, 1100), (3, 512), (fill.FEW, 40), (2, 1), (1, 0), (0, 512), (fill.FEW + 1, 24)):
        x = 3.0 * torch.randn(rows, (2 if op == "glu" else 1) * columns, generator=torch.Generator().manual_seed(rows))
        x = x.to(torch.bfloat16)
        if x.numel() > 4:
            x[0, 3] = float("nan")
        made, launched = [], []
        for few in (fill.FEW, 0):
            with monkeypatch.context() as patch, tw.force("triton"):
                patch.setattr(fill, "FEW", few)
                patch.setattr(fill, "quantize_rows", noting(launched, few, fill.quantize_rows))
                made.append(tw.glu(x, out_format=FORMATS[name]) if op == "glu" else tw.quantize(x, FORMATS[name]))
        for a, b in zip(*(one.tensors() for one in made)):
            assert a.dtype == b.dtype and torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (rows, columns)
        assert launched == ([fill.FEW] if 0 < rows <= fill.FEW and columns else [])


def noting(launched: list, what: int, kernel: Callable) -> Callable:
    def call(*args, **constants):
        launched.append(what)
        kernel(*args, **constants)

    return call
