"""Softmax and norms in every form of their kernels: along rows and across them, in one pass and in two, by parts, with each output
mask, and statistics as aten returns them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat
from tilewright.aten import norm, norm_cells, norm_channels, norm_rows, passes, softmax, softmax_columns, softmax_long

aten = torch.ops.aten
BF16, FP32 = torch.bfloat16, torch.float32
INF, NAN = float("inf"), float("nan")


def check(
    name: str, call: Callable[..., Any], *given: Any, steps: bool = True, mask: Sequence[bool] | None = None
) -> None:
    """A call of an overload is ours, and its results are aten's: with `steps`, within some of the largest operand or result; with
    a `mask`, those that it asks for and no others, where aten may return more."""
    expected, truth = call(*given), call(*as_double(given))
    if mask is not None:
        expected, truth = ([t if asked else None for t, asked in zip(made, mask)] for made in (expected, truth))
    with tw.aten.use("all", include=[name]):
        made = call(*given)
        said = tw.aten.report()[name]
    assert said["taken"] and not said["declined"], said
    every = [t for t in (*given, *flat(expected)) if isinstance(t, Tensor) and t.numel()]
    largest = max(float(t.double().nan_to_num(0, 0, 0).abs().max()) for t in every)
    assert not differences(made, expected, truth, largest if steps else 0.0)


def check_refused(name: str, call: Callable[..., Any], *given: Any) -> None:
    """A call is refused in aten's words."""
    with pytest.raises(RuntimeError) as expected:
        call(*given)
    with tw.aten.use("all", include=[name]), pytest.raises(RuntimeError) as found:
        call(*given)
    assert str(found.value) == str(expected.value)


@pytest.fixture(params=["small", "large"])
def form(request, monkeypatch):
    """The form that small tensors take, and those of large ones, in tiles so small that some rows do not fit."""
    if request.param == "large":
        for module in (softmax, norm, norm_rows):
            monkeypatch.setattr(module, "SMALL", 0)
        monkeypatch.setattr(softmax, "LONGEST", {False: 256, True: 256})
        monkeypatch.setattr(softmax, "ACROSS", (16, 32))
        monkeypatch.setattr(softmax_long, "BLOCK", 128)
        monkeypatch.setattr(softmax_long, "takes", lambda n, *_: n < 500)  # and others in two passes
        monkeypatch.setattr(softmax_columns, "TILE", {1: (16, 16), 2: (16, 16)})
        # So that a second pass follows before all groups had their first
        monkeypatch.setattr(passes, "L2_PARTS", 1 << 20)
        monkeypatch.setattr(norm_cells, "TILE", 64)
        monkeypatch.setattr(norm_cells, "STRETCH", 32)
        monkeypatch.setattr(norm_rows, "ROW_BYTES", 512)
        monkeypatch.setattr(norm, "LONGEST", 128)
        monkeypatch.setattr(norm, "LONGEST_OF_TWO", 128)
        monkeypatch.setattr(norm, "STRETCH", 64)
        monkeypatch.setattr(norm, "ACROSS", (16, 32))
    return request.param


# ---- softmax ---------------------------------------------------------------------------------------------------------

SHAPES = [
    ((3, 40), 1),
    ((5, 300), 1),
    ((3, 600), 1),
    ((33, 7), 0),
    ((70, 48), 0),
    ((3, 37, 20), 1),
    ((2, 20, 17), 1),
    ((2, 65, 32), 1),
    ((9,), 0),
]


@pytest.mark.parametrize(("shape", "dim"), SHAPES)
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_softmax_over_any_dimension(shape, dim, dtype, form):
    torch.manual_seed(0)
    x, dy = (torch.randn(shape).mul(3).to(dtype) for _ in range(2))
    for name in ("_softmax", "_log_softmax"):
        op, back = getattr(aten, name), getattr(aten, f"{name}_backward_data")
        check(name, lambda x, op=op: op(x, dim, False), x, steps=name == "_log_softmax")
        y = op(x, dim, False)
        check(f"{name}_backward_data", lambda dy, y, back=back: back(dy, y, dim, y.dtype), dy, y)


