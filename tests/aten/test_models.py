"""Models of transformers with their operators replaced, in both modes: logits, the loss and every gradient of a step are
torch's."""

from __future__ import annotations

from collections import Counter

import pytest

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import tilewright as tw
from tests.aten.models import KINDS, built, error, step
from tests.aten.test_auto import cell, fallback, nothing_is_left, rows  # noqa: F401
from tilewright.aten import table
from tilewright.aten.observed import Calls

FP32 = 5e-6  # of the largest value: some sums in another order


def counted(calls: Calls) -> Counter[str]:
    """How often each overload was called."""
    found: Counter[str] = Counter()
    for call, count in calls.counts.items():
        found[call.overload] += count
    return found


def declared(calls: Calls) -> tuple[list[dict], set[str]]:
    """Rows by which ours win at every other overload that was called, and lose at the others; and the names of the former."""
    names = sorted(counted(calls))
    wins = set(names[::2])
    made = [
        cell(c.overload, c.bytes, 2.0 if c.overload in wins else 0.5, c.dtype, c.layout) for c in sorted(calls.counts)
    ]
    return made, wins


@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_torchs_in_both_modes(name, rows):  # noqa: F811
    """In mode "all" every call of an overload that is replaced is ours; in "auto" those alone that rows say, and no call of
    another."""
    kind, model = KINDS[name], built(name, "cpu")
    given = kind.given("cpu")
    plain = step(model, given)
    with tw.aten.observe() as calls:
        step(model, given)
    with tw.aten.use("all"):
        whole, said = step(model, given), tw.aten.report()
    assert max(error(whole, plain).values()) < FP32
    taken = {one: n["taken"] for one, n in said.items() if n["taken"]}
    assert kind.calls <= taken.keys() and sum(taken.values()) >= 0.98 * sum(counted(calls).values())
    assert not [one for one in said.values() if one["declined"]]
    made, wins = declared(calls)
    rows(*made, fallback(1.0))
    with tw.aten.use("auto", observed=calls):
        chosen, said = step(model, given), tw.aten.report()
    assert max(error(chosen, plain).values()) < FP32
    assert said.keys() == wins and all(n["verdict"] == "sized" for n in said.values())
    for one, count in counted(calls).items():
        # Whether a gradient is added in place is autograd's choice, from call to call
        if one in wins and not one.startswith("add"):
            assert said[one]["taken"] >= count, one


def test_a_step_that_is_not_torchs_is_noticed(monkeypatch):
    """A norm with another epsilon."""
    own = table.FORMS["native_layer_norm"]
    monkeypatch.setitem(table.FORMS, "native_layer_norm", lambda x, shape, w, b, eps: own(x, shape, w, b, 1e-3))
    model, given = built("BERT", "cpu"), KINDS["BERT"].given("cpu")
    plain = step(model, given)
    with tw.aten.use("all", include=["native_layer_norm"]):
        assert max(error(step(model, given), plain).values()) > FP32
