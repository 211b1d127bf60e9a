"""Rows grouped by expert in other libraries' layouts, and back; and their products, by one call for all ways of grouping."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.formats.grouped import MAPS, from_row_id_map, from_te_grouped, to_row_id_map, to_te_grouped
from tilewright.nn.expert_codes import quantize_experts
from tilewright.ops.moe.grouped_mm import grouped_mm


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


# ---- products --------------------------------------------------------------------------------------------------------

ROW_ENDS, TOKEN_ENDS = torch.tensor([0, 5, 17]), torch.tensor([128, 128, 384])  # one group is empty


def near(y, exact, error=3e-6):
    assert y.shape == exact.shape
    assert (y.double() - exact).norm() <= error * exact.norm()


def by_rows(a, b, ends=ROW_ENDS):
    """Each group's rows times its matrix, in float64."""
    starts = [0, *ends.tolist()]
    return torch.cat([a[i:j].double() @ b[e].double() for e, (i, j) in enumerate(zip(starts, starts[1:]))])


def by_tokens(a, b, ends=TOKEN_ENDS):
    starts = [0, *ends.tolist()]
    return torch.stack([a[:, i:j].double() @ b[i:j].double() for i, j in zip(starts, starts[1:])])


def factors(columns=200, inner=130):
    torch.manual_seed(0)
    return torch.randn(17, inner), torch.randn(3, columns, inner)


@pytest.mark.parametrize("granularity", ["1x128", "row"])
@pytest.mark.parametrize("weights", ["128x128", "row"])
def test_quantised_rows_and_weights(granularity, weights):
    x, weight = factors()
    a = tw.fp8(granularity).quantize(x, offsets=ROW_ENDS)
    b = quantize_experts(weight) if weights == "128x128" else tw.fp8("row", ways="both").quantize(weight)
    y = grouped_mm(a, b, transposed_b=True, out_dtype=torch.float32)  # the groups are a's own
    near(y, by_rows(a.dequantize(), b.dequantize().transpose(1, 2)))
    # The gradient of the rows takes the same weight as it is, its other codes and a's other size
    dy = tw.fp8(granularity).quantize(torch.randn(17, 200), offsets=ROW_ENDS)
    only = tw.Quantized.from_tensors(tw.fp8(weights, ways="col"), b.dtype, b.shape, (b.data_t, b.scale_t), b.offsets)
    near(grouped_mm(dy, b, out_dtype=torch.float32), by_rows(dy.dequantize(), only.dequantize()))


def test_raw_codes_have_torchs_scales():
    x, weight = factors()
    a, b = tw.fp8("row").quantize(x), tw.fp8("row").quantize(weight)
    exact = by_rows(a.dequantize(), b.dequantize().transpose(1, 2))
    names = {"recipe_a": "RowWise", "recipe_b": "RowWise"}
    y = grouped_mm(a.data, b.data.transpose(1, 2), ROW_ENDS, scale_a=a.scale, scale_b=b.scale.view(3, 200), **names)
    assert y.dtype == torch.bfloat16
    near(y, exact, 4e-3)
    q, w = tw.fp8("1x128").quantize(x), quantize_experts(weight)
    blocks = w.scale[:6].view(3, 2, 2)
    names = {"recipe_a": "BlockWise1x128", "recipe_b": "BlockWise128x128", "out_dtype": torch.float32}
    y = grouped_mm(q.data, w.data, ROW_ENDS, scale_a=q.scale.t(), scale_b=blocks, transposed_b=True, **names)
    near(y, by_rows(q.dequantize(), w.dequantize().transpose(1, 2)))


@pytest.mark.parametrize("granularity", ["1x128", "row"])
def test_gradients_of_weights_are_summed_in_place(granularity):
    torch.manual_seed(0)
    form = tw.fp8(granularity, ways="col")
    dy, x = (form.quantize(torch.randn(384, n), offsets=TOKEN_ENDS) for n in (24, 40))
    main_grad = torch.randn(3, 24, 40)
    product = by_tokens(dy.dequantize().t(), x.dequantize())
    exact = product + main_grad.double()
    made = grouped_mm(dy, x, transposed_a=True, c=main_grad, beta=1.0, out=main_grad)
    assert made is main_grad and made.dtype == torch.float32
    near(made, exact)
    near(grouped_mm(dy.dequantize().t(), x.dequantize(), TOKEN_ENDS), product)


