"""What the net of torch's operators tried: rows, and the table of them."""

from __future__ import annotations

import json

import pytest
import torch

from tests.aten.tried import rows_of
from tilewright.aten import table
from tilewright.aten.functions import exp2
from tilewright.aten.pointwise import how_of
from tilewright.bench import evidence, tried
from tilewright.runtime.source import constant

ABOUT = {"where": "Chip A", "torch": "2.11", "triton": "3.6"}
LINES = [
    {"test": "f.py::one", "outcome": "failed", "calls": {"neg": {"taken": 9, "declined": {}}}, **ABOUT},
    {"test": "f.py::one", "outcome": "passed", "calls": {"neg": {"taken": 2, "declined": {"complex": 1}}}, **ABOUT},
    {"test": "f.py::two", "outcome": "failed", "calls": {"neg": {"taken": 3, "declined": {"complex": 2}}}, **ABOUT},
]  # fmt: skip


def test_calls_are_added_up_and_only_those_of_tests_that_passed_have_passed():
    [row] = rows_of(LINES, "2026-01-02")
    assert (row["tried"], row["passed"], row["declined"], row["failed"]) == (8, 2, {"complex": 3}, ["two"])
    assert tried.problem(row) is None and row["source"] == tried.source("neg")
    with pytest.raises(ValueError, match="2 places"):
        rows_of([*LINES, {**LINES[0], "test": "f.py::three", "where": "Chip B"}], "2026-01-02")


def test_the_table_says_what_is_stale_what_fell_back_and_what_is_missing():
    [row] = rows_of(LINES, "2026-01-02")
    made = tried.section({"chip-a": [row]})
    assert "| `neg` | pointwise | floats, integers | 8 | 2 | 3: complex | `two` |" in made
    assert "0 rows are stale" in made and f"{len(table.FORMS) - 1} overloads have none" in " ".join(made.split())
    assert "| `neg` (stale) |" in tried.section({"chip-a": [{**row, "source": "0" * 16}]})
    assert "Chip A" not in tried.section({"interpreter": [row], "chip-b": [{**row, "where": "Chip B"}]})


@pytest.mark.parametrize(
    ("name", "words"),
    [("add.Tensor", "all"), ("mm", "bf16, fp16, fp32"), ("gelu", "floats"), ("bitwise_not", "integers, bool"),
     ("upsample_nearest2d", "floats, uint8"), ("linspace.out", "floats, integers"), ("polar", "fp32, float64")],
)  # fmt: skip
def test_dtypes_in_words(name, words):
    assert tried.taken_dtypes(name) == words


def test_verdicts_of_the_interpreters_rows_are_a_gpus():
    [row] = rows_of([{**line, "where": "interpreter"} for line in LINES], "2026-01-02")
    made = tried.section({"interpreter": [row]})
    [line] = [line for line in made.splitlines() if line.startswith("| `neg`")]
    assert line.rstrip(" |").rpartition(" ")[2] in (
        "closed",
        "sized",
        "never",
    ) and "Verdicts are those of NVIDIA" in " ".join(made.split())


@pytest.mark.parametrize(
    "change", [{"tried": "8"}, {"tried": True}, {"declined": {"complex": "3"}}, {"passed": 6}, {"more": 1}]
)
def test_a_row_that_is_none_is_named(tmp_path, change):
    [row] = rows_of(LINES, "2026-01-02")
    (tmp_path / tried.FOLDER).mkdir(parents=True)
    (tmp_path / tried.FOLDER / "chip-a.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({**row, **change}) + "\n")
    with pytest.raises(evidence.Damaged, match=r"chip-a.jsonl:2"):
        tried.read(tmp_path)


def test_the_source_of_a_row_follows_the_function_that_a_kernel_is_given():
    """Which lies in a tuple of constants, of which the name alone would not tell that its text has changed."""
    how = how_of(exp2, 1, 0, torch.float32, False)
    assert "return libdevice.exp2(x)" in constant(how) and exp2.cache_key in how.cache_key
    assert len({tried.source(name) for name in table.FORMS}) > 90
