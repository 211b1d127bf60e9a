"""Calls that want gradients: one like an earlier one goes from its key to a plan and the tape, and nothing else does."""

from __future__ import annotations

import gc
import itertools
import weakref
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import tilewright as tw
from tests.interpreter.toy import launch, pair, toys
from tilewright.check.oracle import same_bits
from tilewright.core.target import TARGETS, pretend
from tilewright.op import Gradient, Op
from tilewright.runtime import register, run
from tilewright.runtime.key import Key


@pytest.fixture
def declare():
    with toys() as declare:
        yield declare


def scaled_gradient(saved, g):
    dx = torch.empty_like(g, memory_format=torch.contiguous_format)
    launch(g, None, dx, saved.factor)
    return dx, g if "z" in saved.needs else None


@pytest.fixture
def learning(declare, monkeypatch):
    """A toy op with gradients for x and z; gives it, its host code, and the names of what the long way did."""
    op, host = declare(backward=scaled_gradient, gradient=Gradient(of=("x", "z"), saves=()))
    done: list[str] = []
    for name in ("validate", "implementation"):

        def watched(*given, name=name):
            done.append(name)
            return getattr(Op, name)(op, *given)

        monkeypatch.setattr(op, name, watched)
    return op, host, done


def test_a_second_call_with_gradients_is_neither_validated_nor_chosen_for(learning):
    op, host, done = learning
    for seed in range(4):
        x, z = (t.requires_grad_() for t in pair(seed=seed))
        g = pair(seed=seed + 10)[0]
        y = op(x, z)
        same_bits(f"call {seed}", y, 2 * x + z)
        assert y.grad_fn is not None and not y._is_view()
        dx, dz = torch.autograd.grad(y, (x, z), g, retain_graph=True)
        same_bits("dx", dx, 2 * g)
        same_bits("dz", dz, g)
        (alone,) = torch.autograd.grad(y, x, g)
        same_bits("dx alone", alone, 2 * g)
        if seed == 0:
            assert "validate" in done
            done.clear()
    assert host.runs == 1 and not done


def test_which_tensors_want_gradients_is_part_of_the_key(learning):
    op, host, _ = learning
    x, z = pair()
    learn = [t.clone().requires_grad_() for t in (x, z)]
    calls = [(learn[0], z), (x, learn[1]), (*learn,), (x, z)]
    for turn, (a, b) in itertools.product(range(3), calls):
        y = op(a, b)
        same_bits(f"turn {turn}", y, 2 * x + z)
        wanted = [t for t in (a, b) if t.requires_grad]
        assert y.requires_grad == bool(wanted)
        if wanted:
            for t, made in zip(wanted, torch.autograd.grad(y, wanted, torch.ones_like(y))):
                same_bits("gradient", made, torch.full_like(t, 2.0 if t is a else 1.0))
        with torch.no_grad():
            assert not op(a, b).requires_grad
    assert host.runs == len(calls)  # without a gradient they are all of one kind


def test_what_an_earlier_call_with_gradients_does_not_hide(declare):
    op, _ = declare(backward=scaled_gradient, gradient=Gradient(of=("x",), saves=()))
    x, z = pair()
    x.requires_grad_()
    for _ in range(2):
        op(x, z)
        with pytest.raises(ValueError, match="no gradient for z"):
            op(x, z.clone().requires_grad_())
        with pytest.raises(ValueError, match="out cannot be given"):
            op(x, z, out=torch.empty(5, 7))
        with pytest.raises(ValueError, match="z is float32"):
            op(x, z[:4])
        with pytest.raises(TypeError, match="factor"):
            op(x, z, True)
        with pytest.raises(ValueError, match="negated"):
            op(torch._neg_view(x), z)
        with tw.force("another"), pytest.raises(RuntimeError, match="no implementation"):
            op(x, z)
        with tw.force("reference"):
            assert "Apply" not in op(x, z).grad_fn.name()


def test_another_target_is_another_choice(declare):
    """An implementation that a chip does not have is not taken there because it was elsewhere."""
    op, _ = declare(backward=scaled_gradient, gradient=Gradient(of=("x",), saves=()))
    (known,) = op.implementations
    op.implementations = (replace(known, when=lambda target, _: target.arch == "sm_90"),)
    x = pair()[0].requires_grad_()
    same_bits("here", op(x), 2 * x)
    with pretend(TARGETS["sm_80"]), pytest.raises(RuntimeError, match="no implementation"):
        op(x)
    same_bits("here again", op(x), 2 * x)


class Subclass(Tensor):
    pass


