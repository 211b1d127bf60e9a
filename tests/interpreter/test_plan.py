"""Recording one run of an op's host code and replaying it: when a plan is made, when it must not be, and that it gives what the
host code would."""

from __future__ import annotations

import gc
import itertools
import threading
import weakref

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.interpreter.toy import inputs, launch, pair, plain, toys
from tilewright.check.memory import guarded_allocations
from tilewright.check.oracle import same_bits
from tilewright.op import OPS, Cost, Gradient, Op, Triton
from tilewright.runtime import replay, run
from tilewright.runtime.plan import Made, Recorder

KEPT = torch.full((64,), 3.0)  # memory that belongs to no call


@pytest.fixture
def declare():
    with toys() as declare:
        yield declare


def test_second_call_runs_no_host_code(declare):
    op, host = declare()
    for seed in range(4):
        x, z = pair(seed=seed)
        same_bits(f"call {seed}", op(x, z), 2 * x + z)
    assert host.runs == 1


def test_what_a_plan_depends_on(declare):
    op, host = declare()
    x, z = pair(8, 8)
    calls = [
        lambda: (op(x, z), 2 * x + z),
        lambda: (op(x), 2 * x),
        lambda: (op(x, z, 3.0), 3 * x + z),
        lambda: (op(x, z, 4.0), 4 * x + z),
        lambda: (op(x, z, factor=3.0), 3 * x + z),
        lambda: (op(x, factor=3.0, z=z), 3 * x + z),
        lambda: (op(z=z, x=x, factor=3.0), 3 * x + z),
        lambda: (op(x.t(), z), 2 * x.t() + z),
        lambda: (op(x, z.t()), 2 * x + z.t()),
        lambda: (op(x[:, ::2], z[:, :4]), 2 * x[:, ::2] + z[:, :4]),
        lambda: (op(x[:1].expand(8, 8), z), 2 * x[:1] + z),
        lambda: (op(x.flatten()[1:57].view(7, 8), z[:7]), 2 * x.flatten()[1:57].view(7, 8) + z[:7]),
        lambda: (op(x[:7], z[:7]), 2 * x[:7] + z[:7]),
    ]
    for turn, (i, call) in itertools.product(range(3), enumerate(calls)):
        made, expected = call()
        same_bits(f"call {i}, turn {turn}", made, expected)
    assert host.runs == len(calls)


def test_an_integer_is_not_a_float_nor_a_truth_value(declare):
    op, _ = declare()
    x, z = pair()
    op(x, z, 1.0)
    same_bits("integer", op(x, z, 1), x + z)
    with pytest.raises(TypeError, match="factor"):
        op(x, z, True)


def test_results_that_are_views_or_several(declare):
    def forward(x, z, factor):
        whole = torch.empty(2, x.shape[0] + 1, x.shape[1])
        launch(x, z, whole[0, 1:], factor)
        launch(x, None, whole[1, :-1], factor)
        return whole[0, 1:], whole[1, :-1].t()

    op, host = declare(forward, results={"a": "float32[m n]", "b": "float32[m n]"})
    for seed in range(3):
        x, z = pair(seed=seed)
        a, b = op(x, z)
        same_bits("a", a, 2 * x + z)
        same_bits("b", b, 2 * x.t())
        assert a.stride() == (7, 1) and b.stride() == (1, 7)
    assert host.runs == 1


def test_zeroed_memory_is_zeroed_again(declare):
    def forward(x, z, factor):
        y = torch.zeros_like(x)
        launch(x, z, y, factor)
        return y

    op, host = declare(forward)
    for seed in range(3):
        x, z = pair(seed=seed)
        same_bits("onto zeros", op(x, z, -1.0), z - x)
    assert host.runs == 1


