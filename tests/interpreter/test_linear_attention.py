"""Linear attention: where a sequence is cut, packed, stepped through or forgotten must not matter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewright as tw
from tests.interpreter.sequences import (
    HEADS,
    KEY_HEADS,
    LENGTH,
    NAN,
    VALUES,
    WIDTH,
    bonus_of,
    cut,
    cut_anywhere,
    decayed_to_nothing,
    drawn,
    in_chunks,
    near,
    run,
    sequence,
    steps_after_prefill,
)
from tests.mutants import Mutant, declared
from tilewright.check.cases import Net
from tilewright.check.properties import accuracy, isolation, special_values
from tilewright.core.target import INTERPRETER, pretend
from tilewright.ops.recurrent import linear_chunks, linear_tokens
from tilewright.runtime.kernel import collect

CROWDED = replace(INTERPRETER, sms=1)  # a chip that one walker crowds, so that it makes outputs itself
TOKENS = replace(INTERPRETER, sms=INTERPRETER.sms + 2)  # as `CHUNKS` of the sequences


@pytest.fixture
def by_chunks(monkeypatch):
    with in_chunks(monkeypatch):
        yield


@pytest.fixture
def by_tokens(monkeypatch):
    """However long sequences are."""
    monkeypatch.setattr(linear_tokens, "SHORT", LENGTH * 100)
    with pretend(TOKENS):
        yield


@pytest.fixture
def crowd(monkeypatch, by_chunks):
    """The delta rule's walkers too."""
    monkeypatch.setattr(linear_chunks, "DELTA_CROWD", 0.0)
    with pretend(CROWDED):
        yield


@pytest.fixture(params=["few", "crowded"])
def walkers(request):
    request.getfixturevalue("crowd" if request.param == "crowded" else "by_chunks")
    return request.param


@pytest.fixture(params=["few", "crowded", "tokens"])
def ways(request):
    """All ways through a sequence."""
    request.getfixturevalue({"few": "by_chunks", "crowded": "crowd", "tokens": "by_tokens"}[request.param])
    return request.param


@pytest.fixture(params=["few", "crowded", "either"])
def cuts(request):
    """By chunks, and short parts by tokens, long ones by chunks, as a call takes by itself."""
    if request.param != "either":
        request.getfixturevalue({"few": "by_chunks", "crowded": "crowd"}[request.param])
    return request.param


@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("kind", ["linear", "delta"])
def test_a_sequence_may_be_cut_anywhere(kind, size, cuts):
    cut_anywhere(kind, size)


def test_a_sequence_may_be_cut_into_tokens(by_chunks):
    """Each a chunk of its own, in which nothing but the state is seen."""
    cut_anywhere("delta", 1)


@pytest.mark.parametrize("kind", ["linear", "delta"])
def test_steps_go_on_from_a_prefill(kind, cuts):
    steps_after_prefill(kind)


@pytest.mark.parametrize("kind", ["linear", "delta", "columns", "columns_delta", "columns_bonus"])
def test_a_short_call_is_as_many_steps(kind, by_tokens):
    """One kernel does both: bit for bit."""
    given, more, pool = sequence(kind), bonus_of(kind), drawn(1, HEADS, WIDTH, VALUES, seed=5)
    o, last = run(**given, **more, state=pool)
    for t in range(LENGTH):
        now = {name: x[:, t] for name, x in given.items()}
        with tw.force("triton"):
            assert torch.equal(tw.linear_attention_step(state=pool, normalize=True, **now, **more), o[:, t])
    assert torch.equal(pool, last)


@pytest.mark.parametrize(
    "length, sequences, short",
    [(8, None, True), (9, None, False), (8, 1, True), (9, 2, False), (12, 3, True), (13, 3, False)],
)
@pytest.mark.parametrize("kind", ["linear", "columns_delta"])
def test_shapes_decide_which_way_a_call_takes(kind, length, sequences, short):
    """How long packed sequences are only the device knows: their average counts."""
    marks = None if sequences is None else torch.tensor([0, *[length] * sequences])
    with collect() as made, tw.force("triton"):
        tw.linear_attention(**cut(sequence(kind), 0, length), cu_seqlens=marks)
    assert ([w.kernel.name for w in made] == ["linear_attention_tokens"]) is short


def test_decays_to_nothing(ways):
    decayed_to_nothing("linear")


def test_packed_sequences_are_apart(ways):
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
    assert (
        bool(there[:, 2:9].isnan().any()) and torch.equal(there[:, 9:], o[:, 9:]) and torch.equal(after[1:], last[1:])
    )


LEAK = Mutant(
    "NaN leaks to other rows of a batch",
    "        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE)\n",
    "        q = load_rows(Q, batch, head // GROUP, c.token, c.known, SHAPE)\n"
    "        q += 0.0 * load_rows(Q, BATCH - 1 - batch, head // GROUP, c.token, c.known, SHAPE)\n",
    "isolation", "nan in row 1 of q: other rows of o", "tilewright/ops/recurrent/linear_chunks.py", "linear_attention",
    through=("tilewright/ops/recurrent/linear_attention.py",),
)  # fmt: skip


def test_a_leak_to_other_sequences_is_seen(tmp_path, by_chunks):
    """By the property, which draws no packed sequences: these are a batch of one row, with no other beside it."""
    with declared(LEAK, tmp_path) as (op, _), pytest.raises(AssertionError, match=LEAK.says):
        isolation(op, Net(interpreter=True))