@pytest.mark.parametrize(
    "turn", [lambda x: x.t(), lambda x: x[::2, 1:], lambda x: x[:, :1].expand(12, 9), lambda x: x[None].transpose(0, 2)]
)
def test_softmax_of_views(turn, form):
    torch.manual_seed(0)
    x = turn(torch.randn(12, 30))
    for dim in range(x.dim()):
        check("_softmax", lambda x, dim=dim: aten._softmax(x, dim, False), x, steps=False)


def test_softmax_of_infinities(form):
    x = torch.tensor([[-INF] * 4, [INF, 0, 1, -INF], [NAN, 0, 1, 2], [-INF, 0, 1, 2]])
    late = torch.full((2, 600), -INF)
    late[:, 550] = 1.0  # the first of several tiles has no finite element
    for own in (x, late):
        check("_softmax", lambda x: aten._softmax(x, 1, False), own, steps=False)
        check("_log_softmax", lambda x: aten._log_softmax(x, 1, False), own, steps=False)


@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_softmax_takes_the_largest_of_all_elements(dtype, form):
    """By what it takes from elements, none of which would have an exponential of its own."""
    x = torch.randn(70, 48).to(dtype)
    x[13], x[61, ::2] = 300.0, 600.0
    for name in ("_softmax", "_log_softmax"):
        op = getattr(aten, name)
        check(name, lambda x, op=op: op(x, 0, False), x, steps=name == "_log_softmax")


def test_wide_results_of_halves(monkeypatch):
    """Which aten has on a GPU alone."""
    torch.manual_seed(0)
    x, dy = torch.randn(5, 40).half(), torch.randn(5, 40)
    if not x.is_cuda:
        with tw.aten.use("all", include=["_softmax"]), pytest.raises(RuntimeError, match="half to float"):
            aten._softmax(x, 1, True)
    monkeypatch.setattr(softmax, "widens", lambda x: True)
    with tw.aten.use("all", include=["_softmax", "_softmax_backward_data"]):
        y = aten._softmax(x, 1, True)
        dx = aten._softmax_backward_data(dy, y, 1, torch.float16)
        assert all(one["taken"] for one in tw.aten.report().values())
    exact = aten._softmax(x.double(), 1, False)
    assert (y.dtype, dx.dtype) == (FP32, torch.float16)
    torch.testing.assert_close(y, exact.float(), rtol=1e-6, atol=1e-7)
    wanted = aten._softmax_backward_data(dy.double(), exact, 1, torch.float64)
    torch.testing.assert_close(dx, wanted.half(), rtol=2e-3, atol=1e-5)


# ---- norms -----------------------------------------------------------------------------------------------------------

MASKS = [[True, True, True], [True, False, False], [False, True, False], [False, False, True], [False, False, False]]
# Dtypes of operands and of weights, and the form of kernels
PAIRS = [
    (FP32, FP32, "small"),
    (BF16, BF16, "small"),
    (BF16, FP32, "small"),
    (FP32, FP32, "large"),
    (BF16, FP32, "large"),
]


def masks(dtype: torch.dtype) -> list[list[bool]]:
    return MASKS if dtype == FP32 else MASKS[:2]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).add(1).to(dtype) for shape in shapes]


@pytest.mark.parametrize(("dtype", "other", "form"), PAIRS, indirect=["form"])
@pytest.mark.parametrize("shape", [(5, 7), (40, 7), (4, 96), (3, 300)])
def test_layer_norm(shape, dtype, other, form):
    x, dy = drawn(shape, shape, dtype=dtype)
    w, b = drawn(shape[1:], shape[1:], dtype=other)
    n = list(shape[1:])
    if x.is_cuda and other != dtype:  # which aten has on a processor alone
        forth = lambda x, w, b: aten.native_layer_norm(x, n, w, b, 1e-5)  # noqa: E731
        check_refused("native_layer_norm", forth, x, w, b)
        _, mean, rstd = forth(x, w.to(dtype), b.to(dtype))
        back = lambda dy, *rest: aten.native_layer_norm_backward(dy, x, n, *rest, [True] * 3)  # noqa: E731
        check_refused("native_layer_norm_backward", back, dy, mean, rstd, w, b)
        return
    for weight, bias in ((w, b), (None, None), (w, None)):
        check("native_layer_norm", lambda x, *_, w=weight, b=bias: aten.native_layer_norm(
            x, n, *(None if t is None else t.to(_[0].dtype) for t in (w, b)), 1e-5), x, w)  # fmt: skip
    _, mean, rstd = aten.native_layer_norm(x, n, w, b, 1e-5)
    for mask in masks(dtype):
        check("native_layer_norm_backward", lambda dy, x, *rest, mask=mask: aten.native_layer_norm_backward(dy, x, n, *rest, mask),
              dy, x, mean, rstd, w, b)  # fmt: skip


