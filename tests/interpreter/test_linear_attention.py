"""Linear attention and causal convolutions: where a sequence is cut, packed, stepped through or forgotten must not matter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.mutants import Mutant, declared
from tilewright.check.cases import Net
from tilewright.check.properties import isolation

NAN = float("nan")
HEADS, KEY_HEADS, WIDTH, VALUES, LENGTH = 2, 1, 16, 24, 35


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def sequence(kind: str = "delta") -> dict[str, Tensor]:
    """Arguments whose first dimensions are batch and length."""
    columns = [WIDTH] if kind.startswith("columns") else []
    made = {
        "q": drawn(1, LENGTH, KEY_HEADS, WIDTH, seed=0),
        "k": drawn(1, LENGTH, KEY_HEADS, WIDTH, seed=1),
        "v": drawn(1, LENGTH, HEADS, VALUES, seed=2),
        "log_decay": -torch.rand(1, LENGTH, HEADS, *columns, generator=torch.Generator().manual_seed(3)),
    }
    return made | ({"beta": torch.sigmoid(drawn(1, LENGTH, HEADS, seed=4))} if kind.endswith("delta") else {})


def bonus_of(kind: str) -> dict[str, Tensor]:
    return {"bonus": drawn(HEADS, WIDTH, seed=6)} if kind.endswith("bonus") else {}


def run(**given: Any) -> tuple[Tensor, Tensor]:
    with tw.force("triton"):
        return tw.linear_attention(**{"normalize": True, **given})


def near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def cut(given: dict[str, Tensor], first: int, end: int) -> dict[str, Tensor]:
    return {name: t[:, first:end] for name, t in given.items()}


CUTS = [(kind, size) for kind in ("linear", "delta") for size in (1, 3, 16)]
CUTS += [("columns", 3), ("columns_delta", 16), ("columns_delta", 1), ("columns_bonus", 3)]


@pytest.mark.parametrize(("kind", "size"), CUTS)
def test_a_sequence_may_be_cut_anywhere(kind, size):
    tokens = 19 if size > 1 else 7
    given, more, state, made = cut(sequence(kind), 0, tokens), bonus_of(kind), None, []
    for first in range(0, tokens, size):
        o, state = run(**cut(given, first, first + size), **more, state=state)
        made.append(o)
    near((torch.cat(made, 1), state), run(**given, **more))


@pytest.mark.parametrize("kind", ["linear", "delta", "columns_delta", "columns_bonus"])
def test_steps_go_on_from_a_prefill(kind):
    given, more, end = sequence(kind), bonus_of(kind), LENGTH - 3
    o, state = run(**cut(given, 0, end), **more)
    pool = torch.full((3, *state.shape[1:]), NAN)
    pool[1] = state[0]
    slots, made = torch.tensor([1]), [o]
    for t in range(end, LENGTH):
        now = {name: x[:, t] for name, x in given.items()}
        with tw.force("triton"):
            made.append(tw.linear_attention_step(state=pool, slots=slots, normalize=True, **now, **more)[:, None])
    near((torch.cat(made, 1), pool[1:2]), run(**given, **more))
    assert bool(pool[0].isnan().all()) and bool(pool[2].isnan().all()), "a slot of no token was touched"


def test_packed_sequences_are_apart():
    """One is empty and keeps its state; tokens in none may hold anything, and give 0; states lie anywhere."""
    given, marks = sequence(), [2, 9, 9, 33]
    states = drawn(VALUES, HEADS, 6, WIDTH, seed=5).permute(2, 1, 3, 0)[::2]
    poisoned = {name: t.clone() for name, t in given.items()}
    for t in poisoned.values():
        t[:, :2], t[:, 33:] = NAN, NAN
    o, last = run(**poisoned, state=states, cu_seqlens=torch.tensor(marks))
    assert not bool(o[:, :2].any()) and not bool(o[:, 33:].any())
    for s, (first, end) in enumerate(zip(marks, marks[1:])):
        if end > first:
            near((o[:, first:end], last[s : s + 1]), run(**cut(given, first, end), state=states[s : s + 1]))
    assert torch.equal(last[1], states[1])
    for t in poisoned.values():
        t[:, 2:9] = NAN
    there, after = run(**poisoned, state=states, cu_seqlens=torch.tensor(marks))
    assert bool(there[:, 2:9].isnan().any()) and torch.equal(there[:, 9:], o[:, 9:]) and torch.equal(after[1:], last[1:])


LEAK = Mutant(
    "NaN leaks to other rows of a batch",
    "        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE)\n",
    "        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE)\n"
    "        q += 0.0 * load_rows(Q, BATCH - 1 - batch, head // GROUP, c.token, c.known, SHAPE)\n",
    "isolation", "nan in row 1 of q: other rows of o", "tilewright/ops/recurrent/linear_chunks.py", "linear_attention",
    through=("tilewright/ops/recurrent/linear_attention.py",),
)  # fmt: skip


def test_a_leak_to_other_sequences_is_seen(tmp_path):
    """By the property, which draws no packed sequences: these are a batch of one row, with no other beside it."""
    with declared(LEAK, tmp_path) as (op, _), pytest.raises(AssertionError, match=LEAK.says):
        isolation(op, Net(interpreter=True))


def test_nothing_is_taken_for_what_it_is():
    """No sequence, no head or no token: results of the sizes that they have, and a state that stays."""
    given, state = sequence(), drawn(1, HEADS, WIDTH, VALUES, seed=5)
    o, last = run(**cut(given, 0, 0), state=state)
    assert o.shape == (1, 0, HEADS, VALUES) and torch.equal(last, state)
    o, last = run(**{name: t[:0] for name, t in given.items()})
    assert o.shape == (0, LENGTH, HEADS, VALUES) and last.shape == (0, HEADS, WIDTH, VALUES)
    o, last = run(**{name: t[:, :, :0] for name, t in given.items()})
    assert o.shape == (1, LENGTH, 0, VALUES) and last.shape == (1, 0, WIDTH, VALUES)


@pytest.mark.parametrize("kind", ["linear", "columns", "columns_delta"])
def test_decays_to_nothing(kind):
    """A state that a token forgets is gone, and what comes after it is kept to the last digit; of columns, each for itself."""
    given = sequence(kind)
    far = (torch.arange(LENGTH)[:, None] + torch.arange(WIDTH)) % 7 == 3
    decay = torch.where(far, -100.0, -0.01)[None, :, None].expand(1, LENGTH, HEADS, WIDTH)
    given["log_decay"] = decay[..., 0] if kind == "linear" else decay
    for dtype in (torch.float32, torch.bfloat16):
        values = {name: t if name == "log_decay" else t.to(dtype) for name, t in given.items()}
        o, last = run(**values)
        with tw.force("reference"):
            exact = tw.linear_attention(**{name: t.double() for name, t in values.items()}, normalize=True)[1]
        assert bool(o.isfinite().all())
        assert float((last - exact).norm() / exact.norm()) < 1e-5


def test_what_has_no_gradient_says_so():
    given, line = sequence("columns"), "a log_decay of each column has no gradient"
    given["v"].requires_grad_()
    for way in ("triton", "reference"):
        with tw.force(way), pytest.raises(ValueError, match=line):
            tw.linear_attention(**given)
    for wrong in (sequence("linear"), sequence("columns_delta"), {**sequence("linear"), "log_decay": None}):
        with pytest.raises(ValueError, match="bonus goes with a log_decay for each column, and not with beta"):
            tw.linear_attention(**wrong, **bonus_of("columns_bonus"))


def test_slots_out_of_range_are_left_alone():
    pool, kept = torch.full((2, HEADS, WIDTH, VALUES), NAN), torch.full((2, 5, 3), NAN)
    q, v, x = drawn(3, KEY_HEADS, WIDTH, seed=0), drawn(3, HEADS, VALUES, seed=1), drawn(3, 5, seed=2)
    slots = torch.tensor([-1, 2, 2**40])
    with tw.force("triton"):
        o = tw.linear_attention_step(q, q, v, pool, slots=slots)
        y = tw.causal_conv1d_step(x, drawn(5, 4, seed=3), None, kept, slots)
    assert not bool(o.any()) and not bool(y.any())
    assert bool(pool.isnan().all()) and bool(kept.isnan().all())


@pytest.mark.parametrize("size", [1, 3, 16])
def test_a_convolution_may_be_cut_anywhere(size):
    x, weight, bias = drawn(2, 20, 5, seed=0), drawn(5, 4, seed=1), drawn(5, seed=2)
    with tw.force("triton"):
        whole, last = tw.causal_conv1d(x, weight, bias, act="silu")
        state, made, pool = None, [], None
        for first in range(0, 20, size):
            y, state = tw.causal_conv1d(x[:, first : first + size], weight, bias, act="silu", state=state)
            made.append(y)
        assert torch.equal(torch.cat(made, 1), whole) and torch.equal(state, last)
        _, pool = tw.causal_conv1d(x[:, :13], weight, bias, act="silu")
        steps = [tw.causal_conv1d_step(x[:, t], weight, bias, pool, act="silu") for t in range(13, 20)]
    torch.testing.assert_close(torch.stack(steps, 1), whole[:, 13:], rtol=1e-6, atol=1e-6)
    assert torch.equal(pool, last)
