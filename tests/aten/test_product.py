"""Products in every form of their kernels, by torch's settings, and into memory that is given."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.aten.compare import as_double, differences
from tilewright.aten import product

BF16, FP32 = torch.bfloat16, torch.float32
DTYPES = [FP32, BF16, torch.float16]


def drawn(*shapes: tuple[int, ...], dtype: torch.dtype = FP32) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def check(call, *given, taken: int = 1) -> None:
    expected, truth = call(*given), call(*as_double(given))
    with tw.aten.use("all", include="product"):
        made = call(*given)
        said = tw.aten.report()
    assert sum(one["taken"] for one in said.values()) == taken and not any(one["declined"] for one in said.values()), (
        said
    )
    assert not differences(made, expected, truth, float(expected.double().abs().max()))


@pytest.fixture(params=["small", "large"])
def form(request, monkeypatch):
    if request.param == "large":
        monkeypatch.setattr(product, "FEW", 0)
        monkeypatch.setattr(product, "SMALL", 0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_matrices(dtype, form):
    a, b, c = drawn((70, 33), (33, 130), (70, 130), dtype=dtype)
    check(torch.mm, a, b)
    check(lambda a, b: torch.mm(a.t(), b.t()), *drawn((33, 70), (65, 33), dtype=dtype))
    check(lambda c, a, b: torch.addmm(c, a, b, beta=0.5, alpha=-2), c, a, b)
    check(lambda c, a, b: torch.addmm(c[0], a, b), c, a, b)
    check(torch.bmm, *drawn((3, 5, 40), (3, 40, 7), dtype=dtype))
    check(lambda a, b: torch.bmm(a.transpose(1, 2), b[:, :, ::2]), *drawn((2, 40, 5), (2, 40, 8), dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_products_with_vectors(dtype, form):
    a, x, y = drawn((70, 33), (33,), (70,), dtype=dtype)
    check(torch.mv, a, x)
    check(lambda a, y: torch.mv(a.t(), y), a, y)
    check(lambda y, a, x: torch.addmv(y, a, x, beta=3, alpha=0.5), y, a, x)
    check(lambda y, a, x: torch.addmv(y[:1], a[:, ::2], x[::2]), y, a, x)


@pytest.mark.parametrize("turned", [False, True])
def test_a_vector_and_a_matrix_that_is_not_small(turned):
    """By tiles of whole rows, or of columns that lie side by side."""
    a, x = drawn((80, 1040), (1040,))
    check(torch.mv, a.t().contiguous().t() if turned else a, x)


def test_what_beta_0_leaves_unread():
    a, b, c, x = drawn((5, 6), (6, 7), (5, 7), (6,))
    check(lambda a, b, c: torch.addmm(c * float("nan"), a, b, beta=0), a, b, c)
    check(lambda a, x, c: torch.addmv(c[:, 0] * float("nan"), a, x, beta=0), a, x, c)
    with tw.aten.use("all", include="product"):  # a plan for the one is not taken for the other
        for beta in (1, 0, 2, 0):
            made = torch.addmm(c, a, b, beta=beta)
            torch.testing.assert_close(made, beta * c + a.double().mm(b.double()).float())


def test_a_result_that_is_given():
    a, b, c = drawn((5, 6), (6, 7), (5, 7))
    for out in (torch.empty(5, 7), torch.empty(7, 5).t(), torch.empty(5, 14)[:, ::2]):
        with tw.aten.use("all", include="product"):
            assert torch.mm(a, b, out=out) is out
            assert tw.aten.report()["mm.out"]["taken"] == 1
            torch.testing.assert_close(out, a @ b)
            assert torch.addmm(c, a, b, out=out) is out
        torch.testing.assert_close(out, c + a @ b)
    with tw.aten.use("all", include="product"):
        torch.addmm(c, a, b, out=c)  # which reads what it writes
        assert tw.aten.report()["addmm.out"]["declined"] == {"a result that overlaps an operand": 1}


def test_tf32_where_it_is_allowed(monkeypatch):
    """A setting is part of a plan's key, and reaches the kernel."""
    a, b = drawn((5, 6), (6, 7))
    seen = []
    launch = product.plans.launch
    monkeypatch.setattr(
        product.plans, "launch", lambda *own, **named: seen.append(named["TF32"]) or launch(*own, **named)
    )
    settings = torch.backends.cuda.matmul
    before = settings.fp32_precision
    try:
        with tw.aten.use("all", include="product"):
            for precision in ("ieee", "tf32", "ieee"):
                settings.fp32_precision = precision
                for _ in range(3):
                    torch.mm(a, b)
            key = [key[0][3] for key in tw.aten.router._active["mm"].outcomes]
    finally:
        settings.fp32_precision = before
    assert set(key) == {"ieee", "tf32"} and set(seen) == {False, True} and seen[0] is False


def test_what_is_left_to_aten():
    for a, b in ((torch.ones(2, 3, dtype=torch.int64),) * 2, (torch.ones(2, 3).double(),) * 2, (torch.ones(2, 0),) * 2):
        with tw.aten.use("all", include="product"):
            if a.is_cuda and not a.is_floating_point():  # which aten has on a processor alone
                with pytest.raises(NotImplementedError, match="addmm_cuda"):
                    torch.mm(a, b.t())
                said = tw.aten.report()["mm"]
                assert said["taken"] == 0 and said["declined"]
                continue
            made = torch.mm(a, b.t())
            said = tw.aten.report()["mm"]
        assert said["taken"] == 0 and said["declined"]
        assert torch.equal(made, torch.mm(a, b.t()))
