"""Linear attention with a decay of each column, which has kernels of its own: where a sequence is cut, stepped through or forgotten
must not matter."""

from __future__ import annotations

import pytest

from tests.interpreter.sequences import cut_anywhere, decayed_to_nothing, steps_after_prefill


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
