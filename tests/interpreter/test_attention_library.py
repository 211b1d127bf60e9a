"""A forward by cuDNN, whose stand-in computes in float64: nothing is copied on the way there or back, gradients are our own
kernels', and a call that is like one before is a plan. Numbers of cuDNN's own are for a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.attention_library import Watched
from tests.attention_oracle import PLAIN, agrees, call
from tilewright.attention import library
from tilewright.attention.attention import reference_lse
from tilewright.check.oracle import rms
from tilewright.core.target import INTERPRETER, pretend
from tilewright.runtime import choose, run
from tilewright.runtime.plan import Recorder

OPS = (tw.attention.op, tw.attention_lse.op)
KINDS = {
    "all keys": {"length": 9, "keys": 9},
    "causal": {"length": 21, "keys": 21, "causal": True, "heads": 3, "kv_heads": 3},
    "other keys than queries": {"length": 5, "keys": 19, "batch": 2},
    "fewer queries than a mask would want": {"length": 1, "keys": 7, "D": 128},
    "heads share keys": {"batch": 2, "length": 12, "keys": 12, "heads": 6, "kv_heads": 2, "causal": True},
    "narrower values": {"length": 8, "keys": 8, "D": 24, "V": 16, "causal": True},
    "wider values, a scale": {"length": 8, "keys": 10, "D": 16, "V": 256, "scale": 0.3},
    "fp16": {"length": 8, "keys": 8, "dtype": torch.float16},
}


@pytest.fixture
def cudnn(monkeypatch):
    """cuDNN as if it were there, on a chip that has it; our own kernels through the interpreter."""
    stand_in = Watched()
    original = choose.implementation

    def chosen(op, values, device=None):
        with pretend(INTERPRETER):
            return original(op, values, torch.device("cuda"))

    monkeypatch.setattr(library, "entry_point", lambda: stand_in)
    monkeypatch.setattr(library, "offered", lambda a: True)
    monkeypatch.setattr(run, "implementation", chosen)
    for op in OPS:
        op.plans.clear()
        op.backward_plans.clear()
    yield stand_in
    for op in OPS:
        op.plans.clear()
        op.backward_plans.clear()


def lies_on(view: Tensor, tensor: Tensor) -> bool:
    """Whether a view [batch, heads, length, columns] is the memory of a tensor [batch, length, heads, columns]."""
    return view.data_ptr() == tensor.data_ptr() and torch.equal(view.transpose(1, 2), tensor) and (
        view.transpose(1, 2).stride() == tensor.stride()
    )  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_results(cudnn, kind):
    """Of both ops, the first time and from a plan, contiguous, and in memory that is the caller's own."""
    a = call(**KINDS[kind])
    for turn in range(3):
        o, lse = tw.attention_lse(**a, backend="cudnn")
        agrees(a, o, lse)
        assert lse.shape == (o.shape[0], o.shape[2], o.shape[1]) and lse.dtype == torch.float32
        alone = tw.attention(**a, backend="cudnn")
        assert torch.equal(alone, o)
        for t in (o, lse, alone):
            assert t.is_contiguous() and not t._is_view(), turn
    assert len(cudnn.calls) == 6 and all(len(op.plans) == 1 for op in OPS)
    for given in cudnn.calls:
        assert all(lies_on(*pair) for pair in ((given.query, a["q"]), (given.key, a["k"]), (given.value, a["v"])))


def test_a_plan_takes_the_tensors_of_its_call(cudnn):
    for turn in range(3):
        a = call(length=6, keys=6 + turn % 2, D=16)
        a["q"] = a["q"] * (turn + 1)
        agrees(a, *tw.attention_lse(**a, backend="cudnn"))
        agrees({**a, "scale": 0.5}, *tw.attention_lse(**{**a, "scale": 0.5}, backend="cudnn"))


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_our_own_kernels(cudnn, kind):
    """Through o, through lse and through both, against float64; the second backward is a plan."""
    a = call(**KINDS[kind])
    source = torch.Generator().manual_seed(7)
    for through in ((0,), (1,), (0, 1), (0, 1)):
        leaves = [a[n].clone().requires_grad_() for n in "qkv"]
        wide = [a[n].double().requires_grad_() for n in "qkv"]
        results = tw.attention_lse(**{**a, **dict(zip("qkv", leaves))}, backend="cudnn")
        truth = reference_lse(**{**a, **dict(zip("qkv", wide))})
        grads = [torch.randn(r.shape, generator=source).to(r.dtype) for r in results]
        mine = torch.autograd.grad(
            [results[i] for i in through], leaves, [grads[i] for i in through], allow_unused=True
        )
        wanted = torch.autograd.grad(
            [truth[i] for i in through], wide, [grads[i].double() for i in through], allow_unused=True
        )
        for found, true in zip(mine, wanted):
            true = torch.zeros_like(found, dtype=torch.float64) if true is None else true
            found = torch.zeros_like(true) if found is None else found
            assert rms(found.double() - true) <= 6e-3 * max(float(rms(true)), 1e-2)
    leaves = [a[n].clone().requires_grad_() for n in "qkv"]
    o = tw.attention(**{**a, **dict(zip("qkv", leaves))}, backend="cudnn")
    o.sum().backward()
    assert all(t.grad is not None for t in leaves)


