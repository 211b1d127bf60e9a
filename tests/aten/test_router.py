"""What is registered, for how long, and who is asked: the dispatcher as it was before, nesting, names, threads."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import threading
import warnings
import weakref
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.aten import leaves, router, table
from tilewright.aten.table import overload_of


@pytest.fixture(autouse=True)
def nothing_is_left():
    before = {name: torch._C._dispatch_dump(f"aten::{name}") for name in table.FORMS}
    yield
    assert not router._active and not router._wanted
    assert {name: torch._C._dispatch_dump(f"aten::{name}") for name in table.FORMS} == before


def active() -> set[str]:
    return set(tw.aten.report())


# ---- how long --------------------------------------------------------------------------------------------------------


def test_enable_and_disable():
    tw.aten.enable("all", include="neg")
    tw.aten.enable("all", include=["exp"])
    assert active() == {"neg", "exp"}
    torch.neg(torch.ones(2))
    assert tw.aten.report()["neg"]["taken"] == 1
    tw.aten.disable()
    assert not active()
    tw.aten.disable()


def test_blocks_nest_and_one_may_be_entered_again():
    block = tw.aten.use("all", include="neg")
    with block, tw.aten.use("all", include="exp"), block:
        torch.neg(torch.ones(2))
        assert active() == {"neg", "exp"} and tw.aten.report()["neg"]["taken"] == 1
    with block:
        assert active() == {"neg"} and tw.aten.report()["neg"]["taken"] == 0
    assert not active()


def test_disable_leaves_blocks_alone():
    with tw.aten.use("all", include="neg"):
        tw.aten.enable("all", include="exp")
        tw.aten.disable()
        assert active() == {"neg"}


def test_a_block_that_fails_ends():
    with pytest.raises(KeyError), tw.aten.use("all", include="neg"):
        raise KeyError
    assert not active()


def test_an_exception_in_a_backward_ends_all_blocks():
    """Which is raised in autograd's own thread, or in a hook of the caller's."""
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda grad: 1 // 0)
    with (
        pytest.raises(ZeroDivisionError),
        tw.aten.use("all", include="neg"),
        tw.aten.use("all", include=["exp", "mul.Tensor"]),
    ):
        torch.neg(y).sum().backward()
    assert not active() and x.grad is None


def test_what_cannot_be_registered_leaves_nothing_behind(monkeypatch):
    """One of several overloads fails: those before it are taken back, and what was in force stays."""
    own = router.Override.register

    def register(self: router.Override) -> None:
        if self.name == "neg":
            raise RuntimeError("no place")
        own(self)

    monkeypatch.setattr(router.Override, "register", register)
    with tw.aten.use("all", include="cos"):
        with pytest.raises(RuntimeError, match="no place"), tw.aten.use("all", include=["exp", "neg"]):
            raise AssertionError("the block is entered")
        with pytest.raises(RuntimeError, match="no place"):
            tw.aten.enable("all", include=["exp", "neg"])
        assert active() == {"cos"}
    assert not active()


# ---- which -----------------------------------------------------------------------------------------------------------


def test_names_of_overloads_operators_and_engines():
    assert router.resolve("add.Tensor") == {"add.Tensor"}
    assert router.resolve(["eq"]) == {"eq.Tensor", "eq.Scalar"}
    assert router.resolve(["scan"]) == {"cumsum", "cumsum.out", "cummax", "cummin"}
    with tw.aten.use("all", exclude=["pointwise", "reduction", "cumsum.out"]):
        assert active() == {n for n in table.FORMS if table.ENGINE[n] not in ("pointwise", "reduction")} - {
            "cumsum.out"
        }


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("signoid", "did you mean sigmoid"), ("add.Tenosr", "torch has no such overload: did you mean add.Tensor?"),
        ("nonsense_name", "torch does not define it$"), ("exp.Tensor", "torch has no such overload: did you mean exp?"),
        ("add.out", "there is a replacement for: did you mean add.Tensor"),
        ("erfinv", "there is a replacement for: did you mean erf"),
        ("square", "no replacement of its own: torch makes it of others, which `explain` names"),
        ("div.Scalar", "no replacement of its own: name 'div.Tensor', which its calls reach"),
        ("hstack", "no replacement of its own: name 'cat', which"), ("rand", "no replacement of its own: name 'uniform_', which"),
        ("divide", "no replacement of its own: name 'div.Tensor' or 'div.Tensor_mode', which"),
    ],
)  # fmt: skip
def test_a_name_that_is_misspelt(name, said):
    for arguments in ({"include": [name]}, {"exclude": name}):
        with pytest.raises(ValueError, match=said) as error:
            tw.aten.enable("all", **arguments)
        assert name in str(error.value)


@pytest.mark.parametrize("given", [torch.add, torch.ops.aten.add, [torch.add], [None], ["neg", 5], 5])
@pytest.mark.parametrize("argument", ["include", "exclude"])
def test_what_is_no_name(argument, given):
    with pytest.raises(ValueError, match=f"aten: {argument} takes names such as 'add.Tensor'"):
        tw.aten.use("all", **{argument: given})


def test_what_is_said_to_be_reached_is():
    """`check/provided/aten.py` calls each name of the table, and what it reaches has a replacement."""
    assert set(leaves.LEAVES.values()) <= table.FORMS.keys()
    assert not leaves.LEAVES.keys() & table.FORMS.keys()
    for name in leaves.LEAVES:
        overload_of(name)


def test_a_mode_that_is_not_there():
    with pytest.raises(ValueError, match="mode must be 'all' or 'auto', got 'fast'"):
        tw.aten.use("fast")
    with pytest.raises(ValueError, match="observed is for mode 'auto'"):
        tw.aten.enable("all", observed="calls.json")


def test_every_name_is_one_of_torchs_and_none_a_composite_that_has_a_gradient():
    """A kernel for a composite takes its gradient away: only those that give bools may have one, and one that is no composite on a
    GPU, where torch has a gradient for its kernel."""
    for name in table.FORMS:
        overload_of(name)
        has = [
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", k)
            for k in ("CompositeImplicitAutograd", "CPU")
        ]
        assert has != [True, False] or name in ("isclose", "isfinite", "_fused_rms_norm"), name


def test_without_a_gpu_there_is_nothing_to_replace():
    code = "import tilewright as tw\ntry:\n    tw.aten.enable('all')\nexcept RuntimeError as error:\n    print(error)"
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    env.pop("TRITON_INTERPRET")
    made = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert made.stdout == "aten: there is no GPU whose operators could be replaced\n"


def test_nobody_is_warned():
    """Neither of a kernel that is replaced, which is what was asked for, nor of anything else."""
    code = (
        "import torch, tilewright as tw\ntw.aten.enable('all')\nx = torch.ones(3, 4, requires_grad=True)\n"
        "(torch.softmax(-x, 1) * x.cumsum(0)).sort(1)[0].sum().backward()\n"
        "print(sum(one['taken'] for one in tw.aten.report().values()) > 5)\ntw.aten.disable()"
    )
    made = subprocess.run([sys.executable, "-W", "always", "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout == "True\n" and "Overriding" not in made.stderr and "autograd" not in made.stderr


# ---- whose call ------------------------------------------------------------------------------------------------------


def test_what_is_declined_is_atens_and_counted():
    x = torch.ones(2, dtype=torch.complex64)
    with tw.aten.use("all", include="neg"):
        assert torch.equal(torch.neg(x), -1 * x)
        [(reason, count)] = tw.aten.report()["neg"]["declined"].items()
    assert "complex64" in reason and count == 1


def test_a_captured_kernel_that_went_stale_is_captured_again():
    """Another library's kernel lay below ours, and is taken away while ours stays."""
    other = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        other.impl("neg", lambda x: x.clone(), "CPU")
    x = torch.ones(2, dtype=torch.complex64)  # which ours declines
    with tw.aten.use("all", include="neg"):
        assert torch.equal(torch.neg(x), x)
        other._destroy()
        for _ in range(2):
            assert torch.equal(torch.neg(x), -1 * x)
        assert torch.equal(torch.neg(torch.ones(2)), torch.tensor([-1.0, -1.0]))
        assert tw.aten.report()["neg"]["taken"] == 1


