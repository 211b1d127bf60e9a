"""What is peculiar to rms_norm's kernels."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.core.tensor import power_of_two
from tilewright.ops.norm import rms_norm as norm
from tilewright.ops.norm import row_pieces


@pytest.mark.parametrize("rows", [1, 3, 5])
def test_without_eps_the_rows_past_the_end_do_not_count(rows):
    """A block of rows that is not full has rows of zeros behind it, whose rstd is infinite when eps is 0."""
    source = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 64, generator=source).requires_grad_()
    weight = torch.randn(64, generator=source).requires_grad_()
    dy = torch.randn(rows, 64, generator=source)
    with tw.force("triton"):
        found = torch.autograd.grad(tw.rms_norm(x, weight, 0.0), [x, weight], dy)
    wanted = torch.autograd.grad(torch.nn.functional.rms_norm(x, (64,), weight, 0.0), [x, weight], dy)
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


# Of the columns that a program holds, one of so many may be idle where there are more than 1024
@pytest.mark.parametrize(
    ("split", "idle"),
    [(row_pieces.split_plain, 9), (row_pieces.split_codes, 2), (row_pieces.split_backward, 2)],
    ids=lambda f: str(f)[:22],
)
def test_every_width_is_covered_by_few_pieces_and_few_idle_columns(split, idle):
    for columns in range(1, 70001):
        block, pieces = split(columns)
        assert power_of_two(block) == block and pieces <= 20
        assert block * (pieces - 1) < columns <= block * pieces
        unused = block * pieces - columns
        if columns > 1024:
            assert idle * unused <= block * pieces or unused < 256, columns


@pytest.mark.parametrize(
    ("columns", "plain", "codes", "backward"),
    [
        (128, (128, 1), (128, 1), (128, 1)), (1536, (512, 3), (2048, 1), (2048, 1)), (2048, (2048, 1), (2048, 1), (2048, 1)),
        (2880, (1024, 3), (1024, 3), (1024, 3)), (4096, (4096, 1), (4096, 1), (1024, 4)), (5120, (1024, 5), (1024, 5), (1024, 5)),
        (7168, (1024, 7), (8192, 1), (8192, 1)), (8192, (1024, 8), (8192, 1), (8192, 1)),
        (12288, (4096, 3), (4096, 3), (4096, 3)), (16384, (4096, 4), (4096, 4), (8192, 2)),
        (32768, (8192, 4), (4096, 8), (8192, 4)),
    ],
)  # fmt: skip
def test_widths_of_models_are_split_as_they_were_measured_best(columns, plain, codes, backward):
    assert (row_pieces.split_plain(columns), row_pieces.split_codes(columns), row_pieces.split_backward(columns)) == (
        plain,
        codes,
        backward,
    )


WIDTHS = [
    1290,
    2500,
    2560,
]  # 3 of 512 of which the last is short; 5 of 512, in codes and backward 3 of 1024, of which it is


def operands(columns: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """x, residual and dy of 5 rows, which fill no block of rows, and a weight."""
    source = torch.Generator().manual_seed(columns)
    return [torch.randn(*shape, columns, generator=source).to(dtype) for shape in [(5,), (5,), (5,), ()]]


@pytest.mark.parametrize("columns", WIDTHS)
def test_rows_in_pieces(columns):
    x, residual, dy, weight = operands(columns)
    x.requires_grad_()
    weight.requires_grad_()
    found, wanted = [], []
    for ours, names in ((found, "triton"), (wanted, "reference")):
        with tw.force(names):
            y, rstd = tw.rms_norm_rstd(x, weight, weight_offset=1.0)
            total, h = tw.add_rms_norm(x, residual, weight)
            ours += [y, rstd, total, h, *torch.autograd.grad([y, total, h], [x, weight], [dy, dy, dy])]
    for a, b in zip(found, wanted):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2)
    assert torch.equal(found[3], wanted[3])


@pytest.mark.parametrize("columns", WIDTHS)
def test_tight_registers_change_no_bit(columns, monkeypatch):
    x, _, dy, weight = operands(columns)
    made = []
    for tight in (False, True):
        for kernel in (norm.rms_norm_forward, norm.rms_norm_backward):
            chosen = kernel.default
            monkeypatch.setattr(kernel, "default", lambda a, chosen=chosen, tight=tight: {**chosen(a), "TIGHT": tight})
        # Not through the op, which would play back what it launched the first time
        y = norm.forward(x, weight, 1e-6, weight_offset=0.0, rstd=None, out_format=None, out=None)
        made.append([y, *norm.gradients(x, weight, None, dy, None, 1e-6, 0.0, ("x", "weight"))])
    assert all(torch.equal(a, b) for a, b in zip(*made))


FORMATS = [tw.fp8("1x128", ways="row"), tw.int8("row"), tw.nvfp4(), tw.mx()]


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@pytest.mark.parametrize("columns", [2304, 2560])
def test_codes_of_pieces_are_those_of_the_row(fmt, columns, monkeypatch):
    """Of rows in pieces, as one piece, and read twice; with rstd given, for the order of a sum moves its last bit."""
    x, _, _, weight = operands(columns)
    rstd = torch.rsqrt(x.float().square().mean(-1))
    made = []
    for changed in ({}, {"split_codes": lambda N: (4096, 1)}, {"HELD": 0}):
        for name, value in changed.items():
            monkeypatch.setattr(row_pieces, name, value)
        made.append(norm.forward(x, weight, 1e-6, weight_offset=0.0, rstd=rstd, out_format=fmt, out=None))
        monkeypatch.undo()
    for q in made[1:]:
        for what, found, wanted in zip(fmt.tensor_names, q.tensors(), made[0].tensors()):
            assert torch.equal(found.view(torch.uint8), wanted.view(torch.uint8)), what


@pytest.mark.parametrize("fmt", [tw.int8("row"), tw.int4("row"), tw.fp8("row")], ids=str)
@pytest.mark.parametrize("columns", [40, 1290, 2560])
def test_one_scale_a_row_is_that_of_the_row_s_largest_number(fmt, columns):
    """All bits are those of y quantised afterwards: of x * weight, times rstd, for the maximum is found before rstd is."""
    x, _, _, weight = operands(columns)
    rstd = torch.rsqrt(x.float().square().mean(-1))
    with tw.force("triton"):
        found = tw.rms_norm(x, weight, rstd=rstd, out_format=fmt)
    wanted = fmt.quantize(x.float() * weight.float() * rstd[:, None])
    for what, a, b in zip(fmt.tensor_names, found.tensors(), wanted.tensors()):
        assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), what


@pytest.mark.parametrize("rule", ["te", "exact"])
@pytest.mark.parametrize("columns", [40, 2560])
def test_a_static_scale_of_0_gives_the_reference_s_codes(rule, columns):
    """NaN for zeros, the largest code for the rest: nothing of it is mended on the way."""
    x, _, _, weight = operands(columns)
    x = x.masked_fill(torch.arange(columns) % 3 == 0, 0.0)
    x[1] = 0.0
    fmt = tw.fp8("tensor", rule=rule, scale=torch.zeros(1))
    with tw.force("triton"):
        found = tw.rms_norm(x, weight, out_format=fmt)
    with tw.force("reference"):
        wanted = tw.rms_norm(x, weight, out_format=fmt)
    found, wanted = (q.data.view(torch.uint8) for q in (found, wanted))
    assert torch.equal(found, wanted) and (found[x == 0.0] == 0x7F).all() and ((found & 0x7F)[x != 0.0] == 0x7E).all()


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_new_residual_may_lie_on_the_old(columns):
    x, residual, _, weight = operands(columns)
    with tw.force("triton"):
        wanted, h = tw.add_rms_norm(x, residual, weight)
        y = torch.empty_like(x)
        found = tw.add_rms_norm(x, residual, weight, out=(y, residual))
    assert torch.equal(found[0], wanted) and torch.equal(residual, h)