def test_memory_of_the_callers():
    """Each way of grouping stores into `out`, which decides the dtype, and gives it back."""
    x, weight = factors()
    a, b = tw.fp8("row").quantize(x, offsets=ROW_ENDS), tw.fp8("row", ways="both").quantize(weight)
    for first, second, ends in ((x, weight, ROW_ENDS), (a, b, None)):
        out = torch.full((17, 200), 7.0, dtype=torch.bfloat16)
        made = grouped_mm(first, second, ends, transposed_b=True, out=out)
        assert made is out
        assert torch.equal(out, grouped_mm(first, second, ends, transposed_b=True, out_dtype=torch.bfloat16))
    wanted = grouped_mm(x, weight, ROW_ENDS, transposed_b=True, out_format=tw.fp8("1x128"))
    q = tw.fp8("1x128").empty((17, 200), torch.float32, "cpu", 3)
    assert grouped_mm(x, weight, ROW_ENDS, transposed_b=True, out_format=tw.fp8("1x128"), out=q) is q
    assert torch.equal(q.dequantize(), wanted.dequantize())
    many, counts = tw.fp8("row").quantize(x[:15].reshape(3, 5, 130)), torch.tensor([5, 0, 3])
    for first, second in ((x[:15].reshape(3, 5, 130).bfloat16(), weight.bfloat16()), (many, b)):
        out = torch.zeros(3, 5, 200)
        assert grouped_mm(first, second, transposed_b=True, counts=counts, out=out) is out
        wanted = grouped_mm(first, second, transposed_b=True, counts=counts, out_dtype=torch.float32)
        for e, count in enumerate(counts.tolist()):
            assert torch.equal(out[e, :count], wanted[e, :count])
        with pytest.raises(ValueError, match="out"):
            grouped_mm(first, second, transposed_b=True, counts=counts, out=out[:, :, 1:])


def test_ending_of_products():
    x, weight = factors()
    bias = torch.randn(3, 200)
    rows = torch.bincount(torch.bucketize(torch.arange(17), ROW_ENDS, right=True), minlength=3)
    z = by_rows(x, weight.transpose(1, 2)) + bias.double().repeat_interleave(rows, 0)
    near(grouped_mm(x, weight, ROW_ENDS, transposed_b=True, bias=bias, act="silu"), torch.nn.functional.silu(z))
    gated = torch.nn.functional.silu(z[:, :100]) * z[:, 100:]
    q = grouped_mm(x, weight, ROW_ENDS, transposed_b=True, bias=bias, glu="silu", out_format=tw.fp8("1x128"))
    assert q.shape == (17, 100) and q.dtype == torch.float32 and q.offsets is ROW_ENDS
    near(q.dequantize(), gated, 4e-2)
    leaves = [t.double().requires_grad_() for t in (x, weight, bias)]
    y = grouped_mm(leaves[0], leaves[1], ROW_ENDS, transposed_b=True, bias=leaves[2], glu="silu")
    near(y.detach(), gated, 1e-12)
    y.sum().backward()
    assert all(t.grad is not None and t.grad.abs().sum() > 0 for t in leaves)
    assert not leaves[1].grad[0].any()  # of the empty group


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"offsets": None}, "offsets must be given"),
        ({"counts": ROW_ENDS}, "counts is for a of 3"),
        ({"c": torch.ones(1)}, "c is for groups of tokens"),
        ({"transposed_a": True}, "transposed_a"),
        ({"scale_a": torch.ones(17)}, "recipe_a"),
        ({"recipe_a": "TensorWise"}, "recipe_a must be one of"),
        ({"act": "silu", "glu": "silu"}, "act must be None"),
        ({"out_dtype": torch.int32}, "out_dtype"),
        ({"b": torch.ones(130, 8), "glu": "silu"}, "glu is for groups of rows"),
    ],
)
def test_grouped_mm_refuses(change, words):
    x, weight = factors()
    given = {"a": x, "b": weight.transpose(1, 2), "offsets": ROW_ENDS, **change}
    with pytest.raises((ValueError, TypeError), match=words):
        grouped_mm(**given)


