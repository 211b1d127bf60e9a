"""Windows of planes: both layouts, padding, dilation, rounding up, NaN and equals, and tiles of large tensors."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat
from tilewright.aten import window

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
LAYOUTS = [torch.contiguous_format, torch.channels_last]
SHAPE = 2, 5, 9, 13
# Kernel, stride, padding, whether sizes are rounded up
WINDOWS = [((2, 2), (2, 2), (0, 0), False), ((3, 2), (2, 1), (1, 1), True), ((3, 3), (4, 5), (1, 0), False)]
WINDOWS += [((2, 3), (3, 2), (0, 1), True), ((3, 4), (1, 2), (1, 2), False)]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check(name: str, call, *given, right=None) -> None:
    """A call of an overload is ours, and its results are aten's, or those of the call that is `right` where aten is not."""
    right = right or call
    expected, truth = right(*given), right(*as_double(given))
    with tw.aten.use("all", include=[name]):
        made = call(*given)
        said = tw.aten.report()[name]
    assert said["taken"] and not said["declined"], said
    assert not differences(made, expected, truth, float(given[0].double().nan_to_num(0, 0, 0).abs().max()))


def by_rows(call, layout: torch.memory_format):
    """The call of contiguous operands, whose results are laid out as the test's are."""
    return lambda *given: tuple(
        t.contiguous(memory_format=layout) for t in flat(call(*(t.contiguous() for t in given)))
    )


@pytest.fixture(params=["small", "large"])
def form(request, monkeypatch):
    if request.param == "large":
        monkeypatch.setattr(window, "SMALL", 0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "at"), [(FP32, 0), (BF16, 1), (FP32, 2), (FP32, 3), (BF16, 4)])
def test_averages(dtype, at, layout, form):
    kernel, stride, padding, ceil = WINDOWS[at]
    (x,) = drawn(SHAPE, dtype=dtype)
    x = x.contiguous(memory_format=layout)
    for counted, divisor in ((True, None), (False, None), (True, 3)):
        rest = kernel, stride, padding, ceil, counted, divisor
        check("avg_pool2d", lambda x, rest=rest: aten.avg_pool2d(x, *rest), x)
        dy = torch.randn_like(aten.avg_pool2d(x, *rest))
        call = lambda dy, x, rest=rest: aten.avg_pool2d_backward(dy, x, *rest)  # noqa: E731
        # Of channels last aten's kernel on a GPU leaves the padding out (pytorch/pytorch#188344), and adds up other windows
        wrong = x.is_cuda and layout == torch.channels_last and any(padding)
        check("avg_pool2d_backward", call, dy, x, right=by_rows(call, layout) if wrong else None)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "at"), [(FP32, 0), (BF16, 1), (FP32, 2), (FP32, 3), (BF16, 4)])
def test_largest(dtype, at, layout, form):
    kernel, stride, padding, ceil = WINDOWS[at]
    (x,) = drawn(SHAPE, dtype=dtype)
    x = x.contiguous(memory_format=layout)
    rest = kernel, stride, padding, (1, 1) if at else (2, 3), ceil
    check("max_pool2d_with_indices", lambda x: aten.max_pool2d_with_indices(x, *rest), x)
    y, indices = aten.max_pool2d_with_indices(x, *rest)
    dy = torch.randn_like(y)
    name = "max_pool2d_with_indices_backward"
    check(name, lambda dy, x, indices: aten.max_pool2d_with_indices_backward(dy, x, *rest, indices), dy, x, indices)
    expected = aten.max_pool2d_with_indices_backward(dy.double(), x.double(), *rest, indices)
    with tw.aten.use("all", include=["max_pool2d_backward"]):  # of which torch has no kernel
        made = aten.max_pool2d_backward(dy, x, *rest)
    torch.testing.assert_close(made, expected.to(dtype), rtol=1e-2 if dtype == BF16 else 1e-6, atol=1e-6)


