"""The nets are tested too: every broken kernel of `tests/mutants.py` must be caught by the property named there, and the
unbroken op must pass them all."""

from __future__ import annotations

import re

import pytest
from triton.runtime.errors import InterpreterError

from tests.mutants import MUTANTS, SUBJECT, Mutant, declared
from tilewright.check import properties, registration
from tilewright.check.cases import Net

NET = Net(interpreter=True, cases=9)
PROPS = {p.__name__: p for p in (*properties.VALUES, *registration.FACES)}


def run(prop: str, op, path) -> None:
    PROPS[prop](op, NET, *([str(path)] if prop == "wide_strides" else []))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_is_caught(mutant: Mutant, tmp_path):
    errors = (AssertionError, InterpreterError, RuntimeError)
    with declared(mutant, tmp_path) as (op, path), pytest.raises(errors) as caught:
        run(mutant.prop, op, path)
    assert re.search(mutant.says, str(caught.value)), f"caught, but for another reason: {caught.value}"


@pytest.mark.parametrize("prop", sorted({m.prop for m in MUTANTS}))
def test_unbroken_op_passes(prop, tmp_path):
    same = Mutant("none", "Toy op", "Toy op", prop, "", SUBJECT)
    with declared(same, tmp_path) as (op, path):
        run(prop, op, path)


def test_there_are_enough():
    assert len(MUTANTS) >= 15
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