def test_zeroed_memory_keeps_its_strides(declare):
    def forward(x, z, factor):
        y = torch.zeros_like(x)
        launch(x, z, y, factor)
        return y

    op, host = declare(forward)
    for seed in range(3):
        x, z = (t.t() for t in pair(5, 7, seed=seed))
        y = op(x, z)
        same_bits(f"call {seed}", y, 2 * x + z)
        assert y.stride() == x.stride()
    assert host.runs == 1


def test_zeros_of_two_signs_are_two_numbers(declare):
    op, host = declare()
    x = torch.ones(2, 4)
    for factor in (0.0, -0.0, 0.0, -0.0):
        assert torch.signbit(op(x, None, factor)).all() == (str(factor) == "-0.0")
    assert host.runs == 2


def test_memory_that_ends_within_a_run_is_free_for_what_comes_later(declare, monkeypatch):
    """Four matrices, one after another made of the last: no more than two are there at once, in a replay too."""
    alive, most = weakref.WeakSet(), [0]

    def forward(x, z, factor):
        for _ in range(4):
            y = torch.empty_like(x)
            launch(x, z, y, factor)
            x = y
        return x

    def allocator(*given):
        make = original(*given)

        def made() -> Tensor:
            tensor = make()
            alive.add(tensor.untyped_storage())
            most[0] = max(most[0], len(alive))
            return tensor

        return made

    original = replay._allocator
    monkeypatch.setattr(replay, "_allocator", allocator)
    op, host = declare(forward)
    for seed in range(3):
        x, _ = pair(seed=seed)
        same_bits(f"call {seed}", op(x), 16 * x)
    assert host.runs == 1 and most[0] == 2


def foreign_copy(x, z, factor):
    return plain(x.t().contiguous().t(), z, factor)


def foreign_rows(x, z, factor):
    return plain(x.t().reshape(-1).view(x.shape[::-1]).t(), z, factor)


def foreign_cast(x, z, factor):
    return plain(x.to(torch.float64).to(torch.float32), z, factor)


def foreign_fill(x, z, factor):
    y = torch.empty_like(x)
    y.fill_(1.0)
    launch(x, z, y, factor)
    return y


def foreign_arithmetic(x, z, factor):
    return plain(x + 1, z, factor)


def foreign_result(x, z, factor):
    return plain(x, z, factor) + 0


def foreign_memory(x, z, factor):
    return plain(x, KEPT[: x.numel()].view(x.shape), factor)


def foreign_read(x, z, factor):
    return plain(x, z, abs(float(x[0, 0].item())))


@pytest.mark.parametrize(
    ("forward", "expected"),
    [
        (foreign_copy, lambda x, z: 2 * x + z),
        (foreign_rows, lambda x, z: 2 * x + z),
        (foreign_cast, lambda x, z: 2 * x + z),
        (foreign_fill, lambda x, z: 2 * x + z),
        (foreign_arithmetic, lambda x, z: 2 * (x + 1) + z),
        (foreign_result, lambda x, z: 2 * x + z),
        (foreign_memory, lambda x, z: 2 * x + 3),
        (foreign_read, lambda x, z: x[0, 0].abs() * x + z),
    ],
)
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_anything_but_allocating_and_launching_is_run_every_time(declare, mode, forward, expected):
    """In inference mode torch says of calls that may copy that they give views."""
    op, host = declare(forward)
    for seed in range(3):
        x, z = pair(seed=seed)
        with mode():
            torch.testing.assert_close(op(x, z), expected(x, z))
    assert host.runs == 3
    assert not op.plans


def test_recorder_says_what_was_foreign():
    x, _ = pair()
    with Recorder([x]) as recorder:
        y = x + 1
    assert recorder.plan([y]) is None
    assert "aten.add" in recorder.foreign
    with Recorder([x, x]) as recorder:
        pass
    assert recorder.plan([x]) is None
    assert "twice" in recorder.foreign