def test_nan_equals_and_nothing_finite():
    nan, inf = float("nan"), float("inf")
    rows = [[1.0, 1.0, nan, 0.0, -inf, -inf], [1.0, 1.0, 0.0, nan, -inf, -inf]]
    for layout in LAYOUTS:
        x = torch.tensor(rows).expand(2, 3, 2, 6).contiguous(memory_format=layout)
        for rest in (([2, 2],), ([2, 2], [1, 1], [1, 1])):
            call = lambda x, rest=rest: aten.max_pool2d_with_indices(x, *rest)  # noqa: E731
            # Of channels last aten's kernel on a GPU says 0 where nothing is finite, which may be in another window
            wrong = x.is_cuda and layout == torch.channels_last
            check("max_pool2d_with_indices", call, x, right=by_rows(call, layout) if wrong else None)


def test_windows_around_a_plane():
    """Of elements so far apart that none is in the plane, -inf where the first would be behind it."""
    (x,) = drawn((2, 3, 1, 6))
    check("max_pool2d_with_indices", lambda x: aten.max_pool2d_with_indices(x, [2, 2], [1, 1], [1, 1], [2, 2]), x)


def test_indices_of_elsewhere_are_not_followed():
    """An index that is in no window of its place gives no gradient, and reads or writes nothing."""
    x, dy = drawn((1, 1, 4, 4), (1, 1, 2, 2))
    indices = torch.tensor([[[[0, 99], [-7, 2**40]]]])
    with tw.aten.use("all", include=["max_pool2d_with_indices_backward"]):
        made = aten.max_pool2d_with_indices_backward(dy, x, [2, 2], [2, 2], [0, 0], [1, 1], False, indices)
    wanted = torch.zeros_like(x)
    wanted[0, 0, 0, 0] = dy[0, 0, 0, 0]
    assert torch.equal(made, wanted)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [(4, 6), (9, 13), (20, 17), (9, 17)])
def test_resampling(size, layout, form):
    for dtype in (FP32, BF16):
        x = drawn((2, 3, 9, 13), dtype=dtype)[0].contiguous(memory_format=layout)
        check("upsample_nearest2d", lambda x: aten.upsample_nearest2d(x, size), x)
        check("upsample_nearest2d", lambda x: aten.upsample_nearest2d(x, size, 1.7, 0.4), x)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("size", "rest"), [((4, 6), (False,)), ((12, 8), (True,)), ((4, 6), (False, 0.5, 0.45))])
def test_antialiased(size, rest, layout):
    x = drawn((2, 2, 9, 10))[0].contiguous(memory_format=layout)
    check("_upsample_bicubic2d_aa", lambda x: aten._upsample_bicubic2d_aa(x, size, *rest), x)


def test_planes_of_three_dimensions_and_views():
    (x,) = drawn((5, 9, 13))
    check("avg_pool2d", lambda x: aten.avg_pool2d(x, [3, 2], [1, 2], [1, 1]), x)
    check("max_pool2d_with_indices", lambda x: aten.max_pool2d_with_indices(x, [3, 2]), x.transpose(1, 2))
    check("avg_pool2d", lambda x: aten.avg_pool2d(x, [2]), x[None, :, ::2, 1:])


@pytest.mark.parametrize("call", [
    lambda x: aten.avg_pool2d(x, [2, 2], [0, 1]), lambda x: aten.avg_pool2d(x, [2, 2], [1, 1], [2, 2]),
    lambda x: aten.avg_pool2d(x, [2, 2], [], [0], False, True, 0), lambda x: aten.max_pool2d_with_indices(x, [99, 2]),
    lambda x: aten.upsample_nearest2d(x, [0, 3]), lambda x: aten._upsample_bicubic2d_aa(x[0], [2, 3], False),
])  # fmt: skip
def test_what_aten_refuses_is_refused(call):
    (x,) = drawn(SHAPE)
    with pytest.raises(RuntimeError) as expected:
        call(x)
    with tw.aten.use("all", include="window"), pytest.raises(RuntimeError) as found:
        call(x)
    assert str(found.value) == str(expected.value)
