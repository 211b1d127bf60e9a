"""Gradients of linear attention by chunks: by one kernel, of slow and of strong decays, and refused where there are none."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.interpreter.sequences import CHUNKS, bonus_of, drawn, in_chunks, sequence
from tilewright.check.compare import check
from tilewright.check.oracle import outcome
from tilewright.check.variants import Call, passes


@pytest.fixture(autouse=True)
def by_chunks(monkeypatch):
    with in_chunks(monkeypatch):
        yield


@pytest.mark.parametrize("decay, normalize", [(None, False), ("head", True), ("token", False), ("token", True)])
@pytest.mark.parametrize("packed", [False, True])
def test_one_kernel_makes_the_gradients_of_a_chunk(decay, packed, normalize):
    """Of two chunks and some, from a state, of both results; tokens in no sequence have none."""
    op, (batch, length, heads, width) = tw.linear_attention.op, (1 if packed else 2, 150, 2, 12)
    rows = {n: drawn(batch, length, heads, width, seed=i).to(torch.bfloat16) for i, n in enumerate("qkv")}
    rows["k"] *= 0.2
    shape = {"head": (heads,), "token": (batch, length, heads)}.get(decay)
    marks = torch.tensor([2, 73, 73, 148]) if packed else None
    given = {
        **rows,
        "log_decay": None if shape is None else -drawn(*shape, seed=4).abs(),
        "state": drawn(3 if packed else batch, heads, width, width, seed=5),
        "normalize": normalize,
        "cu_seqlens": marks,
    }
    values = op.signature.bind((), given)
    with tw.force("triton"):
        names = [w.kernel.name for w in passes(op, Call(given), CHUNKS)[1]]
        made = outcome(op, values)
    check(op, f"{decay}, {packed}, {normalize}", values, made)
    walks = ["linear_attention_states", "linear_attention_states_backward"]
    assert [n for n in names if n.startswith("linear_")] == [*walks, "linear_attention_gradients"]


@pytest.mark.parametrize("delta, heads, width", [(False, 8, 16), (True, 3, 32)], ids=["head", "token, delta"])
@pytest.mark.parametrize("strong", [False, True])
def test_gradients_of_slow_and_of_strong_decays(delta, heads, width, strong):
    """4e-3 of relative RMS, over all numbers of two draws: a decay's gradient is a sum in which some nearly cancel. The delta
    rule's keys have length 1, as models give them, by which what a chunk rounds comes back in every chunk before it."""
    length, shape = (130, (1, 130, heads)) if delta else (75, (heads,))
    wrong: dict[str, list[float]] = {}
    for seed in range(0, 20, 10):
        rows = {n: drawn(1, length, heads, width, seed=seed + i).to(torch.bfloat16) for i, n in enumerate("qkv")}
        if not delta:
            rows["k"] *= 0.175
        rate = drawn(*shape, seed=seed + 3).abs()
        given = {
            **rows,
            "log_decay": torch.where(rate > 1.6, -100.0, -1e-3 * rate) if strong else -1e-3 * rate,
            "beta": drawn(1, length, heads, seed=seed + 4).sigmoid() if delta else None,
            "state": drawn(1, heads, width, width, seed=seed + 5),
        }
        given = {n: t for n, t in given.items() if t is not None}
        asked = [drawn(*t.shape, seed=seed + 6 + i).to(t.dtype) for i, t in enumerate((rows["v"], given["state"]))]
        made = []
        for way, dtype in ("triton", None), ("reference", torch.float64):
            leaves = [t.to(dtype or t.dtype).requires_grad_() for t in given.values()]
            with tw.force(way):
                results = tw.linear_attention(**dict(zip(given, leaves)), normalize=delta)
            made.append(torch.autograd.grad(results, leaves, [a.to(r.dtype) for a, r in zip(asked, results)]))
        for name, found, exact in zip(given, *made):
            squares = wrong.setdefault(name, [0.0, 0.0])
            squares[0] += float((found - exact).square().sum())
            squares[1] += float(exact.square().sum())
    assert not {n: (a / b) ** 0.5 for n, (a, b) in wrong.items() if not a < 4e-3**2 * b}


def test_what_has_no_gradient_says_so():
    given, line = sequence("columns"), "a log_decay of each column has no gradient"
    given["v"].requires_grad_()
    for way in ("triton", "reference"):
        with tw.force(way), pytest.raises(ValueError, match=line):
            tw.linear_attention(**given)
    for wrong in (sequence("linear"), sequence("columns_delta"), {**sequence("linear"), "log_decay": None}):
        with pytest.raises(ValueError, match="bonus goes with a log_decay for each column, and not with beta"):
            tw.linear_attention(**wrong, **bonus_of("columns_bonus"))