def test_host_code_and_the_interpreter_use_torch_as_it_is(monkeypatch):
    """A replacement that calls an operator which is replaced reaches aten, in its own thread alone."""
    seen: list[int] = []

    def form(self):
        seen.append(threading.get_ident())
        return torch.neg(self)

    monkeypatch.setitem(table.FORMS, "neg", form)
    with tw.aten.use("all", include="neg"):
        assert torch.equal(torch.neg(torch.ones(2)), torch.tensor([-1.0, -1.0]))
        assert len(seen) == 1
        with tw.force("triton"):
            tw.rms_norm(torch.ones(4, 16), torch.ones(16))
        assert len(seen) == 1


def test_a_failure_leaves_the_thread_as_it_was(monkeypatch):
    def broken(self):
        raise ZeroDivisionError

    monkeypatch.setitem(table.FORMS, "neg", broken)
    with tw.aten.use("all", include="neg"):
        for _ in range(2):
            with pytest.raises(ZeroDivisionError):
                torch.neg(torch.ones(2))


@pytest.mark.parametrize("fill", [Tensor.uniform_, Tensor.neg_], ids=["of no plan", "planned"])
def test_a_call_keeps_no_tensor(fill):
    """Memory is free when its last user is gone, not when circles are next looked for."""
    collected = gc.isenabled()
    gc.disable()
    try:
        with tw.aten.use("all"):
            for _ in range(4):  # a first one, one that is to become a plan, and what comes after
                x = torch.empty(6, 7)
                known = weakref.ref(x)
                fill(x)
                del x
                assert known() is None
            assert tw.aten.report()[f"{fill.__name__}"]["taken"] == 4
    finally:
        if collected:
            gc.enable()