def test_memory_that_host_code_keeps_is_held_by_the_plan(declare):
    """What has to happen before it is read happens in every replay; what is asked for too late makes no plan."""
    used = []

    def forward(x, z, factor):
        if factor == 7.0:
            torch.empty_like(x)
        Recorder.active().adopt(KEPT, lambda: used.append(1))
        return plain(x, KEPT[: x.numel()].view(x.shape), factor)

    op, host = declare(forward)
    for seed in range(4):
        x, _ = pair(seed=seed)
        used.append(0)
        same_bits(f"call {seed}", op(x), 2 * x + 3)
    assert host.runs == 1 and used == [0] + [0, 1] * 3
    for turn in range(2):
        same_bits(f"late, turn {turn}", op(x, factor=7.0), 7 * x + 3)
        assert host.runs == 2 + turn


def test_one_tensor_for_two_arguments_makes_no_plan(declare):
    op, _ = declare()
    x, z = pair()
    same_bits("one", op(x, x), 3 * x)
    same_bits("two", op(x, z), 2 * x + z)
    same_bits("one again", op(z, z), 3 * z)


def test_plans_are_bounded_and_hold_no_tensor(declare, monkeypatch):
    monkeypatch.setattr(run, "PLANS", 8)
    op, _ = declare()
    for rows in range(1, 30):
        x, z = pair(rows)
        same_bits(f"{rows} rows", op(x, z), 2 * x + z)
        assert len(op.plans) <= 8
    x, z = pair()
    y = op(x, z)
    watched = [weakref.ref(t) for t in (x, z, y)]
    del x, z, y
    gc.collect()
    assert [ref() for ref in watched] == [None] * 3


def test_out_is_written_checked_and_marked_every_time(declare):
    op, host = declare()
    x, z = pair()
    out = torch.empty_like(x)
    for turn in range(3):
        version = out._version
        assert op(x, z, out=out) is out
        same_bits(f"turn {turn}", out, 2 * x + z)
        assert host.runs == 2  # one that finds where the result is allocated, and one that launches
        assert out._version > version
    with pytest.raises(ValueError, match="out shares memory with x"):
        op(x, z, out=x)
    other = torch.empty_like(x)
    assert op(x, z, out=other) is other
    assert host.runs == 2


def test_an_error_leaves_no_recorder_behind(declare):
    def forward(x, z, factor):
        if factor == 7.0:
            raise RuntimeError("on purpose")
        return plain(x, z, factor)

    op, _ = declare(forward)
    x, z = pair()
    with pytest.raises(RuntimeError, match="on purpose"):
        op(x, z, 7.0)
    assert Recorder.active() is None
    same_bits("afterwards", op(x, z), 2 * x + z)


def test_an_op_may_call_another(declare):
    inner, _ = declare()

    def forward(x, z, factor):
        return plain(inner(x, z, factor), z, factor)

    outer, _ = declare(forward)
    for seed in range(3):
        x, z = pair(seed=seed)
        same_bits("nested", outer(x, z), 2 * (2 * x + z) + z)


def test_memory_that_cannot_take_the_place_of_an_allocation_is_copied_to(declare):
    """Kernels may take it for granted that what they allocated is aligned. Host code runs twice for the first call alone."""
    op, host = declare()
    x, z = pair()
    out = torch.full((x.numel() + 1,), 7.0)[1:].view(x.shape)
    for turn in range(3):
        assert op(x, z, out=out) is out
        same_bits(f"turn {turn}", out, 2 * x + z)
        assert host.runs == 2 + turn
        out.zero_()


def test_memory_for_a_result_that_is_filled_before_it_is_written(declare):
    def forward(x, z, factor):
        y = torch.full(x.shape, 3.0)  # which the kernel adds to, the factor being negative
        launch(x, z, y, factor)
        return y

    op, host = declare(forward)
    x, z = pair()
    expected = op(x, z, -1.0)
    for turn in range(3):
        out = torch.full_like(x, float("nan"))
        assert op(x, z, -1.0, out=out) is out
        same_bits(f"turn {turn}", out, expected)
    assert host.runs == 3