def rows_apart(t: Tensor) -> Tensor:
    """The same numbers as a part of wider rows, as a packed projection has them."""
    batch, length, heads, width = t.shape
    wide = torch.zeros(batch, length, 3 * heads * width, dtype=t.dtype)
    part = wide[..., heads * width : 2 * heads * width].unflatten(-1, (heads, width))
    return part.copy_(t)


def heads_first(t: Tensor) -> Tensor:
    """The same numbers in the order that Hugging Face has."""
    return t.transpose(1, 2).contiguous().transpose(1, 2)


@pytest.mark.parametrize("how", [rows_apart, heads_first])
def test_other_strides_are_handed_over_as_they_are(cudnn, how):
    a = call(batch=2, length=9, keys=9, heads=4, kv_heads=2, causal=True)
    a |= {n: how(a[n]) for n in "qkv"}
    for _ in range(2):
        o, lse = tw.attention_lse(**a, backend="cudnn")
        agrees(a, o, lse)
        assert o.is_contiguous() and not o._is_view()
    assert all(lies_on(*pair) for pair in zip(vars(cudnn.calls[-1]).values(), (a["q"], a["k"], a["v"])))
    assert library.token_by_token(a["q"]) == (how is rows_apart)


def test_memory_of_the_caller_s(cudnn):
    a = call(length=9, keys=9, heads=4, kv_heads=2, D=16)
    wanted = tw.attention_lse(**a, backend="cudnn")
    for _ in range(3):
        o, lse = (torch.full(t.shape, float("nan"), dtype=t.dtype) for t in wanted)
        assert tw.attention(**a, backend="cudnn", out=o) is o and torch.equal(o, wanted[0])
        o = torch.zeros(1, 4, 9, 16, dtype=torch.bfloat16).transpose(1, 2)
        made = tw.attention_lse(**a, backend="cudnn", out=(o, lse))
        assert made[0] is o and made[1] is lse and all(torch.equal(*pair) for pair in zip(made, wanted))
        lse.zero_()
        made = tw.attention_lse(**a, backend="cudnn", out=(None, lse))
        assert made[1] is lse and all(torch.equal(*pair) for pair in zip(made, wanted))
    assert len(cudnn.calls) == 10 and len(tw.attention_lse.op.plans) == 3


def test_a_run_that_launches_nothing_calls_nothing(cudnn):
    a = call(length=9, keys=11, heads=4, kv_heads=2, V=24)
    with Recorder([a["q"], a["k"], a["v"]], compile_only=True):
        o, lse = library.forward(**a, out=None)
    assert not cudnn.calls and o.shape == (1, 9, 4, 24) and lse.shape == (1, 4, 9) and lse.dtype == torch.float32
    with run.compiling_only():
        tw.attention.op.run(tw.attention.op.signature.bind((), {**a, "backend": "cudnn"}))
    assert not cudnn.calls


def test_it_is_taken_by_name_and_never_by_force_of_ours(cudnn):
    a = call(length=9, keys=9)
    with tw.force("cudnn"):
        tw.attention(**a)
    assert len(cudnn.calls) == 1
    for given, name in (({"backend": "triton"}, None), ({"backend": "portable"}, None), ({}, "triton"), ({}, None)):
        with tw.force(name) if name else pretend(INTERPRETER):
            agrees(a, *tw.attention_lse(**a, **given))
    assert len(cudnn.calls) == 1


