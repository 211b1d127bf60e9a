"""Files that serve every op name no argument or result of a single one: what they need to know of it, its declaration says."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.cases import SMALL, Net, draw
from tilewright.check.oracle import contract, outcome, specified
from tilewright.core.format import FIELDS
from tilewright.op import Op, Out

ROOT = Path(__file__).parents[2]
FOLDERS = ("core", "check", "runtime", "integrations/pytorch")
APART = ("tilewright/check/models.py",)  # a table by op: which facts of a model its arguments are
TESTS = ("conftest", "gpu/test_large", "gpu/test_properties", "host/test_properties", "interpreter/test_properties")
GENERIC = [
    *(p.relative_to(ROOT) for folder in FOLDERS for p in sorted((ROOT / "tilewright" / folder).glob("*.py"))),
    *(Path("tests", f"{name}.py") for name in TESTS),
    Path("tilewright", "op.py"),
]
# Words that mean something else, or belong to all ops: what, and in which files; "" is any
ALLOWED = {
    "out": ("memory for results, which every op takes", ("",)),
    "out_format": ("the format of the first result, which is declared as such by its name", ("",)),
    **dict.fromkeys(SMALL, ("a dimension that ops draw", ("check/", "core/draw.py", "gpu/"))),
    **dict.fromkeys(FIELDS, ("a tensor of a quantised value", ("core/format.py", "check/codes.py", "gpu/test_large.py"))),
    "block": ("what a scale's maximum is over", ("core/format.py", "check/properties.py")),
    "codes": ("a class of dtypes in rows", ("core/rule.py", "check/malformed.py")),
    "data": ("a tensor of a quantised value, and a folder", ("core/format.py", "check/", "runtime/config.py")),
    "dense": ("a layout", ("check/properties.py",)),
    "dtype": ("what a tensor has", ("",)),
    "format": ("what a quantised value has, and a kind of value in JSON", ("core/format.py", "check/model_run.py")),
    "glu": ("an op", ("gpu/test_large.py",)),
    "groups": ("a part of declarations", ("core/declaration.py", "check/families.py")),
    "main_grad": ("the buffer of `<op>_main_grad`, whatever the op", ("runtime/accumulate.py",)),
    "scale": (
        "a tensor of a quantised value, and a class of dtypes in rows",
        ("core/format.py", "core/rule.py", "gpu/test_large.py"),
    ),
    "source": ("what kernels are made from, in a kept outcome", ("check/model_run.py",)),
    "tensors": ("any word in the place of a list", ("check/malformed.py",)),
    "transposed": ("a layout", ("check/layouts.py",)),
}  # fmt: skip


def arguments() -> dict[str, list[str]]:
    """The ops that have an argument or a result of this name."""
    found: dict[str, list[str]] = {}
    for name, op in sorted(tw.catalogue().items()):
        for word in {*op.signature.names, *op.results}:
            found.setdefault(word, []).append(name)
    return found


def words(text: str) -> dict[str, int]:
    """The string literals of a source text, with a line of each."""
    nodes = ast.walk(ast.parse(text))
    return {n.value: n.lineno for n in nodes if isinstance(n, ast.Constant) and isinstance(n.value, str)}


def allowed(word: str, file: Path) -> bool:
    return any(part in file.as_posix() for part in ALLOWED.get(word, ("", ()))[1])


@pytest.mark.parametrize("file", [p for p in GENERIC if p.as_posix() not in APART], ids=str)
def test_no_argument_of_a_single_op_is_named(file):
    known = arguments()
    wrong = {w: at for w, at in words((ROOT / file).read_text()).items() if w in known and not allowed(w, file)}
    assert not wrong, "\n".join(
        f"{file}:{at} names {word!r}, an argument or a result of {', '.join(known[word])}: let their declarations say it"
        for word, at in wrong.items()
    )


def test_words_are_found_where_arguments_are_read():
    text = 'def run(values):\n    """Nothing of labels."""\n    return values["reduction"] == "mean" and values.get("counts")\n'
    assert {"reduction": 3, "counts": 3}.items() <= words(text).items() and "labels" not in words(text)
    assert {"reduction", "counts", "offsets"} <= arguments().keys()
    assert not any(allowed(word, Path("tilewright/check/oracle.py")) for word in ("reduction", "counts", "offsets"))


# ---------------------------------------------------------------- what a declaration says of rows that are there


def test_dimensions_of_which_a_part_is_there_are_those_of_results():
    saying = [op for op in tw.catalogue().values() if op.out.live]
    for op in saying:
        rows = op.rows(draw(op, Net(), full=True).values).values()
        known = {dim for row in rows for dim in (*row.dims, *(("...",) if row.leading else ()))}
        assert {*op.out.live} <= known, op.name
    assert saying


def same(x: Tensor) -> Tensor:
    """x."""
    return x


def test_an_unknown_word_of_what_is_there_is_refused():
    rows = {"where": {"x": "float[rows hidden]"}, "results": {"y": "x[rows hidden]"}}
    with pytest.raises(ValueError, match=r"out\.live names ends, which is neither"):
        Op("never_declared", same, dict, **rows, out=Out(live={"rows": "ends"}))


def cuts(name: str, **given: Any) -> dict[str, tuple[Tensor, Tensor]]:
    """(all of a result or gradient, what is specified of it) by name."""
    op = tw.catalogue()[name]
    values = op.signature.bind((), given)
    made = outcome(op, values)
    agreed = contract(op, values, made)
    return {n: (t, specified(agreed, n, t)) for n, t in made.items()}


def test_rows_past_the_last_group_are_not_specified():
    x, ends = torch.randn(300, 160), torch.tensor([3, 130])
    plain = cuts("glu", x=x, offsets=ends, scale=torch.ones(300))
    assert {n: tuple(part.shape) for n, (_, part) in plain.items()} == {
        "out": (130, 80), "d_x": (130, 160), "d_scale": (130,),
    }  # fmt: skip
    for fmt, scales in {
        tw.fp8("1x128", ways="both"): ((1, 130), (2, 80)),  # one block of rows in each group
        tw.fp8("128x128", ways="both"): ((2, 1), (1, 2)),
        tw.fp8("row", ways="both"): ((130,), (2, 80)),
        tw.fp8("tensor", ways="both"): ((1,), (1,)),
    }.items():
        coded = cuts("glu", x=x, offsets=ends, out_format=fmt)
        shapes = {n: tuple(part.shape) for n, (_, part) in coded.items() if n.startswith("out")}
        wanted = ((130, 80), scales[0], (80, 130), scales[1])
        assert shapes == dict(zip((f"out.{n}" for n in fmt.tensor_names), wanted)), fmt
    for whole, part in cuts("glu", x=x).values():
        assert part is whole


def test_groups_may_be_a_result():
    routing = torch.tensor([[0, 1], [1, -1], [1, 0]])
    found = cuts("moe_permute", x=torch.randn(3, 8), routing=routing, experts=2, align=4)
    (ends, _), (rows, live) = found["offsets"], found["rows"]
    assert live.shape[0] == int(ends[-1]) == 8 < rows.shape[0]
    assert {n for n, (whole, part) in found.items() if part.shape != whole.shape} == {"rows", "row_probs", "source"}


def test_groups_may_have_counts():
    counts = torch.tensor([2, 0, 3])
    a, b = torch.randn(3, 4, 8, dtype=torch.bfloat16), torch.randn(3, 8, 5, dtype=torch.bfloat16)
    whole, part = cuts("grouped_mm_masked", a=a, b=b, counts=counts)["out"]
    there = torch.arange(4) < counts[:, None]
    assert torch.equal(part[there], whole[there]) and not bool(part[~there].any()) and part.shape == whole.shape
