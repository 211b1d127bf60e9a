"""Products of few rows: what the properties do not say of them."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.cases import Net, draw
from tilewright.core.target import TARGETS, pretend
from tilewright.device.matrices import Matrix
from tilewright.gemm import few
from tilewright.gemm.scaled_mm import reference
from tilewright.op import OPS
from tilewright.runtime.kernel import Arguments

NET = Net(interpreter=True)
FEW = ("fp8_block", "int8_row", "int4_row", "int4_weight")


@pytest.mark.parametrize("pair", FEW)
def test_every_pair_and_parts_of_the_inner_dimension(pair):
    """More blocks than one part has: sums are added up from parts, after which come bias, activation and c."""
    dims = {"tokens": 5, "hidden": 2 * few.LEAST * 128 + 40}
    options = {"pair": pair, "columns": 33, "act": "silu", "beta": 0.5, "c": True, "bias": True, "out_dtype": "float32"}
    values = draw(OPS["scaled_mm"], NET, 1, torch.bfloat16, dims, options).values
    exact = reference(**{**OPS["scaled_mm"].arguments(values), "bias": values["bias"].double()})
    with tw.force("triton"):
        y = few.forward(**values)
    assert few.splits_for(1, 17, 132) > 1
    assert (y.double() - exact).norm() <= 1e-5 * exact.norm()


def test_zero_points_that_lie_otherwise_than_their_scales():
    """The kernel for few rows reads both by the strides of the scales: it must not take these."""
    dims = {"tokens": 4, "hidden": 512, "columns": 1024}
    values = draw(OPS["scaled_mm"], NET, 1, torch.bfloat16, dims, {"pair": "int4_weight", "zero_b": True}).values
    given = {**values, "zero_b": values["zero_b"].contiguous()}
    assert given["zero_b"].stride() != given["scale_b"].stride()
    with tw.force("triton"):
        y, same = (OPS["scaled_mm"].run(OPS["scaled_mm"].signature.bind((), v)) for v in (given, values))
    torch.testing.assert_close(y.float(), same.float(), rtol=1e-2, atol=1e-2)


def test_parts_are_none_empty():
    for tiles in (1, 2, 31, 64, 66, 67, 500):
        for blocks in (0, 1, 7, 8, 15, 16, 17, 63, 64, 100, 1000):
            parts = few.splits_for(tiles, blocks, 132)
            per = -(-blocks // parts)
            assert parts == 1 or (tiles * parts <= 132 and (parts - 1) * per < blocks)


def test_a_quarter_of_the_chip_idle_means_two_parts_of_few_rows():
    """An H200's 132 SMs and 96 tiles of 32 blocks; where parts would be short, or sums large, there is one."""
    assert few.parts_for(1, 96, 32, 132) == few.parts_for(8, 67, 2 * few.LEAST, 132) == 2
    for rows, tiles, blocks in ((9, 96, 32), (1, 96, 2 * few.LEAST - 1), (1, 100, 32)):
        assert few.parts_for(rows, tiles, blocks, 132) == 1
    assert few.parts_for(1, 64, 32, 132) == few.splits_for(64, 32, 132)


@pytest.mark.parametrize(
    ("columns", "rows", "blocks"), [(6144, 16, 6), (12288, 16, 4), (24576, 16, 3), (28672, 16, 4), (6144, 64, 6)]
)
def test_blocks_ahead_are_as_many_as_programs_of_an_sm_have_room_for(columns, rows, blocks):
    with pretend(TARGETS["sm_90"]):
        y = Matrix(torch.empty(1))
        assert few.blocks_ahead(Arguments(Y=y, N=columns, BLOCK_N=few.COLUMNS, BLOCK_M=rows, parts=1)) == blocks


@pytest.mark.parametrize("fp8", [True, False])
def test_rows_past_a_count_are_neither_read_nor_written(fp8):
    """Counts are device data: none, some, all, and such as there cannot be."""
    options, dims = {"fp8": fp8, "out_dtype": "float32"}, {"experts": 5, "hidden": 130, "rows": 70, "columns": 33}
    values = draw(OPS["grouped_mm_masked"], NET, 0, torch.bfloat16, dims, options).values
    counts = torch.tensor([0, 3, 70, 2**31 - 1, -5], dtype=torch.int32)
    live = torch.arange(70) < counts.clamp(0, 70)[:, None]
    op = OPS["grouped_mm_masked"]
    clean = op.reference(**{**op.arguments(values), "counts": counts})
    values["a"].view(torch.uint8)[~live] = 0x7F  # NaN
    with tw.force("portable"):
        y = tw.grouped_mm_masked(**{**values, "counts": counts})
    torch.testing.assert_close(y[live], clean[live], rtol=1e-4, atol=1e-3)
