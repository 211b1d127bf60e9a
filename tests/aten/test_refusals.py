"""What aten refuses or warns of, ours does too, for such a call is aten's."""

from __future__ import annotations

import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch

import tilewright as tw
from tests.aten.compare import differences
from tests.aten.samples import DEVICE

PLAN = 3  # calls, after which a call that is like these is made by a plan


def told(call: Callable[[], Any]) -> tuple[Any, list[tuple[type, str]]]:
    """(what a call gives, or the exception that it raises; what it warns of)."""
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            made = call()
        except Exception as error:
            made = f"{type(error).__name__}: {error}"
    return made, [
        (one.category, str(one.message)) for one in heard if "Overriding a previously" not in str(one.message)
    ]


def check(call: Callable[[], Any], overload: str, declined: str | None) -> None:
    """Nothing tells a call from aten's, when it is new and when it has come again; it is ours, or left to aten for that reason."""
    aten, said = told(call)
    with tw.aten.use("all"):
        for at in range(PLAN):
            made, heard = told(call)
            assert heard == said, at
            assert not differences(made, aten), at
        reported = tw.aten.report()[overload]
    assert reported == {"taken": 0 if declined else PLAN, "declined": {declined: PLAN} if declined else {}}


def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(shape, dtype=dtype, device=DEVICE)


TERMS = {
    "larger": (7, 7), "of other columns": (3, 5), "a row of others": (5,), "of rank 3": (1, 3, 4), "empty": (0,),
    "of no rows": (0, 4), "as the result": (3, 4), "a column": (3, 1), "a row": (4,), "a number": (),
}  # fmt: skip
FIT = ("as the result", "a column", "a row", "a number")


@pytest.mark.parametrize("what", TERMS)
@pytest.mark.parametrize("beta", [0, 0.0, 2])
def test_terms_of_a_product(what, beta):
    """Of a shape that is refused even if it is not read; where it is not, NaNs in it do not count."""
    term, a, b = ones(*TERMS[what]) * (float("nan") if beta == 0 else 1), ones(3, 5), ones(5, 4)
    declined = None if what in FIT else "a term of another shape"
    check(lambda: torch.addmm(term, a, b, beta=beta), "addmm", declined)
    check(lambda: torch.addmm(term, a, b, beta=beta, out=ones(3, 4)), "addmm.out", declined)


def test_a_term_that_is_not_read_may_be_the_result():
    a, b = ones(3, 5), ones(5, 4)

    def call() -> torch.Tensor:
        term = ones(3, 4) * float("nan")
        return torch.addmm(term, a, b, beta=0, out=term)

    check(call, "addmm.out", None)


BYTES = "a mask of bytes, which aten warns of or refuses"


@pytest.mark.skipif(DEVICE != "cpu", reason="an index of bytes is a mask of another size")
def test_masks_of_bytes():
    x = torch.arange(6.0)
    mask = torch.tensor([1, 0, 1, 0, 0, 1], dtype=torch.uint8)

    def put(value: Any) -> torch.Tensor:
        made = x.clone()
        made[mask] = value
        return made

    check(lambda: x[mask], "index.Tensor", BYTES)
    check(lambda: x.view(2, 3)[:, mask[:3]], "index.Tensor", BYTES)
    check(lambda: put(ones(3)), "index_put_", BYTES)
    check(lambda: put(5.0), "index_put_", BYTES)
    check(lambda: x.index_put((mask,), torch.tensor(5.0)), "index_put", BYTES)
    check(lambda: x[mask.bool()], "index.Tensor", None)


CORRECTIONS: dict[str, tuple[Callable[[], Any], bool]] = {
    "std of one": (lambda: ones(1).std(), True),
    "of a number": (lambda: ones().std(), True),
    "of a number, without": (lambda: ones().std(correction=0), False),
    "of rows": (lambda: ones(2, 3).std(1, correction=3), True),
    "less than rows": (lambda: ones(2, 3).std(1, correction=2.5), False),
    "less than all": (lambda: ones(2, 3).std(correction=5), False),
    "of several dimensions": (lambda: ones(2, 3, 4).std((0, -1), correction=8), True),
    "negative": (lambda: ones(2, 1).std(1, correction=-1), False),
    "of none": (lambda: ones(5, 0).std(0), True),
    "of none, without": (lambda: ones(0, 3).std(1, correction=0), True),
    "of none, negative": (lambda: ones(0, 3).std(1, correction=-1), False),
    "complex": (lambda: ones(4).std(correction=2j), True),
}