def test_scales_that_do_not_fit_are_refused():
    x, weight = factors()
    a, b = tw.fp8("row").quantize(x), tw.fp8("row").quantize(weight)
    names = {"recipe_a": "RowWise", "recipe_b": "RowWise", "transposed_b": True}
    with pytest.raises(ValueError, match=r"scale_b is \[599\]"):
        grouped_mm(a.data, b.data, ROW_ENDS, scale_a=a.scale, scale_b=b.scale[1:], **names)
    with pytest.raises(ValueError, match=r"scale_a is \[16\]"):
        grouped_mm(a.data, b.data, ROW_ENDS, scale_a=a.scale[1:], scale_b=b.scale, **names)
    with pytest.raises(ValueError, match="column-wise"):
        grouped_mm(a, b, ROW_ENDS)


def test_matrices_with_counts():
    torch.manual_seed(0)
    x, weight, counts = torch.randn(3, 9, 130), torch.randn(3, 200, 130), torch.tensor([9, 0, 4])
    a, b = tw.fp8("1x128").quantize(x), quantize_experts(weight)
    for first, second in ((x.bfloat16(), weight.bfloat16()), (a, b)):
        y = grouped_mm(first, second, counts=counts, transposed_b=True)
        values = [t.dequantize() if isinstance(t, tw.Quantized) else t for t in (first, second)]
        exact = values[0].double() @ values[1].double().transpose(1, 2)
        for e, count in enumerate(counts.tolist()):
            if count:
                near(y[e, :count], exact[e, :count], 4e-3)
    with pytest.raises(ValueError, match="counts must be given"):
        grouped_mm(a, b, transposed_b=True)


def test_matrices_with_scales_of_rows():
    torch.manual_seed(0)
    x, weight, counts = torch.randn(3, 9, 130), torch.randn(3, 200, 130), torch.tensor([9, 0, 4])
    codes, scales = [t.to(torch.float8_e4m3fn) for t in (x, weight)], [torch.rand(3, n) + 0.5 for n in (9, 200)]
    first, second = (c.double() * s.double().unsqueeze(-1) for c, s in zip(codes, scales))
    named = {"scale_a": scales[0], "scale_b": scales[1], "recipe_a": "RowWise", "recipe_b": "RowWise"}
    named |= {"transposed_b": True, "counts": counts}
    for dtype, bar in ((torch.float32, 1e-6), (torch.bfloat16, 2e-3)):
        y = grouped_mm(*codes, out_dtype=dtype, **named)
        assert y.dtype == dtype
        near(y[0], first[0] @ second[0].t(), bar)
        near(y[2, :4], first[2, :4] @ second[2].t(), bar)
    a, b = (tw.quantize(t, tw.fp8("row")) for t in (x, weight))
    y = grouped_mm(a, b, counts=counts, transposed_b=True, out_dtype=torch.float32)
    near(y[0], a.dequantize()[0].double() @ b.dequantize()[0].double().t(), 1e-6)
    for change, words in (
        ({"recipe_a": "BlockWise1x128"}, "or both row-wise, not BlockWise1x128 and RowWise"),
        ({"scale_a": scales[0][:, :8]}, r"scale_a is \[3, 8\]"),
        ({"out_dtype": torch.int8}, "out_dtype must be one of"),
    ):
        with pytest.raises((ValueError, TypeError), match=words):
            grouped_mm(*codes, **{**named, **change})


def test_rows_of_no_group_leave_the_bias_alone():
    """What comes back for rows past the last group may be anything."""
    a, b = torch.randn(6, 8, requires_grad=True), torch.randn(2, 8, 4, requires_grad=True)
    bias = torch.randn(2, 4, requires_grad=True)
    grouped_mm(a, b, torch.tensor([2, 4]), bias=bias, act="silu")[:4].sum().backward()
    wanted = [t.grad.clone() for t in (b, bias)]
    for t in (a, b, bias):
        t.grad = None
    dy = torch.ones(6, 4)
    dy[4:] = 1e30
    grouped_mm(a, b, torch.tensor([2, 4]), bias=bias, act="silu").backward(dy)
    assert torch.equal(b.grad, wanted[0]) and torch.equal(bias.grad, wanted[1])


def test_blocks_that_reach_into_the_next_matrix_are_refused():
    a = tw.quantize(torch.randn(128, 128), tw.fp8("1x128"))
    matrices = torch.randn(4, 160, 128)
    with pytest.raises(ValueError, match="160 rows are no multiple of 128"):
        grouped_mm(a, tw.quantize(matrices, tw.fp8("128x128")), torch.tensor([128] * 4), transposed_b=True)
    y = grouped_mm(a, quantize_experts(matrices), torch.tensor([128] * 4), transposed_b=True)
    assert y.shape == (128, 160)
