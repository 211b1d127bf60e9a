"""The index engine beyond torch's samples: indices that are outside, negative or repeated, masks, long runs, sizes 0, 1 and all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences
from tests.aten.samples import DEVICE
from tests.aten.test_beyond import both
from tilewright.aten import order, pointwise, select

NAN, INF = float("nan"), float("inf")


def ours(call: Callable[[], Any]) -> Any:
    """The result of a call that must be ours."""
    with tw.aten.use("all", include=["index"]):
        made = call()
        said = tw.aten.report()
    assert any(one["taken"] for one in said.values()) and not any(one["declined"] for one in said.values()), said
    return made


# ---- outside ---------------------------------------------------------------------------------------------------------

X = torch.arange(1.0, 13.0, device=DEVICE).view(3, 4)
OUTSIDE = torch.tensor([2, 3, -1, 0, -(2**62), 2**62], device=DEVICE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.uint8])
def test_an_index_outside_poisons_its_own_element(dtype):
    x = X.to(dtype)
    poison = NAN if dtype.is_floating_point else torch.iinfo(dtype).min
    row = [bool(0 <= i < 3) for i in OUTSIDE.tolist()]
    expected = torch.stack([x[i] if ok else torch.full((4,), poison).to(dtype) for i, ok in zip(OUTSIDE.tolist(), row)])
    assert not differences(ours(lambda: x.index_select(0, OUTSIDE)), expected)
    assert not differences(ours(lambda: torch.ops.aten.embedding(x, OUTSIDE)), expected)
    wide = OUTSIDE[:, None].expand(6, 4)
    assert not differences(ours(lambda: x.gather(0, wide)), expected)
    wrapped = expected.clone()
    wrapped[2] = x[-1]  # only here does a negative one count from the end
    assert not differences(ours(lambda: x[OUTSIDE]), wrapped)


def test_an_index_outside_writes_nothing():
    values = torch.arange(100.0, 124.0).view(6, 4)
    for call, last in (
        (lambda x: x.index_add_(0, OUTSIDE, values), False),
        (lambda x: x.scatter_add_(0, OUTSIDE[:, None].expand(6, 4), values), False),
        (lambda x: x.scatter_add_(0, OUTSIDE[:, None] + torch.zeros(6, 4, dtype=torch.int64), values), False),
        (lambda x: x.scatter_(0, OUTSIDE[:, None].expand(6, 4), values), False),
        (lambda x: x.index_put_((OUTSIDE,), values, accumulate=True), True),
        (lambda x: x.index_put_((OUTSIDE[[0, 1, 3, 4, 5]],), values[[0, 1, 3, 4, 5]]), False),
    ):
        x, expected = X.clone(), X.clone()
        made = ours(lambda call=call, x=x: call(x))
        for at, i in enumerate(OUTSIDE.tolist()):
            if 0 <= i < 3 or (last and i == -1):
                expected[i] += values[at]
        if (made == values[0]).all(1).any():  # what was put, not added
            expected[2], expected[0] = values[0], values[3]
        assert not differences(made, expected)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("places", [(0,), (1,), (1024,), (1025,), (2, 30, 40)], ids=str)
def test_losses_of_one_program_and_of_several(places, reduction):
    """And the total of weights, which a backward pass divides by."""
    torch.manual_seed(0)
    scores = torch.randn(places[0], 5, *places[1:])
    target, weight = torch.randint(0, 5, places), torch.rand(5)
    name = "nll_loss2d_forward" if len(places) == 3 else "nll_loss_forward"
    overload, kind = getattr(torch.ops.aten, name), ["none", "mean", "sum"].index(reduction)
    aten, exact = (overload(t, target, weight.to(t.dtype), kind, 3) for t in (scores, scores.double()))
    assert not differences(ours(lambda: overload(scores, target, weight, kind, 3)), aten, exact)
    turned = scores.movedim(1, 0).contiguous().movedim(0, 1)
    if len(places) == 1:
        assert not differences(ours(lambda: overload(turned, target, weight, kind, 3)), aten, exact)


def test_a_label_outside_poisons_its_own_loss():
    scores, target = torch.randn(5, 4), torch.tensor([0, 4, 3, -7, 2])
    made = ours(lambda: F.nll_loss(scores, target, reduction="none", ignore_index=2))
    assert made.isnan().tolist() == [False, True, False, True, False] and made[4] == 0
    assert ours(lambda: F.nll_loss(scores, target, ignore_index=2)).isnan()
    grad = ours(lambda: torch.ops.aten.nll_loss_backward(torch.ones(5), scores, target, None, 0, 2, torch.tensor(0.0)))
    expected = torch.zeros(5, 4)
    expected[0, 0] = expected[2, 3] = -1
    assert torch.equal(grad, expected)


ROWS, ONES, SCORES = (torch.ones(3, n, device=DEVICE) for n in (4, 4, 3))
NAMED: dict[str, Callable[[Tensor], Any]] = {
    "index_select": lambda i: ROWS.index_select(0, i),
    "gather": lambda i: ROWS.gather(0, i[:, None].expand(3, 4)),
    "embedding": lambda i: torch.ops.aten.embedding(ROWS, i),
    "index": lambda i: ROWS[i],
    "index_put": lambda i: ROWS.index_put((i,), ONES),
    "index_put that adds": lambda i: ROWS.index_put((i,), ONES, accumulate=True),
    "index_add": lambda i: ROWS.index_add(0, i, ONES),
    "scatter": lambda i: ROWS.scatter(0, i[:, None].expand(3, 4), ONES),
    "scatter that multiplies": lambda i: ROWS.scatter(0, i[:, None].expand(3, 4), ONES, reduce="multiply"),
    "scatter_add": lambda i: ROWS.scatter_add(0, i[:, None].expand(3, 4), ONES),
    "embedding_dense_backward": lambda i: torch.ops.aten.embedding_dense_backward(ONES, i, 3, -1, False),
    "nll_loss": lambda i: F.nll_loss(SCORES, i),
    "nll_loss_backward": lambda i: torch.ops.aten.nll_loss_backward(SCORES[0], SCORES, i, None, 0, -100, SCORES[0, 0]),
    "nll_loss2d": lambda i: F.nll_loss(SCORES.view(1, 3, 3, 1), i.view(1, 3, 1)),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("name", NAMED)
def test_with_debugging_an_index_outside_raises(name, monkeypatch):
    """The first call, and one that is like others before."""
    call, fine, outside = NAMED[name], *(torch.tensor([2, i, 1], device=DEVICE) for i in (0, 3))
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    for before in (0, 4):
        with tw.aten.use("all", include=["index"]):
            for _ in range(before):
                call(fine)
            assert sum(one["taken"] for one in tw.aten.report().values()) == before
            with pytest.raises(ValueError, match=r"must be in \[-?\d, 3\)"):
                call(outside)
    monkeypatch.delenv("TILEWRIGHT_DEBUG")
    ours(lambda: call(outside))


# ---- adding ----------------------------------------------------------------------------------------------------------

RUNS = {
    "all one": lambda n: torch.zeros(n, dtype=torch.int64),
    "half one": lambda n: torch.where(torch.arange(n) % 2 == 0, 3, torch.arange(n) % 7),
    "pairs": lambda n: torch.arange(n) // 2 % 7,
    "descending": lambda n: 6 - torch.arange(n) * 7 // n,
    "one number less than a slice": lambda n: (torch.arange(n) // 63) % 7,
}


@pytest.mark.parametrize("columns", [0, 3, 272], ids=["few", "many", "long"])
@pytest.mark.parametrize("runs", RUNS)
def test_runs_that_slices_cut(runs, columns, monkeypatch):
    """Integers show a row that is dropped or added twice. Many are ordered by digits and summed in other tiles, long ones one after
    another."""
    if columns:
        monkeypatch.setattr(order, "COUNTED", 0)
        monkeypatch.setattr(pointwise, "SMALL", 0)
    i = RUNS[runs](135)
    values = torch.randint(0, 1000, (135, columns or 3))
    x = torch.full((7, values.shape[1]), 5)
    assert not differences(ours(lambda: x.index_add(0, i, values)), x.index_add(0, i, values))


@pytest.mark.parametrize("columns", [3, 64, 272])
def test_rows_of_every_length(columns, monkeypatch):
    monkeypatch.setattr(pointwise, "SMALL", 0)
    torch.manual_seed(0)
    i, values, x = torch.randint(-1, 5, (67,)), torch.randn(67, columns), torch.randn(4, columns)
    i[3] = 2
    exact = x.double().index_add(0, i.clamp(0, 3), values.double() * ((i >= 0) & (i < 4))[:, None])
    made = ours(lambda: x.index_add(0, i, values))
    assert not differences(made, exact.float(), exact, 20.0)
    inside = (i >= 0) & (i < 4)
    assert torch.equal(ours(lambda: x.index_select(0, i))[inside], x[i[inside]])


def test_sums_are_the_same_bits_every_time():
    torch.manual_seed(0)
    i, values, x = torch.randint(0, 2, (70,)), torch.randn(70, 3), torch.randn(2, 3)
    with tw.aten.use("all", include=["index"]):
        made = {x.index_put((i,), values, accumulate=True).cpu().numpy().tobytes() for _ in range(20)}
    assert len(made) == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sums_are_rounded_once(dtype):
    """256 ones added one by one to 256 in bf16 change nothing."""
    made = ours(
        lambda: (
            torch.full((1, 3), 256.0)
            .to(dtype)
            .index_add(0, torch.zeros(256, dtype=torch.int64), torch.ones(256, 3).to(dtype))
        )
    )
    assert torch.equal(made, torch.full((1, 3), 512.0).to(dtype))


@pytest.mark.filterwarnings("ignore:The reduce argument")
@pytest.mark.parametrize("reduce", ["add", "multiply"])
def test_scatters_that_reduce(reduce):
    torch.manual_seed(0)
    x, src = torch.rand(4, 5, 3) + 0.5, torch.rand(4, 70, 3) + 0.75
    i = torch.randint(0, 5, (4, 70, 2))
    call = lambda x, src: x.scatter(1, i, src, reduce=reduce)  # noqa: E731
    aten, made, ran = both(lambda: call(x, src))
    assert ran and not differences(made, aten, call(x.double(), src.double()), float(aten.abs().max()))


# ---- indices of every kind -------------------------------------------------------------------------------------------

Y = torch.arange(120, device=DEVICE).view(4, 5, 6)
A, B = torch.tensor([0, 2, -1], device=DEVICE), torch.tensor([[1], [-2]], device=DEVICE)
TWICE = torch.tensor([0, 3, -1], device=DEVICE)  # the last of four rows is named twice
MASK = Y[:, :, 0] % 4 == 0
PLACES = {
    "first": (A,), "last": (slice(None), slice(None), A), "two beside": (A, B), "two apart": (A, slice(None), B),
    "all": (A, A, B), "a matrix": (B,), "a mask": (MASK,), "a mask of rows": (Y[:, 0, 0] > 20,),
    "a mask behind": (slice(None), Y[0, :, :] > 7),
    "a mask of all": (Y % 3 == 0,), "nothing": (A[:0],), "no row": (Y[:, 0, 0] < 0,),
    "every row": (Y[:, 0, 0] >= 0,), "bytes": (MASK.to(torch.uint8),), "int32": (A.int(), slice(None), B.int()),
    "repeated": (TWICE,), "repeated beside": (TWICE, B), "repeated apart": (TWICE, slice(None), B),
}  # fmt: skip


@pytest.mark.filterwarnings("ignore:indexing with dtype torch.uint8")
@pytest.mark.parametrize("what", PLACES)
def test_indices_of_every_kind(what):
    where = PLACES[what]
    calls = []
    for x in (Y, Y.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        values = torch.arange(x[where].numel()).view(x[where].shape) + 1000
        calls += [
            lambda x=x: x[where], lambda x=x, v=values: x.clone().index_put_(indices_of(where), v, accumulate=True),
            lambda x=x, v=values: x.float().index_put(indices_of(where), torch.ones(()), accumulate=True),
        ]  # fmt: skip
        if "repeated" not in what:  # of equal indices, any may be the one that is put
            assert x[where].unique().numel() == x[where].numel()
            calls += [lambda x=x, v=values: x.clone().index_put_(indices_of(where), v)]
    for at, call in enumerate(calls):
        aten, made, ran = both(call)
        assert ran and not differences(made, aten), at


def indices_of(where: tuple[Any, ...]) -> list[Tensor | None]:
    return [None if isinstance(one, slice) else one for one in where]


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [0, 1, 7, 2048, 2049, 5000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_what_is_selected(n, share):
    torch.manual_seed(0)
    x, mask = torch.randn(n), torch.rand(n) < share
    product = x * mask
    call = lambda: (x.masked_select(mask), mask.nonzero(), product.nonzero())  # noqa: E731
    assert not differences(ours(call), call())


def test_masks_that_broadcast():
    x = torch.randn(4, 1, 6).transpose(0, 2)
    mask = torch.rand(5, 1) < 0.5
    aten, made, ran = both(
        lambda: (x.masked_select(mask), torch.ones(2, 3, 2, 3, 2, 2).permute(5, 0, 3, 1, 4, 2).nonzero())
    )
    assert ran and not differences(made, aten)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float32, torch.bfloat16, torch.uint8, torch.float64])
@pytest.mark.parametrize("n", [0, 1, 5, 300])
def test_what_is_among_others(dtype, n):
    torch.manual_seed(0)
    x, others = torch.randint(0, 60, (33, 5)).to(dtype), torch.randint(0, 90, (n,)).to(dtype)
    if dtype.is_floating_point and n > 1:
        x[0, 0] = others[0] = NAN
        x[1, 0], others[1] = -0.0, 0.0
    whole = others.nan_to_num().to(torch.int32)
    calls = [lambda: torch.isin(x, others), lambda: torch.isin(x.t(), others, invert=True), lambda: torch.isin(x, 7)]
    calls += [
        lambda: torch.isin(7, others),
        lambda: torch.isin(x, whole),
    ]
    for at, call in enumerate(calls):
        assert not differences(ours(call), call()), at


@pytest.mark.parametrize(
    "dtype", [torch.int64, torch.float32, torch.uint8], ids=lambda d: str(d).removeprefix("torch.")
)
def test_buckets_of_others(dtype, monkeypatch):
    """Keys as far apart as their bits allow, in one bucket all, or in one each; looked for below, between and above them."""
    monkeypatch.setattr(pointwise, "SMALL", 0)
    monkeypatch.setattr(select, "BUCKETS", (2, 16))
    ends = {torch.int64: (-(2**63), 2**63 - 1), torch.float32: (-INF, INF), torch.uint8: (0, 255)}[dtype]
    for numbers in (
        [5, 5, 5],
        [*range(3, 40, 2)],
        [*ends, 0, 7, 9, 11, 100],
        [ends[0], ends[0]],
        [9, *range(100, 112)],
    ):
        others = torch.tensor(numbers, dtype=dtype)
        x = torch.tensor([*range(0, 50), *range(90, 120), *ends], dtype=dtype)
        aten, made, ran = both(lambda x=x, others=others: (torch.isin(x, others), torch.isin(x, others, invert=True)))
        assert ran and not differences(made, aten), numbers


def test_repeats():
    for repeats in ([], [0], [3], [0, 2, 0, 0, 5, 1, 0], [1] * 9, [0] * 5):
        repeats = torch.tensor(repeats, dtype=torch.int64)
        x = torch.arange(float(len(repeats)))
        aten, made, ran = both(
            lambda r=repeats, x=x: (torch.repeat_interleave(r), x.repeat_interleave(r), torch.repeat_interleave(r.int()),
                                    torch.repeat_interleave(r, output_size=int(r.sum())))
        )  # fmt: skip
        assert ran and not differences(made, aten)
    aten, made, _ = both(lambda: torch.repeat_interleave(torch.tensor([2, -1])))
    assert made == aten and "negative" in aten


def test_gradients_by_index():
    """Of tables, of what is scattered and gathered, and of losses: autograd's, through our leaves."""
    torch.manual_seed(0)
    ids = torch.randint(0, 6, (3, 5))

    def run() -> list[Tensor]:
        table, x = torch.randn(6, 4, requires_grad=True), torch.randn(5, 4, requires_grad=True)
        torch.manual_seed(1)
        loss = F.embedding(ids, table, padding_idx=2).square().sum() + F.cross_entropy(table, ids[0, :1].expand(6) % 4)
        loss = loss + (x.scatter(0, ids[:, :4] % 5, table[:3]) ** 2).sum() + x[ids[0] % 5].prod(1).sum()
        loss = loss + x.repeat_interleave(torch.tensor([1, 0, 2, 3, 1]), 0).square().sum()
        return [loss.detach(), *torch.autograd.grad(loss, (table, x))]

    torch.manual_seed(2)
    aten = run()
    torch.manual_seed(2)
    made = ours(run)
    for a, b in zip(made, aten):
        torch.testing.assert_close(a, b, rtol=2e-6, atol=1e-5)


