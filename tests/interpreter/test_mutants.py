"""The nets are tested too: every broken kernel of `tests/mutants.py` and every broken machinery of `tests/machinery.py` must be
caught by the property named there, and the unbroken op must pass them all."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from triton.runtime.errors import InterpreterError

from tests import machinery
from tests.mutants import MUTANTS, SUBJECT, Mutant, declared
from tilewright.check import properties, registration
from tilewright.check.cases import Net

NET = Net(interpreter=True, cases=9)
PROPS = {p.__name__: p for p in (*properties.VALUES, *registration.FACES)}


def run(prop: str, op, path, known: str) -> None:
    further = {
        "wide_strides": [str(path)],
        "as_in_models": [known],
    }  # what they find by the name of an op of the library
    PROPS[prop](op, NET, *further.get(prop, []))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_is_caught(mutant: Mutant, tmp_path):
    errors = (AssertionError, InterpreterError, RuntimeError)
    with declared(mutant, tmp_path) as (op, path), pytest.raises(errors) as caught:
        run(mutant.prop, op, path, mutant.op)
    assert re.search(mutant.says, str(caught.value)), f"caught, but for another reason: {caught.value}"


@pytest.mark.parametrize("mutant", [m for m in MUTANTS if m.missed_by], ids=lambda m: m.name.replace(" ", "-"))
def test_mutant_is_missed_by_another_property(mutant: Mutant, tmp_path):
    """As it was by all that draw small and odd sizes alone: should one notice it now, another mutant has to tell them apart."""
    with declared(mutant, tmp_path) as (op, path):
        run(mutant.missed_by, op, path, mutant.op)


@pytest.mark.parametrize("prop", sorted({m.prop for m in MUTANTS}))
def test_unbroken_op_passes(prop, tmp_path):
    same = Mutant("none", "Toy op", "Toy op", prop, "", SUBJECT)
    with declared(same, tmp_path) as (op, path):
        run(prop, op, path, same.op)


def test_mutants_of_the_machinery_are_caught():
    """In one process that forks: a process each would spend most of its time on importing torch."""
    command = [sys.executable, "-m", "tests.machinery"]
    done = subprocess.run(command, cwd=machinery.ROOT, capture_output=True, text=True, timeout=1800)
    assert done.returncode == 0, done.stderr[-3000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    wrong = [f"unbroken, {row['prop']} of {row['op']}: {row['said']}" for row in rows if "prop" in row and row["said"]]
    said = {row["mutant"]: row["said"] for row in rows if "mutant" in row}
    assert said.keys() == {m.name for m in machinery.MUTANTS}
    wrong += [
        f"{m.name}: {m.prop} of {m.op} should say {m.says!r}, said {said[m.name] or 'nothing'}"
        for m in machinery.MUTANTS
        if not re.search(m.says, said[m.name])
    ]
    assert not wrong, "\n".join(wrong)


def test_there_are_enough():
    assert len(MUTANTS) >= 15
    assert len({m.name for m in MUTANTS}) == len(MUTANTS)
    assert len({m.name for m in machinery.MUTANTS}) == len(machinery.MUTANTS) >= 10