def test_nothing_is_taken_for_what_it_is(ways):
    """No sequence, no head or no token: results of the sizes that they have, and a state that stays."""
    given, state = sequence(), drawn(1, HEADS, WIDTH, VALUES, seed=5)
    o, last = run(**cut(given, 0, 0), state=state)
    assert o.shape == (1, 0, HEADS, VALUES) and torch.equal(last, state)
    o, last = run(**{name: t[:0] for name, t in given.items()})
    assert o.shape == (0, LENGTH, HEADS, VALUES) and last.shape == (0, HEADS, WIDTH, VALUES)
    o, last = run(**{name: t[:, :, :0] for name, t in given.items()})
    assert o.shape == (1, LENGTH, 0, VALUES) and last.shape == (1, 0, WIDTH, VALUES)


@pytest.mark.parametrize("decay, rate", [(None, 0.0), ("head", 1.0), ("token", 1.0), ("token", 0.01)])
def test_an_output_is_rounded_once(decay, rate, ways):
    """In bf16 that alone is 1.66e-3 of its root mean square. Over 150 tokens that forget, outputs are made of scores, and of the
    state where they do not: either would give as much again if it was rounded before it is multiplied."""
    length, width = 150, 32
    shape = {"head": (HEADS,), "token": (1, length, HEADS)}.get(decay)
    rows = {n: drawn(1, length, HEADS, width, seed=i, scale=0.2 if n == "k" else 1.0) for i, n in enumerate("qkv")}
    given = {n: t.to(torch.bfloat16) for n, t in rows.items()}
    if shape is not None:
        given["log_decay"] = -rate * torch.rand(*shape, generator=torch.Generator().manual_seed(3))
    given["state"] = drawn(1, HEADS, width, width, seed=5)
    o, _ = run(**given, normalize=False)
    with tw.force("reference"):
        exact, _ = tw.linear_attention(**{name: t.double() for name, t in given.items()})
    assert float((o - exact).norm() / exact.norm()) < 1.8e-3


@pytest.mark.parametrize("dtype, bar", [(torch.bfloat16, 2e-5), (torch.float16, 2e-5), (torch.float32, 1e-6)])
def test_an_inverse_of_keys_that_are_alike(dtype, bar):
    """Blocks of 16 in fp32, joined by products of pieces: chunks of 64, 32 and 16 tokens, the last of them cut short. The nearer
    keys are to each other, the more of each number cancels. A row of a batch has the bits that it has by itself."""
    k = (drawn(1, 1, 1, 8, seed=0) + 0.1 * drawn(2, 70, 1, 8, seed=1)).to(dtype)
    k = (k / 4.0).to(dtype)
    beta = torch.rand(2, 70, 1, generator=torch.Generator().manual_seed(2)).to(dtype)
    shape = linear_chunks.shape_of(k, k, False)

    def inverse(k, beta):
        at = linear_chunks.placed(k, None, shape.CHUNK)
        made = torch.full((k.shape[0] * at.tiles, 1, shape.CHUNK, shape.CHUNK), NAN)
        gates = (linear_chunks.Gates(), linear_chunks.gates_of(beta))
        with pretend(INTERPRETER):
            linear_chunks.linear_attention_inverse(
                linear_chunks.heads_of(k), *gates, made, at.how, 70, 1, 1, k.shape[0], at.tiles, SHAPE=shape
            )
        return made.reshape(k.shape[0], at.tiles, shape.CHUNK, shape.CHUNK)

    made = inverse(k, beta)
    for first in range(0, 70, shape.CHUNK):
        x, b = k[:, first : first + shape.CHUNK, 0].double(), beta[:, first : first + shape.CHUNK].double()
        own = torch.eye(x.shape[1], dtype=torch.float64)
        exact = torch.linalg.inv(own + (b * (x @ x.mT)).tril(-1))
        found = made[:, first // shape.CHUNK, : x.shape[1], : x.shape[1]]
        assert float((found - exact).norm() / exact.norm()) < bar
    assert torch.equal(inverse(k[1:], beta[1:])[0], made[1])


@pytest.mark.parametrize("kind", ["linear", "delta"])
def test_walkers_make_outputs_where_they_crowd(kind, walkers):
    """No state is stored then but the last, and of packed sequences tokens in none are filled by a launch of their own."""
    given, marks = sequence(kind), torch.tensor([2, 9, 33])
    with collect() as made, tw.force("triton"):
        tw.linear_attention(**given, cu_seqlens=marks)
    names = [wanted.kernel.name.removeprefix("linear_attention_") for wanted in made]
    last = "rest" if walkers == "crowded" else "outputs"
    assert names == ["attention_tiles", *(["inverse"] if kind == "delta" else []), "states", last]
    walk = dict(zip(made[-2].kernel.names, made[-2].ordered))
    assert (walk["H"] is None, walk["O"].data is not None) == ((walkers == "crowded"),) * 2


@pytest.mark.parametrize("holds", [accuracy, special_values], ids=lambda p: p.__name__)
def test_properties_hold_where_walkers_crowd(holds, crowd):
    holds(tw.linear_attention.op, Net(interpreter=True, cases=4))


def test_slots_out_of_range_are_left_alone():
    pool, kept = torch.full((2, HEADS, WIDTH, VALUES), NAN), torch.full((2, 5, 3), NAN)
    q, v, x = drawn(3, KEY_HEADS, WIDTH, seed=0), drawn(3, HEADS, VALUES, seed=1), drawn(3, 5, seed=2)
    slots = torch.tensor([-1, 2, 2**40])
    with tw.force("triton"):
        o = tw.linear_attention_step(q, q, v, pool, slots=slots)
        y = tw.causal_conv1d_step(x, drawn(5, 4, seed=3), None, kept, slots)
    assert not bool(o.any()) and not bool(y.any())
    assert bool(pool.isnan().all()) and bool(kept.isnan().all())