def test_host_code_that_writes_an_argument_writes_it_once(monkeypatch):
    """Also where a run that launches nothing comes first: for memory that was given for a result, and in a warmup."""

    def reference(x: Tensor, z: Tensor, factor: float = 2.0) -> tuple[Tensor, Tensor]:
        return factor * x, z + 1

    def forward(x, z, factor):
        y = torch.empty_like(x)
        launch(x, None, y, factor)
        z.add_(1)
        return y

    where = dict.fromkeys(("x", "z"), "float32[m n]")
    op = Op(
        "toy_writes", reference, inputs, Triton(forward), where=where, results={"out": "float32[m n]"}, writes=("z",)
    )
    try:
        with tw.force("triton"):
            for turn, given in enumerate(({}, {"out": torch.empty(8, 8)}, {"out": torch.empty(8, 8)}, {})):
                x, z = pair(8, 8)
                wanted = z + 1
                same_bits("result", op(x, z, **given), 2 * x)
                same_bits(f"argument, call {turn}", z, wanted)
            before = z.clone()
            tw.warmup(op, x, z)
            same_bits("argument of a warmup", z, before)
    finally:
        del OPS["toy_writes"]


def test_warmup_launches_nothing(declare):
    op, host = declare()
    x, z = pair()
    out = torch.full_like(x, 5.0)
    tw.warmup(op, x, z, out=out, backward=False)
    assert host.runs == 2
    assert bool((out == 5.0).all())
    same_bits("afterwards", op(x, z, out=out), 2 * x + z)


def test_backward_plans(declare):
    ran = []

    def backward(saved, g):
        ran.append(1)
        dx = torch.empty_like(g, memory_format=torch.contiguous_format)
        launch(g, None, dx, saved.factor)
        return (dx,)

    op, _ = declare(backward=backward, gradient=Gradient(of=("x",), saves=()))
    for seed in range(3):
        x, g = pair(seed=seed)
        x = x.requires_grad_()
        (dx,) = torch.autograd.grad(op(x), x, g)
        same_bits("dx", dx, 2 * g)
        (dx,) = torch.autograd.grad(op(x), x, g[:1].expand(5, 7))
        same_bits("dx of an expanded gradient", dx, 2 * g[:1].expand(5, 7).contiguous())
    assert len(ran) == 2


def test_a_backward_may_call_another_s(declare):
    """Its launches are steps of the one plan: else a replay would leave them out."""

    def backward(saved, g):
        dx = torch.empty_like(g, memory_format=torch.contiguous_format)
        launch(g, None, dx, saved.factor)
        return (dx,)

    inner, _ = declare(backward=backward, gradient=Gradient(of=("x",), saves=()))
    ran = []

    def forward(x, z, factor, *, needs):
        return plain(x, z, factor)

    def outer_backward(saved, g):
        ran.append(1)
        values = inner.signature.bind((saved.x,), {"factor": saved.factor})
        (dx,) = inner.run_backward(values, {}, [g], frozenset({"x"}))
        return inner.run_backward(values, {}, [dx], frozenset({"x"}))

    outer, _ = declare(
        forward,
        outer_backward,
        gradient=Gradient(of=("x",), saves=("x",)),
        composite=True,
        planned=True,
        cost=Cost(flops=lambda **_: 0),
    )
    for seed in range(3):
        x, g = pair(seed=seed)
        (dx,) = torch.autograd.grad(outer(x.requires_grad_()), x, g)
        same_bits("dx", dx, 4 * g)
    assert len(ran) == 1


def test_backward_of_backward_is_refused(declare):
    op, _ = declare(backward=lambda saved, g: (torch.empty_like(g),), gradient=Gradient(of=("x",), saves=()))
    x = pair()[0].requires_grad_()
    (dx,) = torch.autograd.grad(op(x), x, torch.ones_like(x), create_graph=True)
    with pytest.raises(RuntimeError):
        torch.autograd.grad(dx.sum(), x)


