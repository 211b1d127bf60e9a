"""Rows grouped by expert in other libraries' layouts, and back."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.formats.grouped import MAPS, from_row_id_map, from_te_grouped, to_row_id_map, to_te_grouped


def routed(tokens: int = 21, experts: int = 6, slots: int = 3):
    chosen = torch.rand(tokens, experts, generator=torch.Generator().manual_seed(1)).topk(slots, 1).indices
    chosen[2] = -1
    chosen[4, 1:] = -1
    return chosen, tw.moe_row_map(chosen, experts=experts, align=4)


@pytest.mark.parametrize("layout", MAPS)
def test_row_id_map(layout):
    chosen, (row_map, source, offsets, _) = routed()
    dense = to_row_id_map(row_map, offsets, layout)
    assert dense.dtype == torch.int32
    back, ends = from_row_id_map(dense, layout, slots=3, align=4)
    assert torch.equal(back, row_map) and torch.equal(ends, offsets)
    flags = torch.zeros(21, 7, dtype=torch.bool).scatter(1, torch.where(chosen < 0, 6, chosen), True)[:, :6]
    if layout == "compact":
        assert torch.equal(dense[:, -1], flags.sum(1).int())
        assert dense[2].tolist() == [-1] * 12 + [0]
        assert sorted(dense[0, 6:9].tolist()) == sorted(chosen[0].tolist())
        assert dense[0, :3].tolist() == row_map[0].flip(0).tolist()
    else:
        by_token = dense.t() if layout == "experts" else dense
        assert torch.equal(by_token >= 0, flags)
        assert all(source[row] == t for t, line in enumerate(by_token.tolist()) for row in line if row >= 0)


def test_row_id_map_of_experts_without_tokens():
    row_map = torch.tensor([[0, 2], [1, -1]], dtype=torch.int32)
    dense = to_row_id_map(row_map, torch.tensor([0, 2, 2, 3], dtype=torch.int32))
    assert dense.tolist() == [[-1, -1], [0, 1], [-1, -1], [2, -1]]


@pytest.mark.parametrize("ways", ["row", "col", "both"])
@pytest.mark.parametrize("columns", [256, 130])
def test_grouped_values(ways, columns):
    """Each group's part is what that group alone has."""
    ends = [0, 144, 144, 176, 320]
    x = torch.randn(336, columns)  # 16 rows past the last group
    offsets = torch.tensor(ends, dtype=torch.int32)
    format = tw.fp8("1x128", ways=ways)
    q = format.quantize(x, torch.bfloat16, offsets)
    fields = to_te_grouped(q)
    start, block, blocks = 0, 0, -(-columns // 128)
    for end in ends:
        count = end - start
        alone = format.quantize(x[start:end], torch.bfloat16)
        if ways != "col":
            part = fields["rowwise_scale_inv"][start * blocks : end * blocks].reshape(blocks, count)
            assert torch.equal(part, alone.scale)
            assert torch.equal(fields["rowwise_data"][start:end], alone.data.view(torch.uint8))
        if ways != "row":
            part = fields["columnwise_data"][start * columns : end * columns].reshape(columns, count)
            assert torch.equal(part, alone.data_t.view(torch.uint8))
            rows = -(-count // 128)
            assert torch.equal(fields["columnwise_scale_inv"][block : block + rows], alone.scale_t)
            block += rows
        start = end
    back = from_te_grouped(fields, offsets, columns)
    assert back.format == q.format and back.shape == q.shape
    for name, a, b in zip(format.tensor_names, back.tensors(), q.tensors()):
        assert a.stride() == b.stride()
        a, b = (t.view(torch.uint8) if t.element_size() == 1 else t for t in (a, b))
        assert torch.equal(a, b), name


def test_refusals():
    q = tw.fp8("1x128").quantize(torch.ones(4, 128))
    with pytest.raises(ValueError, match="groups"):
        to_te_grouped(q)
    with pytest.raises(ValueError, match="1x128"):
        to_te_grouped(tw.fp8("row").quantize(torch.ones(4, 128), offsets=torch.tensor([4])))
    with pytest.raises(ValueError, match="layout"):
        to_row_id_map(torch.zeros(1, 1, dtype=torch.int32), torch.ones(1), "rows")