@pytest.mark.parametrize("what", CORRECTIONS)
def test_degrees_of_freedom(what):
    call, declined = CORRECTIONS[what]
    check(call, "std.correction", "no degrees of freedom" if declined else None)


def test_degrees_of_freedom_of_both_moments():
    check(lambda: torch.var_mean(ones(2, 1), 1), "var_mean.correction", "no degrees of freedom")
    check(lambda: torch.var_mean(ones(2, 3), 1), "var_mean.correction", None)


FIRST = """
import warnings
import torch
import tilewright as tw
x, i = torch.ones(2, 3), torch.zeros(2, 3, dtype=torch.int64)
with warnings.catch_warnings(record=True) as heard, tw.aten.use("all"):
    warnings.simplefilter("always")
    for reduce in ("multiply", "add", "multiply"):
        x.scatter(0, i, x, reduce=reduce)
    print(tw.aten.report()["scatter.reduce"]["taken"], [str(one.message)[:48] for one in heard if "scatter" in str(one.message)])
"""


@pytest.mark.skipif(DEVICE != "cpu", reason="a process in the interpreter")
def test_scatters_that_reduce_warn_once():
    """In a process of its own, for aten has warned in this one."""
    made = subprocess.run([sys.executable, "-c", FIRST], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == "3 ['The reduce argument of torch.scatter with Tensor']"


@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_scatters_that_reduce_warn_always_if_asked_to(reduce):
    """Calls that a plan makes before are aten's then."""
    x, i = ones(2, 3), torch.zeros(2, 3, dtype=torch.int64, device=DEVICE)
    calls = {
        "scatter.reduce": lambda: x.scatter(0, i, x, reduce=reduce),
        "scatter_.reduce": lambda: x.clone().scatter_(0, i, x, reduce=reduce),
    }
    for overload, call in calls.items():
        aten = call()
        with tw.aten.use("all"):
            for always in (False, True, False):
                torch.set_warn_always(always)
                try:
                    for _ in range(PLAN):
                        made, heard = told(call)
                        assert not differences(made, aten)
                        assert [m[:19] for _, m in heard if "scatter" in m] == ["The reduce argument"] * always
                finally:
                    torch.set_warn_always(False)
            assert tw.aten.report()[overload] == {"taken": 2 * PLAN, "declined": {"a warning of each call": PLAN}}


DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@pytest.mark.parametrize("to", [*DTYPES, torch.int64, torch.complex64], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norms_in_another_dtype(dtype, to):
    """Never one that holds less."""
    declined = None if to in DTYPES and torch.promote_types(dtype, to) == to else "a dtype that is refused"
    check(lambda: torch.linalg.vector_norm(ones(4, dtype=dtype), dtype=to), "linalg_vector_norm", declined)


@pytest.mark.parametrize("order", [-1, -2.5, float("-inf"), 2j])
def test_norms_of_nothing(order):
    for shape, dim in (((0, 3), 0), ((0, 3), 1), ((0, 3), None), ((0,), ()), ((3, 0), (0, 1))):
        name = "an order that is refused, or may be of nothing"
        check(
            lambda shape=shape, dim=dim: torch.linalg.vector_norm(ones(*shape), order, dim), "linalg_vector_norm", name
        )


@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU's aten asserts there, and loses the context")
@pytest.mark.parametrize(
    ("repeats", "size"), [([1, 2], 5), ([3, 2], 2), ([3, 2], 0), ([0, 0], 1), ([3, 2], 5), ([0, 0], 0)]
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
def test_sizes_of_what_is_repeated(repeats, size, dtype):
    declined = None if sum(repeats) == size else "a negative number of repeats, or another size than all"
    given = torch.tensor(repeats, dtype=dtype)
    check(lambda: torch.repeat_interleave(given, output_size=size), "repeat_interleave.Tensor", declined)


@pytest.mark.parametrize(
    "given", [([6, 7], 1, 0, 1), ([4, 3, 5], -2, 2, 0), ([3, 3], 5, 0, 1), ([1, 0], 0, 0, 1)], ids=str
)
def test_gradients_of_diagonals(given):
    """Of the diagonal's shape; aten expands others, or refuses them."""
    right = torch.empty(given[0]).diagonal(*given[1:]).shape
    for shape in {(), (1,), (7,), (2, 6), (0,), right}:
        declined = None if shape == right else "a gradient that is not of the diagonal's shape"
        call = lambda shape=shape: torch.ops.aten.diagonal_backward(ones(*shape), *given)  # noqa: E731
        check(call, "diagonal_backward", declined)
    call = lambda: torch.ops.aten.diagonal_backward(ones(3), [3, -1], 0, 0, 1)  # noqa: E731
    check(call, "diagonal_backward", "dimensions that are refused")


@pytest.mark.parametrize("name", ["rtol", "atol"])
def test_tolerances(name):
    """Calls with others come after a plan was made with 0."""
    x = torch.tensor([1.0, 2.0, float("inf")], device=DEVICE)
    for tolerance in (0.0, float("nan"), -1.0, 1e-3, float("inf")):
        told_of = {name: tolerance}
        refused = not tolerance >= 0
        one = "two dtypes or a negative tolerance, which torch refuses" if refused else None
        check(lambda told_of=told_of: torch.isclose(x, x, **told_of), "isclose", one)
        one = "shapes that broadcast, two dtypes, or a negative tolerance" if refused else None
        check(lambda told_of=told_of: torch.allclose(x, x, **told_of), "allclose", one)
    calls = [lambda n=n: torch.isclose(x, x, **{name: n}) for n in (0.0, float("nan"), 0.0, -1.0, 1.0)]
    aten = [told(call) for call in calls for _ in range(PLAN)]
    with tw.aten.use("all"):
        made = [told(call) for call in calls for _ in range(PLAN)]
    for (own, heard), (other, said) in zip(made, aten):
        assert heard == said and not differences(own, other)


@pytest.mark.parametrize("one", [torch.int32, torch.bool, torch.float32], ids=str)
@pytest.mark.parametrize("other", [torch.int32, torch.bool, torch.bfloat16], ids=str)
def test_quotients_of_integers(one, other):
    """Whatever they are added to."""
    declined = None if one.is_floating_point or other.is_floating_point else "integers divided by integers"
    for shape in ((3,), ()):
        call = lambda shape=shape: torch.addcdiv(ones(3), ones(*shape, dtype=one), ones(*shape, dtype=other))  # noqa: E731
        check(call, "addcdiv", declined)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.bool], ids=str)
@pytest.mark.parametrize("factors", [{"alpha": True}, {"beta": False}, {"alpha": True, "beta": 2}, {}], ids=str)
def test_bools_as_factors_of_an_outer_product(dtype, factors):
    """Of bools alone."""
    refused = dtype != torch.bool and any(isinstance(n, bool) for n in factors.values())
    matrix, row, column = (ones(*shape, dtype=dtype) for shape in ((3, 4), (3,), (4,)))
    check(lambda: torch.addr(matrix, row, column, **factors), "addr", "a bool as a factor" if refused else None)


@pytest.mark.parametrize("pad", [[-4, 3], [3, -4], [1, 1, -3, 2], [1, 1, 2, -3], [-3, 3], [3, -3]])
def test_sides_that_are_cut_off(pad):
    """No more of one than there is, whatever is added on the other."""
    declined = None if pad in ([-3, 3], [3, -3]) else "a size that is refused, or nothing to pad"
    check(lambda: torch.ops.aten.constant_pad_nd(ones(2, 3), pad, 7), "constant_pad_nd", declined)