def test_an_op_without_a_backward_says_so(declare):
    op, _ = declare(gradient=Gradient(of=("x",)))
    with pytest.raises(RuntimeError, match="has no backward"):
        op(pair()[0].requires_grad_())


def test_no_implementation_says_why(declare):
    op, _ = declare()
    with (
        tw.force("another"),
        pytest.raises(RuntimeError, match=r"no implementation.*tried \['triton'\].*float32\[5, 7\]"),
    ):
        op(pair()[0])


def test_threads(declare):
    op, _ = declare()
    wrong: list[str] = []

    def work(worker: int) -> None:
        with tw.force("triton"):
            for turn in range(12):
                x, z = pair(1 + (worker + turn) % 5, 7, seed=100 * worker + turn)
                if not torch.equal(op(x, z, float(worker)), worker * x + z):
                    wrong.append(f"worker {worker}, turn {turn}")

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_guarded_memory_is_no_part_of_a_plan():
    """A plan of such a run would give out what has a shape alone."""
    x, op = torch.randn(3, 5), tw.catalogue()["rms_norm"]
    op.plans.clear()
    with tw.force("triton"):
        with guarded_allocations(0xFF):
            tw.rms_norm(x)
        assert not op.plans
        tw.rms_norm(x)
        assert len(op.plans) == 1


# ---- calls of torch's own that allocate what they give ---------------------------------------------------------------


def doubled(x: Tensor) -> tuple[Tensor, Tensor]:
    """Two tensors that this allocates: 2x, as a view of what is turned, and the sums of its rows."""
    DOUBLED.append(x.data_ptr())
    return (2.0 * x).t().contiguous().t(), x.sum(1)


DOUBLED: list[int] = []


def by_both(x: Tensor, z: Tensor | None, factor: float) -> Tensor:
    """Launches before and after such a call, of memory that is asked for before and after it."""
    first = torch.empty(x.shape)
    launch(x, z, first, factor)
    twice, _ = Made.of(doubled, (first,), lambda: (torch.empty_strided(x.shape, (1, x.shape[0])), torch.empty(len(x))))
    second = torch.empty(x.shape)
    launch(twice, first, second, 1.0)
    return second


def test_what_a_step_allocates_is_a_slot_of_the_plan(declare):
    op, host = declare(by_both)
    DOUBLED.clear()
    for seed in range(4):
        x, z = pair(8, 8, seed=seed)
        first = 2 * x + z
        same_bits(f"call {seed}", op(x, z), 2 * first + first)
    assert host.runs == 1 and len(DOUBLED) == 4


def test_what_a_step_allocates_may_be_the_result(declare):
    """It is the caller's own, and no view; of memory that is given, a copy is made, and there is no plan."""
    op, host = declare(
        lambda x, z, factor: Made.of(doubled, (x,), lambda: (x.new_empty(x.shape), x.new_empty(len(x))))[0]
    )
    for seed in range(3):
        x, _ = pair(8, 8, seed=seed)
        made = op(x)
        same_bits(f"call {seed}", made, 2 * x)
        assert not made._is_view() and made.data_ptr() != x.data_ptr() and made.stride() == (1, 8)
        made.add_(1.0)
    assert host.runs == 1
    for seed in range(3):
        x, _ = pair(8, 8, seed=seed)
        out = torch.zeros(8, 8)
        assert op(x, out=out) is out
        same_bits(f"out {seed}", out, 2 * x)


def test_a_run_that_launches_nothing_makes_no_such_call(declare):
    op, host = declare(by_both)
    DOUBLED.clear()
    x, z = pair(8, 8)
    with run.compiling_only():
        op.run(op.signature.bind((x, z), {}))
    assert not DOUBLED and host.runs == 1
