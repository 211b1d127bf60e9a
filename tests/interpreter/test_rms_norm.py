"""What is peculiar to rms_norm's kernels."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.core.tensor import power_of_two
from tilewright.ops.norm import rms_norm as rms_norm_module
from tilewright.ops.norm.rms_norm import rms_norm_backward, rms_norm_forward, split_columns


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


def test_every_width_is_covered_by_few_pieces_and_few_idle_columns():
    for columns in range(1, 70001):
        block, pieces = split_columns(columns)
        assert power_of_two(block) == block and pieces <= 16
        assert block * (pieces - 1) < columns <= block * pieces
        idle = block * pieces - columns
        if columns > 1024:
            assert 9 * idle <= block * pieces or idle < 256, columns


@pytest.mark.parametrize(
    ("columns", "split"),
    [
        (1, (1, 1)), (128, (128, 1)), (2048, (2048, 1)), (16384, (16384, 1)), (1536, (512, 3)), (2560, (512, 5)),
        (2880, (1024, 3)), (3584, (512, 7)), (5120, (1024, 5)), (6144, (2048, 3)), (7168, (1024, 7)), (12288, (4096, 3)),
        (32768, (8192, 4)), (65536, (8192, 8)),
    ],
)  # fmt: skip
def test_widths_of_models_are_split_into_the_fewest_pieces(columns, split):
    assert split_columns(columns) == split


WIDTHS = [1280, 1290, 1536]  # 5 of 256, 3 of 512 of which the last is short, 3 of 512


def operands(columns: int, dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    """x, residual and dy of 5 rows, which fill no block of rows, and a weight."""
    source = torch.Generator().manual_seed(columns)
    return [torch.randn(*shape, columns, generator=source).to(dtype) for shape in [(5,), (5,), (5,), ()]]


def configured(monkeypatch, **constants) -> None:
    """Launch both kernels with constants of their own."""
    for kernel in (rms_norm_forward, rms_norm_backward):
        chosen, known = kernel.default, set(kernel.names)
        more = {name: value for name, value in constants.items() if name in known}
        monkeypatch.setattr(kernel, "default", lambda a, chosen=chosen, more=more: {**chosen(a), **more})


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
    made = []
    for tight in (False, True):
        with monkeypatch.context() as patch, tw.force("triton"):
            configured(patch, TIGHT=tight)
            x, _, dy, weight = operands(columns)
            x.requires_grad_()
            weight.requires_grad_()
            y = tw.rms_norm(x, weight)
            made.append([y, *torch.autograd.grad(y, [x, weight], dy)])
    assert all(torch.equal(a, b) for a, b in zip(*made))


@pytest.mark.parametrize(
    "fmt", [tw.fp8("1x128", ways="row"), tw.int8("row"), tw.nvfp4(ways="row"), tw.mx("e4m3", ways="row")], ids=str
)
def test_codes_of_rows_in_pieces_are_those_of_the_row(fmt, monkeypatch):
    """Whatever the pieces, and where a row is read twice, the codes are the same bits."""
    x, residual, _, weight = operands(1280)
    made = []
    for held in (rms_norm_module.HELD, 0):
        with monkeypatch.context() as patch, tw.force("triton"):
            patch.setattr(rms_norm_module, "HELD", held)
            made.append(tw.add_rms_norm(x, residual, weight, out_format=fmt))
    with tw.force("reference"):
        _, h = tw.add_rms_norm(x, residual, weight)
    for q, found in made:
        assert torch.equal(found, h)
        assert torch.equal(q.data.view(torch.uint8), made[0][0].data.view(torch.uint8))
        torch.testing.assert_close(q.dequantize(), made[0][0].dequantize(), rtol=0, atol=0)


@pytest.mark.parametrize("columns", WIDTHS)
def test_the_new_residual_may_lie_on_the_old(columns):
    x, residual, _, weight = operands(columns)
    with tw.force("triton"):
        wanted, h = tw.add_rms_norm(x, residual, weight)
        y = torch.empty_like(x)
        found = tw.add_rms_norm(x, residual, weight, out=(y, residual))
    assert torch.equal(found[0], wanted) and torch.equal(residual, h)