@pytest.mark.parametrize("shape", [(5, 7), (3, 300)])
def test_rms_norm(shape, form):
    (x, dy), (w,), n = drawn(shape, shape), drawn(shape[1:]), list(shape[1:])
    for weight in (w, None):
        x.requires_grad_()
        expected = torch.nn.functional.rms_norm(x.double(), n, None if weight is None else w.double(), 1e-5)
        wanted = torch.autograd.grad(expected, x, dy.double())[0]
        with tw.aten.use("all", include=["_fused_rms_norm", "_fused_rms_norm_backward"]), torch.no_grad():
            y, rstd = aten._fused_rms_norm(x, n, weight, 1e-5)
            dx, dw = aten._fused_rms_norm_backward(dy, x, n, rstd, weight, [True, weight is not None])
            assert [one["taken"] for one in tw.aten.report().values()] == [1, 1]
        torch.testing.assert_close(y, expected.float(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dx, wanted, rtol=1e-5, atol=1e-5)
        assert rstd.shape == (shape[0], 1) and rstd.dtype == FP32
        if weight is not None:
            exact = (dy.double() * x.detach().double() * rstd.double()).sum(0)
            torch.testing.assert_close(dw, exact.float(), rtol=1e-5, atol=1e-5)
        else:
            assert dw is None


LAYOUTS = [torch.contiguous_format, torch.channels_last]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "other", "form"), PAIRS, indirect=["form"])
def test_group_norm(dtype, other, layout, form):
    shape, groups = (2, 6, 2, 3) if layout == torch.channels_last else (2, 6, 5, 16), 3
    x, dy = (t.contiguous(memory_format=layout) for t in drawn(shape, shape, dtype=dtype))
    w, b = drawn((6,), (6,), dtype=other)
    sizes = 2, 6, shape[2] * shape[3], groups
    if x.is_cuda and layout == torch.channels_last:
        pytest.skip("torch refuses channels last on a GPU")
    if x.is_cuda and other != dtype:  # which aten has on a processor alone
        check_refused("native_group_norm", lambda x, w, b: aten.native_group_norm(x, w, b, *sizes, 1e-5), x, w, b)
        return
    check("native_group_norm", lambda x, w, b: aten.native_group_norm(x, w, b, *sizes, 1e-5), x, w, b)
    check("native_group_norm", lambda x: aten.native_group_norm(x, None, None, *sizes, 1e-5), x)
    _, mean, rstd = aten.native_group_norm(x, w, b, *sizes, 1e-5)
    for mask in masks(dtype):
        if mask[0] or layout == torch.contiguous_format:  # aten of 2.13 crashes on a processor without the first
            call = lambda dy, x, *rest, mask=mask: aten.native_group_norm_backward(dy, x, *rest, *sizes, mask)  # noqa: E731
            check("native_group_norm_backward", call, dy, x, mean, rstd, w)


def test_groups_that_programs_hold(monkeypatch):
    monkeypatch.setattr(norm, "SMALL", 0)
    monkeypatch.setattr(norm_cells, "TILE", 64)
    monkeypatch.setattr(norm_cells, "SHORTEST", 32)
    (x,), (w, b), sizes = drawn((33, 12, 4, 8), dtype=BF16), drawn((12,), (12,), dtype=BF16), (33, 12, 32, 4)
    x[0] = 3.0  # of which the variance is 0
    assert norm_cells.holds(x, norm_channels.groups_of(x, *sizes, False))
    for weights in ((w, b), (w, None), (None, None)):
        call = lambda x, *own: aten.native_group_norm(x, *own, *sizes, 1e-5)  # noqa: E731
        check("native_group_norm", call, x, *weights)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("dtype", "other", "form"), PAIRS, indirect=["form"])