def test_float64_gradients_by_differences():
    torch.manual_seed(0)
    i = torch.tensor([0, 2, 2, 1])
    x, y = (torch.randn(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2))
    call = lambda x, y: (x.index_add(0, i, y) * x[i]).gather(1, (i % 2)[:, None]).sum(1)  # noqa: E731
    with tw.aten.use("all", include=["index"]):
        assert torch.autograd.gradcheck(call, (x, y))


def test_writes_that_are_to_have_an_order_are_atens():
    """As long as deterministic algorithms are asked for, and no longer, whatever plans there are."""
    x, i = torch.zeros(4), torch.tensor([1, 3])
    with tw.aten.use("all", include=["_index_put_impl_", "index_put_"]):
        for deterministic in (False, False, False, True, False, False):
            torch.use_deterministic_algorithms(deterministic)
            x.index_put_((i,), torch.ones(2))
        torch.use_deterministic_algorithms(False)
        said = tw.aten.report()["index_put_"]
    assert said["taken"] == 5 and list(said["declined"].values()) == [1]


def test_memory_that_is_read_and_written_is_atens():
    for change in (
        lambda x: x.index_add_(0, torch.tensor([0, 1]), x[1:3]), lambda x: x.scatter_(0, torch.tensor([[0, 1]]), x[2:]),
        lambda x: x.index_put_((torch.tensor([0]),), x[:1]),
        lambda x: x[:1].expand(3, 4).index_add_(0, torch.tensor([0]), x[:1].clone()),
    ):  # fmt: skip
        aten, made, _ = both(lambda change=change: change(torch.arange(16.0).view(4, 4)))
        assert not differences(made, aten, as_double(aten) if isinstance(aten, Tensor) else None)
