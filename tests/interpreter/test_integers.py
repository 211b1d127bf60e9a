"""INT8 and INT4 kernels in the interpreter, bit for bit against the reference, which the oracle holds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import tilewright as tw
from tests import integer_oracle as oracle
from tilewright.core.format import Quantized
from tilewright.formats import fill
from tilewright.formats.fp8 import GRANULARITIES
from tilewright.formats.integers import int4, int8, unpack_nibbles
from tilewright.ops.quantise.quantize import quantize
from tilewright.toolchain.interpret import reversed_programs

INT8 = [int8("row"), *(int8(g, ways="both") for g in GRANULARITIES)]
INT4 = [int4(), int4("1x128"), int4(ways="both"), int4("1x128", zero=True), int4("1x128", zero=True, ways="both")]


def made(x: torch.Tensor, fmt, offsets: torch.Tensor | None = None) -> Quantized:
    with tw.force("triton"):
        return quantize.function(x, fmt, offsets=offsets)


def assert_same(found: Quantized, wanted: Quantized, label: str = "") -> None:
    for name, a, b in zip(found.format.tensor_names, found.tensors(), wanted.tensors()):
        assert (a.shape, a.stride(), a.dtype) == (b.shape, b.stride(), b.dtype)
        np.testing.assert_array_equal(a.numpy(), b.numpy(), f"{found.format} {name} {label}")


@pytest.mark.parametrize("fmt", INT8 + INT4, ids=str)
def test_bits(fmt):
    for shape in ((130, 258), (6, 2), (0, 4), (2, 0)):
        x = torch.from_numpy(oracle.matrix(*shape, seed=shape[0]))
        assert_same(made(x, fmt), fmt.quantize(x), str(shape))


def test_whole_tiles_odd_sizes_and_strides():
    whole = torch.from_numpy(oracle.matrix(256, 128)).to(torch.bfloat16)
    for fmt in (int8("1x128", ways="both"), int4("1x128", zero=True, ways="both"), int4("1x128", ways="col")):
        with reversed_programs():
            assert_same(made(whole, fmt), fmt.quantize(whole))
    odd = torch.from_numpy(oracle.matrix(257, 70)).to(torch.float16)[::2, 1::2]
    for fmt in (int8("row"), int8("1x128", ways="both"), int8("128x128", ways="col"), int8("row", ways="col")):
        assert_same(made(odd, fmt), fmt.quantize(odd), "strided")
        assert_same(made(odd[None, :5], fmt), fmt.quantize(odd[None, :5]), "three dimensions")
    halves = odd[:126, :34]  # rows that two divides and four does not
    for fmt in (int4(), int4("1x128", ways="both")):
        assert_same(made(halves, fmt), fmt.quantize(halves), "strided")


def test_rows_too_long_for_a_program(monkeypatch):
    monkeypatch.setattr(fill, "WIDEST", 0)
    x = torch.from_numpy(oracle.matrix(7, 300))
    for fmt in (int8("row"), int4()):
        assert_same(made(x, fmt), fmt.quantize(x))


@pytest.mark.parametrize("fmt", [int8("row"), int8("1x128"), int4(), int4("1x128", zero=True)], ids=str)
def test_quotients_at_the_edge_of_two_codes(fmt):
    largest = 127 if fmt.name == "int8" else 7
    x = oracle.ties(largest, 128, seed=1)
    q = made(torch.from_numpy(x), fmt)
    across = 128 if fmt.granularity == "1x128" else 0
    codes, _, _ = oracle.blocks(x, 1, across, largest, getattr(fmt, "zero", False))
    np.testing.assert_array_equal((q.data if fmt.name == "int8" else unpack_nibbles(q.data)).numpy(), codes)


@pytest.mark.parametrize("fmt", [int8(g, ways="both") for g in GRANULARITIES], ids=str)
def test_groups(fmt):
    x = torch.from_numpy(oracle.matrix(150, 40, seed=4))
    offsets = torch.tensor([3, 3, 140], dtype=torch.int32)
    found, wanted = made(x, fmt, offsets), fmt.quantize(x, None, offsets)
    for name, a, b in zip(fmt.tensor_names, found.tensors(), wanted.tensors()):
        if name == "data_t" or (name == "scale" and fmt.granularity in ("row", "1x128")):
            a, b = a[..., :140], b[..., :140]
        elif name == "data":
            a, b = a[:140], b[:140]
        elif fmt.granularity == "128x128" or (name == "scale_t" and fmt.granularity == "1x128"):
            down = int(fmt.granularity == "128x128" and name == "scale_t")
            a, b = a.narrow(down, 0, 3), b.narrow(down, 0, 3)
        np.testing.assert_array_equal(a.numpy(), b.numpy(), name)
    with pytest.raises(ValueError, match="has no groups"):
        made(x, int4(), offsets)


def test_back_again():
    x = torch.from_numpy(oracle.matrix(34, 130, seed=5)[6:])
    for fmt in (int8("1x128"), int4("1x128", zero=True, ways="col")):
        q = made(x, fmt)
        wanted = fmt.quantize(x).dequantize()
        with tw.force("triton"):
            assert torch.equal(tw.dequantize(q), wanted)