class Watching(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


def test_subclasses_modes_and_transforms_take_the_registered_op(learning, monkeypatch):
    """Also when a plain call like theirs has a plan."""
    op, _, _ = learning
    x, _ = pair()
    x.requires_grad_()
    op(x)
    taken = []
    original = register.call
    monkeypatch.setattr(register, "call", lambda *given: (taken.append(1), original(*given))[1])
    op(x)
    assert not taken
    with Watching():
        (dx,) = torch.autograd.grad(op(x).sum(), x)
    same_bits("under a mode", dx, torch.full_like(x, 2.0))
    with pytest.raises(RuntimeError, match="functorch"):  # torch has no transforms of registered ops
        torch.func.grad(lambda x: op(x).sum())(x)
    special = x.detach().as_subclass(Subclass).requires_grad_()
    assert op(special).shape == x.shape
    with FakeTensorMode():
        assert op(torch.empty(5, 7, requires_grad=True)).shape == (5, 7)
    assert len(taken) == 4
    compiled = torch.compile(op.function, backend="aot_eager", fullgraph=True)
    same_bits("compiled", torch.autograd.grad(compiled(x).sum(), x)[0], torch.full_like(x, 2.0))


def test_hooks_of_saved_tensors_see_every_call(declare):
    """What they give back is what the backward reads, wherever it lies."""

    def backward(saved, g):
        dx = torch.empty_like(g, memory_format=torch.contiguous_format)
        launch(g, saved.z, dx, 2.0)
        return (dx,)

    op, _ = declare(backward=backward, gradient=Gradient(of=("x",), saves=("z",)))
    for shift in range(3):
        x, z = pair(seed=shift)
        x.requires_grad_()

        def moved(t: Tensor, shift=shift) -> Tensor:
            return torch.cat([torch.zeros(shift), 2 * t.flatten()])[shift:].view(t.shape)

        with torch.autograd.graph.saved_tensors_hooks(lambda t: t, moved):
            y = op(x, z)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        same_bits(f"{shift} elements on", dx, 2 + 2 * z)


def test_static_scales_are_those_of_the_call():
    x = pair(4, 32)[0].to(torch.bfloat16).requires_grad_()
    with tw.force("triton"):
        for scale in (0.5, 2.0, 0.5):
            form = tw.fp8("tensor", scale=torch.tensor([scale]))
            q = tw.rms_norm(x, out_format=form)
            with torch.no_grad():
                plain = tw.rms_norm(x, out_format=form)
            same_bits(f"scale {scale}", q.data.float(), plain.data.float())
            assert q.requires_grad and q.scale.item() == plain.scale.item()


def test_a_leaf_is_never_written_over_though_a_like_result_may_be():
    leaf, labels = pair(4, 32)[0].requires_grad_(), torch.arange(4)
    with tw.force("triton"):
        for _ in range(2):
            tw.cross_entropy(leaf * 1, labels, inplace_backward=True)
            with pytest.raises(ValueError, match="leaf"):
                tw.cross_entropy(leaf, labels, inplace_backward=True)


def test_labels_are_read_in_every_call_with_gradients(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    logits = pair(4, 48)[0].requires_grad_()
    with tw.force("triton"):
        for _ in range(2):
            tw.cross_entropy(logits, torch.arange(4))
            with pytest.raises(ValueError, match="labels"):
                tw.cross_entropy(logits, torch.arange(4) + 46)


def test_plans_of_calls_with_gradients_are_bounded_and_hold_no_tensor(learning, monkeypatch):
    monkeypatch.setattr(run, "PLANS", 8)
    op, _, _ = learning
    for rows in range(1, 20):
        x = pair(rows)[0].requires_grad_()
        torch.autograd.grad(op(x).sum(), x)
        assert len(op.plans) <= 8 and len(op.backward_plans) <= 8
    y = op(x)
    watched = [weakref.ref(t) for t in (x, y)]
    del x, y
    gc.collect()
    assert [ref() for ref in watched] == [None] * 2


def test_what_has_no_memory_is_part_of_no_key():
    """A view of a meta tensor says that it has an address, and is on the device -1, as one of a CPU is."""
    room = torch.empty(9, 24, device="meta")
    for t in (room, room[:, 2:], room.to(torch.bfloat16)[1:]):
        assert not Key().add([t])
    assert Key().add([torch.empty(9, 24)[:, 2:], torch.empty(0), None, 1.0])


def test_one_tensor_for_two_arguments_spoils_no_later_backward(declare):
    """Of two arguments that are one tensor identity tells no names: what a backward keeps of a kind of call is told by another."""
    op, _ = declare(backward=scaled_gradient, gradient=Gradient(of=("x", "z"), saves=()))

    def gradients(x: Tensor, z: Tensor) -> None:
        op(x, z).backward(torch.ones_like(x))

    gradients(*(t.requires_grad_() for t in pair()))
    both = pair(seed=1)[0].requires_grad_()
    gradients(both, both)
    same_bits("both", both.grad, torch.full_like(both, 3.0))
    for seed in (2, 3):
        x, z = (t.requires_grad_() for t in pair(seed=seed))
        gradients(x, z)
        same_bits("dx", x.grad, torch.full_like(x, 2.0))
        same_bits("dz", z.grad, torch.ones_like(z))


@pytest.mark.parametrize("names", [("x", "up"), ("up", "x")])
def test_checkpointing_pairs_what_a_recording_and_a_replay_save(names):
    """The first call of a kind is recorded, its recomputation replayed: both save arguments in one order."""
    given = [t.requires_grad_() for t in pair(4, 16, seed=5)]
    with tw.force("triton"):
        y = checkpoint(lambda *some: tw.glu(**dict(zip(names, some))) * 1.0, *given, use_reentrant=False)
        found = torch.autograd.grad(y.square().sum(), given)
    with tw.force("reference"):
        wanted = torch.autograd.grad(tw.glu(**dict(zip(names, given))).square().sum(), given)
    for name, one, other in zip(names, found, wanted):
        torch.testing.assert_close(one, other, msg=name)


def test_a_result_that_host_code_saw_as_a_view_is_no_view_of_anything(declare):
    """It may be changed in place, with and without gradients, after the first call as after later ones."""

    def rows_of(x, z, factor):
        y = torch.empty_like(x)
        launch(x, z, y, factor)
        return y.view(x.shape)

    op, _ = declare(rows_of, scaled_gradient, gradient=Gradient(of=("x", "z"), saves=()))
    for turn in range(3):
        x, z = pair(seed=turn)
        learned = z.clone().requires_grad_()
        y = op(x, z)
        y += learned
        assert y.requires_grad
        op(x.requires_grad_(), z).mul_(2).sum().backward()
        same_bits("dx", x.grad, torch.full_like(x, 4.0))