@pytest.mark.parametrize("training", [True, False])
def test_batch_norm(training, dtype, other, layout, form):
    """Running statistics are written to, with the variance of a sample."""
    shape = 3, 4, 5, 16
    x, dy = (t.contiguous(memory_format=layout) for t in drawn(shape, shape, dtype=dtype))
    w, b, level = drawn((4,), (4,), (4,), dtype=other)

    def call(x: Tensor, w: Tensor, b: Tensor, level: Tensor) -> tuple[Tensor, ...]:
        running = level.clone(), level.square() + 0.5
        return *aten.native_batch_norm(x, w, b, *running, training, 0.1, 1e-5), *running

    check("native_batch_norm", call, x, w, b, level)
    _, mean, rstd, *running = call(x, w, b, level)
    for mask in masks(dtype):
        back = lambda dy, x, w, *rest, mask=mask: aten.native_batch_norm_backward(dy, x, w, *rest, training, 1e-5, mask)  # noqa: E731
        if x.is_cuda and mask[0] and not training and layout == torch.channels_last:
            with tw.aten.use("all", include=["native_batch_norm_backward"]):  # aten's gradient lies by rows
                back(dy, x, w, *running, mean, rstd)
                said = tw.aten.report()["native_batch_norm_backward"]
            assert not said["taken"] and list(said["declined"])[0].startswith("channels last"), said
            continue
        check("native_batch_norm_backward", back, dy, x, w, *running, mean, rstd, mask=mask)
    if training:
        check("native_batch_norm", lambda x: aten.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5), x)


def test_few_channels_by_parts(monkeypatch):
    monkeypatch.setattr(norm, "FEWEST", 0)
    monkeypatch.setattr(norm, "SMALL", 0)
    monkeypatch.setattr(norm, "STRETCH", 64)
    monkeypatch.setattr(norm, "ACROSS", (16, 32))
    x, dy = drawn((3, 2, 8, 32), (3, 2, 8, 32))
    w, b = drawn((2,), (2,))
    for layout in LAYOUTS:
        own, grad = x.contiguous(memory_format=layout), dy.contiguous(memory_format=layout)
        check(
            "native_batch_norm", lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5), own, w, b
        )
        _, mean, rstd = aten.native_batch_norm(own, w, b, None, None, True, 0.1, 1e-5)
        for mask in MASKS[:2]:

            def back(dy: Tensor, x: Tensor, w: Tensor, *moments: Tensor, mask: list[bool] = mask) -> Any:
                return aten.native_batch_norm_backward(dy, x, w, None, None, *moments, True, 1e-5, mask)

            check("native_batch_norm_backward", back, grad, own, w, mean, rstd, mask=mask)
    check("native_layer_norm", lambda x: aten.native_layer_norm(x, [1024], None, None, 1e-5), drawn((2, 1024))[0])


@pytest.mark.parametrize(("shape", "dtype"), itertools.product([(6, 40), (40, 6), (5, 4, 7)], [FP32, BF16]))
def test_weight_norm(shape, dtype, form):
    for dim in (0, len(shape) - 1):
        lengths = [shape[d] if d == dim else 1 for d in range(len(shape))]
        v, dw, g = drawn(shape, shape, tuple(lengths), dtype=dtype)
        check("_weight_norm_interface", lambda v, g, dim=dim: aten._weight_norm_interface(v, g, dim), v, g)
        _, norms = aten._weight_norm_interface(v, g, dim)
        check(
            "_weight_norm_interface_backward",
            lambda *own, dim=dim: aten._weight_norm_interface_backward(*own, dim),
            dw,
            v,
            g,
            norms,
        )


def test_gradients_by_differences():
    def f(x: Tensor) -> Tensor:
        return torch.nn.functional.group_norm(torch.nn.functional.layer_norm(x, (4,)).softmax(1), 2)

    torch.manual_seed(0)
    x = torch.randn((2, 4), dtype=torch.float64, requires_grad=True)
    with tw.aten.use("all", include="rows"):
        assert torch.autograd.gradcheck(f, (x,))
        said = tw.aten.report()
    assert all(
        said[name]["taken"]
        for name in ("native_layer_norm_backward", "_softmax_backward_data", "native_group_norm_backward")
    )
