"""The kernels over lists of tensors, with chunks of several tiles, and the tables that say where the tensors lie."""

from __future__ import annotations

import math
from unittest import mock

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.ops.optimiser import multi_tensor_table
from tilewright.ops.optimiser.multi_tensor_table import TILE
from tilewright.runtime.kernel import collect

ORDS = (1.0, 2.0, math.inf)


@pytest.fixture(autouse=True)
def kernels():
    multi_tensor_table._tables.clear()
    with tw.force("triton"), torch.no_grad():
        yield
    multi_tensor_table._tables.clear()


def norm(tensors: list[Tensor], ord: float) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([t.double().reshape(-1) for t in tensors]), ord).float()


@pytest.fixture
def long_chunks(monkeypatch):
    monkeypatch.setattr(multi_tensor_table, "span_of", lambda size, device: 3 * TILE)


def tensors() -> list[Tensor]:
    """Several tiles and a tail, several chunks, less than a lane, off the boundary, with gaps, one row more than fits."""
    source = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=source)

    room = draw(9000)
    return [
        draw(8 * 4096 + 5),
        draw(3 * 8192 + 1).bfloat16(),
        draw(2 * 8192).half(),
        draw(3),
        room[1:8999],
        draw(70, 130)[:, :77],
        draw(33, 65).t(),
        draw(6, 7, 8)[:, ::2, ::3].bfloat16(),
        draw(1).expand(50, 60),
    ]


@pytest.mark.parametrize("ord", ORDS)
def test_norm_over_chunks_of_several_tiles(long_chunks, ord):
    given = tensors()
    torch.testing.assert_close(tw.multi_tensor_norm(given, ord), norm(given, ord), rtol=1e-7, atol=0)


def test_zeros_over_chunks_of_several_tiles(long_chunks):
    given = [t.clone().masked_fill_(t.abs() < 0.3, -0.0) for t in tensors()]
    given[0][7] = math.nan
    assert int(tw.multi_tensor_count_zeros(given)) == sum(int((t == 0).sum()) for t in given)


@pytest.mark.parametrize("over", [False, True])
def test_scale_over_chunks_of_several_tiles(long_chunks, over):
    given = [t.clone() if 0 in t.stride() else t for t in tensors()]
    expected = [(t.float() * 0.75).to(t.dtype) for t in given]
    found = tw.multi_tensor_scale(given, 1.5, by=torch.tensor(0.5), out=given if over else None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("ord", ORDS)
@pytest.mark.parametrize("at", [0, 4095, 4096, -1])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_shows(ord, at, value):
    long = torch.ones(4 * 4096 + 3)
    long[at] = value
    found = float(tw.multi_tensor_norm([torch.ones(5), long], ord))
    assert math.isnan(found) if math.isnan(value) else found == math.inf


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_overflow_and_no_underflow(dtype):
    for value in (1e12, 1e30, 1e-30):
        given = [torch.full((700,), value, dtype=dtype) for _ in range(20)]
        torch.testing.assert_close(tw.multi_tensor_norm(given), norm(given, 2), rtol=1e-7, atol=0)


def test_an_infinite_sum_of_finite_numbers_is_infinite():
    assert float(tw.multi_tensor_norm([torch.full((9,), 3e38)], 1.0)) == math.inf


def test_a_factor_of_one_leaves_tensors_unread():
    given = [torch.randn(5000), torch.randn(3).bfloat16()]
    kept = [t.clone() for t in given]
    tw.multi_tensor_scale(given, by=torch.ones(()), out=given)
    torch.testing.assert_close(given, kept, rtol=0, atol=0)
    copies = tw.multi_tensor_scale(given)  # into new memory there is something to do
    torch.testing.assert_close(copies, kept, rtol=0, atol=0)
    tw.multi_tensor_scale(given, by=torch.tensor(math.nan), out=given)
    assert all(bool(t.isnan().all()) for t in given)


@pytest.mark.parametrize("over", [False, True])
def test_a_limit(over):
    given = [
        torch.tensor([-3.0, -0.5, 0.25, 2.0, math.inf, -math.inf, math.nan]),
        torch.linspace(-4, 4, 5000).bfloat16(),
    ]
    expected = [(t.float() * 2).clamp(-1.5, 1.5).to(t.dtype) for t in given]
    found = tw.multi_tensor_scale(given, 2.0, limit=1.5, out=given if over else None)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
    tw.multi_tensor_scale(found, limit=0.5, out=found)  # a factor of one, and still something to do
    torch.testing.assert_close(found, [t.clamp(-0.5, 0.5) for t in expected], rtol=0, atol=0, equal_nan=True)


def test_chunks_are_balanced():
    given = [torch.zeros(1), torch.zeros(40 * 4096 + 1), torch.zeros(0), torch.zeros(9000).half()]
    table = multi_tensor_table.table_of(given)
    assert table.rows == 3 and table.span == TILE
    owner = table.words[table.rows * multi_tensor_table.WORDS :]
    assert owner.bincount().tolist() == [1, 41, 2]
    assert table.chunks == 44


def test_chunks_grow_with_the_work():
    device = torch.device("cpu")
    assert multi_tensor_table.span_of(1, device) == TILE
    assert multi_tensor_table.span_of(16 * 132 * 2 * TILE, device) == 2 * TILE
    assert multi_tensor_table.span_of(1 << 40, device) == multi_tensor_table.LARGEST


def test_a_table_is_used_again_only_for_the_very_same_tensors():
    memory = torch.randn(64)
    given = [memory[:32].view(4, 8), torch.randn(5)]
    with mock.patch.object(multi_tensor_table, "_made", side_effect=multi_tensor_table._made) as made:

        def builds(tensors: list[Tensor]) -> int:
            before = made.call_count
            torch.testing.assert_close(tw.multi_tensor_norm(tensors), norm(tensors, 2), rtol=1e-7, atol=0)
            return made.call_count - before

        assert builds(given) == 1
        assert builds(given) == 0
        given[0] *= 2  # other values, same place
        assert builds(given) == 0
        assert builds([memory[32:].view(4, 8), given[1]]) == 1  # another address
        assert builds([memory[:24].view(3, 8), given[1]]) == 1  # another size
        assert builds([memory.view(8, 8)[::2], given[1]]) == 1  # other strides
        low = torch.rand(8).bfloat16()
        assert builds([low]) == 1
        assert builds([low.view(torch.float16)]) == 1  # another dtype
        assert builds(given[::-1]) == 1
        assert builds(given) == 0


def test_tables_are_bounded(monkeypatch):
    monkeypatch.setattr(multi_tensor_table, "MOST", 3)
    given = torch.randn(10)
    for i in range(1, 8):
        tw.multi_tensor_norm([given[:i]])
    assert len(multi_tensor_table._tables) == 3


def test_thousands_of_tensors_are_one_launch():
    given = [torch.randn(1 + i % 7) for i in range(2000)]
    with collect() as launches:
        tw.multi_tensor_norm(given)
    assert [one.kernel.name for one in launches] == ["multi_tensor_reduce", "multi_tensor_finish"]
