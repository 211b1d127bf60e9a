"""Linear attention's data: of whatever kind the nets try it with, its states stay as small as the recurrence promises."""

from __future__ import annotations

from functools import partial

import pytest

import tilewright as tw
from tilewright.check import properties
from tilewright.check.cases import Net, draw
from tilewright.check.oracle import lifted
from tilewright.ops.recurrent.linear import unit_rows

CASES = 21  # every pair of a dtype and a family of data


@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_columns"])
def test_no_data_makes_a_delta_rule_explode(name, monkeypatch):
    """A token leaves no more of a state than there was, so that no state is longer than all that was added."""
    op, tried = tw.catalogue()[name], []
    delta = {"beta": True, "with_bonus": False}
    monkeypatch.setattr(properties, "draw", partial(draw, options=delta))
    monkeypatch.setattr(properties, "outcome", lambda op, values, seed: None)
    monkeypatch.setattr(properties, "check", lambda op, label, values, actual: tried.append((label, values)))
    properties.accuracy(op, Net(cases=CASES, largest=512))
    assert len(tried) == CASES
    for label, values in tried:
        wide = lifted(op, values)
        _, final = op.reference(**wide)
        keys = unit_rows(wide["k"]) if wide["normalize"] else wide["k"]
        added = keys.norm(dim=-1).max() * wide["v"].norm(dim=-1).sum()
        before = 0.0 if wide["state"] is None else wide["state"].norm()
        assert float(final.norm()) <= 1.001 * float(before + added), label
