"""Linear attention with a decay of each column, which has kernels of its own: where a sequence is cut, stepped through or forgotten
must not matter."""

from __future__ import annotations

from dataclasses import replace

import pytest

import tilewright as tw
from tests.interpreter.sequences import cut_anywhere, decayed_to_nothing, steps_after_prefill
from tilewright.check.cases import Net
from tilewright.check.properties import guarded_memory, isolation, special_values, strides
from tilewright.core.target import INTERPRETER, pretend
from tilewright.ops.recurrent import linear_tokens


@pytest.fixture(autouse=True)
def by_chunks(monkeypatch):
    """However short sequences are, on a chip of its own, since calls are replayed."""
    monkeypatch.setattr(linear_tokens, "SHORT", -1)
    monkeypatch.setattr(linear_tokens, "SHORT_PACKED", 0)
    with pretend(replace(INTERPRETER, sms=INTERPRETER.sms + 1)):
        yield


@pytest.mark.parametrize("holds", [guarded_memory, isolation, special_values, strides], ids=lambda p: p.__name__)
def test_properties_of_short_sequences(holds):
    holds(tw.catalogue()["linear_attention_columns"], Net(interpreter=True, cases=7))


@pytest.mark.parametrize(
    ("kind", "size"), [("columns", 3), ("columns_delta", 16), ("columns_delta", 1), ("columns_bonus", 3)]
)
def test_a_sequence_may_be_cut_anywhere(kind, size):
    cut_anywhere(kind, size)


@pytest.mark.parametrize("kind", ["columns_delta", "columns_bonus"])
def test_steps_go_on_from_a_prefill(kind):
    steps_after_prefill(kind)


@pytest.mark.parametrize("kind", ["columns", "columns_delta"])
def test_decays_to_nothing(kind):
    decayed_to_nothing(kind)