REFUSED: dict[str, dict[str, Any]] = {
    "q, k and v must be bfloat16 or float16": {"dtype": torch.float32},
    "left is not taken": {"left": 3},
    "right is not taken": {"right": 3},
    "sink is not taken": {"sink": torch.zeros(2)},
    "slopes is not taken": {"slopes": torch.zeros(2)},
    "mask is not taken": {"mask": torch.ones(1, 1, 9, 9, dtype=torch.bool)},
    "kv_len is not taken": {"kv_len": torch.tensor([9])},
    "cu_seqlens_q is not taken": {"cu_seqlens_q": torch.tensor([0, 9]), "cu_seqlens_k": torch.tensor([0, 9])},
    "softcap must be 0, got 2": {"softcap": 2.0},
    "scale must be more than 0, got -1": {"scale": -1.0},
    "causal needs as many keys as queries, got 12 and 9": {"causal": True, "keys": 12},
    "q must have a multiple of 8 columns, 256 at most, got 20": {"D": 20},
    "q must have a multiple of 8 columns, 256 at most, got 264": {"D": 264},
    "v must have a multiple of 8 columns, 256 at most, got 264": {"V": 264},
    "q must have 1 to 2**31 - 1 elements, got 0": {"length": 0},
    "k must have 1 to 2**31 - 1 elements, got 0": {"keys": 0},
    "k must have 2 keys or more, got 1": {"keys": 1},
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_it_does_not_take_is_said_in_a_line(cudnn, why):
    a = call(**{"length": 9, "keys": 9, **REFUSED[why]})
    for op in (tw.attention, tw.attention_lse):
        with pytest.raises(ValueError, match=f"^{op.op.name}: backend cudnn: ") as error:
            op(**a, backend="cudnn")
        assert why in str(error.value) and "\n" not in str(error.value)
    assert not cudnn.calls


def test_strides_and_codes_that_it_does_not_take(cudnn):
    a = call(length=9, keys=9)
    far = a["k"].new_zeros(2 * a["k"].numel() + 1)
    odd = {
        "k must have columns side by side": {**a, "k": far[: 2 * a["k"].numel()].view(1, 9, 1, 128)[..., ::2]},
        "v must have columns side by side": {**a, "v": far[: 9 * 66].view(1, 9, 1, 66)[..., :64]},  # rows of 132 bytes
        "q must have columns side by side": {**a, "q": a["q"][:, :, :1].expand(1, 9, 2, 64)},  # rows that are shared
    }
    for why, given in odd.items():
        with pytest.raises(ValueError, match=f"^attention: backend cudnn: {why}"):
            tw.attention(**given, backend="cudnn")
    with pytest.raises(RuntimeError, match=r"^attention: no backend cudnn .*portable would do"):  # 2 bytes off
        tw.attention(**{**a, "v": far[1 : a["v"].numel() + 1].view(a["v"].shape)}, backend="cudnn")
    with pytest.raises(ValueError, match="^attention: backend cudnn multiplies no codes: math must be auto"):
        tw.attention(a["q"], a["k"], a["v"], math="int8", backend="cudnn")


def test_where_torch_has_it_not_our_own_are_taken(cudnn, monkeypatch):
    """By its own account, or because a torch has other arguments; and a CPU has none of it."""
    a = call(length=9, keys=9)
    monkeypatch.setattr(library, "offered", lambda a: False)
    with tw.force("triton"):
        agrees(a, *tw.attention_lse(**a))
    with pytest.raises(RuntimeError, match=r"^attention: no backend cudnn .*portable would do"):
        tw.attention(**a, backend="cudnn")
    monkeypatch.undo()
    assert torch.version.cuda or library.entry_point() is None and library.absence().startswith("torch ")
    with pytest.raises(RuntimeError, match="^attention: no backend cudnn"):
        tw.attention(**a, backend="cudnn")


def test_a_compiled_function_has_it_too(cudnn):
    a = call(length=9, keys=9, heads=4, kv_heads=2)
    q, k, v = (a[n].requires_grad_() for n in "qkv")
    compiled = torch.compile(lambda *t: tw.attention(*t, backend="cudnn"), fullgraph=True, backend="aot_eager")
    o = compiled(q, k, v)
    assert len(cudnn.calls) == 1 and torch.equal(o, tw.attention(q, k, v, backend="cudnn"))
    plain = torch.autograd.grad(tw.attention(q, k, v, backend="cudnn").sum(), (q, k, v))
    assert all(torch.equal(*pair) for pair in zip(torch.autograd.grad(o.sum(), (q, k, v)), plain))


def test_all_that_is_not_asked_for_is_named():
    """What `refusal` looks at is every option that there is: a new one would have to be looked at too."""
    known = {*library.NONE_OF, "softcap", "scale", "causal"}
    assert known == set(PLAIN)