def test_other_threads_see_it_and_autograds_do():
    made: list[torch.Tensor] = []
    zeros = torch.zeros(3)  # here: a default device is of one thread
    with tw.aten.use("all", include=["exp", "mul.Tensor"]):
        thread = threading.Thread(target=lambda: made.append(torch.exp(zeros)))
        thread.start()
        thread.join()
        assert tw.aten.report()["exp"]["taken"] == 1
        x = torch.zeros(3, requires_grad=True)
        x.exp().sum().backward()
        assert tw.aten.report()["mul.Tensor"]["taken"] == 1 and torch.equal(x.grad, torch.ones(3))
    assert torch.equal(made[0], torch.ones(3))


def test_many_threads_enter_and_leave():
    wrong: list[object] = []
    ones, minus = torch.ones(2), torch.tensor([-1.0, -1.0])

    def work() -> None:
        try:
            for _ in range(5):
                with tw.aten.use("all", include="neg"):
                    if not torch.equal(torch.neg(ones), minus):
                        wrong.append("a value")
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize(
    ("name", "args", "said"),
    [
        ("cumsum", (torch.ones(3), 0), "cumsum: ours, by the engine scan"),
        ("add.Tensor", (torch.ones(3), 2.0), "add.Tensor: ours, by the engine pointwise"),
        ("divide", (torch.ones(3), 2.0), "div.Tensor: ours, by the engine pointwise"),
        ("neg", (torch.ones(3, dtype=torch.complex64),), "neg: aten's, because of complex64"),
        ("erfinv", (torch.ones(3),), "erfinv: aten's, there is no replacement"),
    ],
)
def test_explain(name, args, said):
    assert tw.aten.explain(name, *args).startswith(said)


def test_explain_makes_the_call_once():
    x = torch.ones(3)
    tw.aten.explain("add_", x, 1.0)
    assert torch.equal(x, torch.full((3,), 2.0))
    with pytest.raises(ValueError, match="torch does not define 'nonsense'"):
        tw.aten.explain("nonsense", x)


def test_the_page_names_every_overload_with_its_engine():
    page = (Path(__file__).parents[2] / "docs" / "aten.md").read_text()
    told = {line.split(" | ")[0].strip("| "): line for line in page.splitlines() if line.startswith("| ")}
    for name, engine in table.ENGINE.items():
        assert f"`{name}`" in told[engine], f"docs/aten.md does not name {name} beside {engine}"
