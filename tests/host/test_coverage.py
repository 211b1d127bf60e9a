"""Every row of the coverage lists that is there: its call is run, and is the call that the row says."""

from __future__ import annotations

import ast
import functools
import inspect
import json

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.check import coverage
from tilewright.check.provided import rows as provided
from tilewright.op import Op

LISTS = coverage.everything()
THERE = [(name, row) for name, rows in LISTS.items() for row in rows if row["status"] != "missing"]
HEAD = "name\tprovided_by\tstatus\tnote\n"


def identity(value: object) -> str:
    return value["name"] if isinstance(value, dict) else str(value)


def test_rows_and_checks_belong_together():
    assert not coverage.unchecked(LISTS, provided.CHECKS)


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        ({"a": {}}, "nothing checks 'one'"),
        ({"a": {"one": print, "two": print}}, "'two' is checked"),
        ({"a": {"one": print}, "b": {}}, "no list 'b'"),
    ],
)
def test_a_row_without_its_check_is_noticed(checks, said):
    lists = {"a": [{"name": "one", "status": "native"}, {"name": "two", "status": "missing"}]}
    assert [line for line in coverage.unchecked(lists, checks) if said in line]


@pytest.mark.parametrize(("name", "row"), THERE, ids=identity)
def test_the_call_behind_a_row(name, row, monkeypatch):
    """Its result is right, and the ops that the text calls were called with the arguments that the text gives."""
    for extra in tw.EXTRAS:
        if row["provided_by"].startswith(f"{extra}."):
            pytest.importorskip(extra)
    made: list[tuple[str, dict]] = []
    validate, backward = Op.validate, Op.run_backward

    def watched(self, values):
        made.append((self.name, dict(values)))
        return validate(self, values)

    def watched_backward(self, values, results, grads, needs, **extra):
        made.append((self.name, {**values, **extra}))
        return backward(self, values, results, grads, needs, **extra)

    monkeypatch.setattr(Op, "validate", watched)
    monkeypatch.setattr(Op, "run_backward", watched_backward)
    packed = [(one, watch(monkeypatch, root(one))) for one in packed_calls(row["provided_by"])]
    provided.CHECKS[name][row["name"]]("cpu")
    for one, calls in packed:
        assert any(is_this(one, values) for values in calls), f"{ast.unparse(one)}: no such call among {len(calls)}"
    for op, positional, options in calls_in(row["provided_by"]):
        fits = [values for called, values in made if called == op and given(op, values, positional, options)]
        assert fits, f"{row['provided_by']}: no such call among {[called for called, _ in made]}"


def calls_in(text: str) -> list[tuple[str, int | None, dict[str, ast.expr]]]:
    """(op, how many positional arguments, arguments by keyword) of the calls of ops that a row names."""
    found = []
    for part in text.split("; "):
        if part.startswith("tilewright "):
            assert part.split()[1] in {command.name for command in app.registered_commands}, f"{part}: no such command"
            continue
        tree = ast.parse(part, mode="eval").body
        assert hasattr(tw, root(tree)), f"{part}: tilewright has no {root(tree)}"
        if isinstance(tree, ast.Call) and root(tree) in tw.catalogue() and not packs(root(tree)):
            # glu.op.run_backward(...): its positional arguments are not the op's
            count = None if isinstance(tree.func, ast.Attribute) else len(tree.args)
            found.append((root(tree), count, {k.arg: k.value for k in tree.keywords}))
    return found


def packs(name: str) -> bool:
    """Whether this is a function that takes quantised values apart for an op of flat tensors."""
    op = getattr(getattr(tw, name), "op", None)
    return op is not None and op.function is not getattr(tw, name)


def packed_calls(text: str) -> list[ast.Call]:
    trees = [ast.parse(part, mode="eval").body for part in text.split("; ") if not part.startswith("tilewright ")]
    return [tree for tree in trees if isinstance(tree, ast.Call) and packs(root(tree))]


def watch(monkeypatch, name: str) -> list[dict]:
    """The arguments of the calls of a public function from now on."""
    function, calls = getattr(tw, name), []
    shape = inspect.signature(getattr(function, "__wrapped__", function))

    @functools.wraps(function)
    def watched(*args, **kwargs):
        calls.append(dict(shape.bind(*args, **kwargs).arguments))
        return function(*args, **kwargs)

    monkeypatch.setattr(tw, name, watched)
    return calls


def is_this(tree: ast.Call, values: dict) -> bool:
    """Whether a call had these arguments and no others, literals of these values and quantised ones of these formats."""
    named = {k.arg: k.value for k in tree.keywords}
    told = {**dict(zip(values, tree.args)), **named}
    if told.keys() != values.keys() or list(values)[len(tree.args) :] != list(named):
        return False
    for name, part in told.items():
        if isinstance(part, ast.Constant) and values[name] != part.value:
            return False
        forms = [one for one in ast.walk(part) if isinstance(one, ast.Call) and isinstance(one.func, ast.Name)]
        forms = [one for one in forms if one.func.id != "quantize"]
        if not all(word in str(values[name].format) for one in forms for word in format_words(one)):
            return False
    return True


def root(tree: ast.expr) -> str:
    while not isinstance(tree, ast.Name):
        tree = tree.func if isinstance(tree, ast.Call) else tree.value
    return tree.id


def given(op: str, values: dict, positional: int | None, options: dict[str, ast.expr]) -> bool:
    """Whether a call had what the text has: these arguments and no others, literals and formats of these words."""
    defaults = tw.catalogue()[op].signature.defaults
    names = {*list(defaults)[: positional or 0], *options}
    if any(values.get(name) is None for name in names):
        return False
    rest = {n: v for n, v in values.items() if n not in names and n not in ("eps", "out")}
    if positional is not None and any(isinstance(v, torch.Tensor) or v != defaults[n] for n, v in rest.items()):
        return False
    for name, tree in options.items():
        if isinstance(tree, ast.Constant) and values[name] != tree.value:
            return False
        if isinstance(tree, ast.Call) and not all(word in str(values[name]) for word in format_words(tree)):
            return False
    return True


def format_words(tree: ast.Call) -> list[str]:
    """What the canonical string of `fp8(...)` must hold."""
    words = [root(tree), *(a.value for a in tree.args)]
    for keyword in tree.keywords:
        literal = getattr(keyword.value, "value", None)
        words.append({"scale": literal or "static", "pow2": "pow2" if literal else "fp32"}.get(keyword.arg, literal))
    return words


def test_the_calls_of_a_text_are_understood():
    """The test above is worth what this reading of the text is worth."""
    [(op, count, options)] = calls_in('glu(x, act="relu", out_format=fp8("tensor", scale=s))')
    assert (op, count, format_words(options["out_format"])) == ("glu", 1, ["fp8", "tensor", "static"])
    values = {"x": 1, "act": "relu", "out_format": "fp8:e4m3:tensor:row:pow2:te:static"}
    assert given(op, values, count, options)
    assert not given(op, {**values, "act": "silu"}, count, options)
    assert not given(op, {**values, "limit": 3.0}, count, options)
    assert not given(op, {**values, "out_format": None}, count, options)
    assert not given(op, {**values, "out_format": "fp8:e4m3:tensor:row:pow2:te:unit"}, count, options)
    with pytest.raises(AssertionError, match="no such command"):
        calls_in("tilewright nonsense")
    with pytest.raises(AssertionError, match="no nonsense"):
        calls_in("nonsense(x)")


def test_the_calls_of_functions_that_pack_are_understood(monkeypatch):
    [tree] = packed_calls('scaled_mm(quantize(x, int8("row")), quantize(w, int8("128x128")).t(), act="silu")')
    calls = watch(monkeypatch, "scaled_mm")
    x = torch.ones(4, 8)
    row, block, other = (tw.quantize(x, form) for form in (tw.int8("row"), tw.int8("128x128"), tw.fp8("128x128")))
    for a, b, options in (
        (row, block, {"act": "silu"}), (row, block, {"act": "relu"}), (row, row, {"act": "silu"}),
        (row, block, {}), (row, block, {"act": "silu", "beta": 0.0}),
    ):  # fmt: skip
        tw.scaled_mm(a, b.t(), **options)
    assert [is_this(tree, one) for one in calls] == [True, False, False, False, False]
    assert not is_this(tree, {**calls[0], "b": other})


def test_wrong_products_are_noticed(monkeypatch):
    """One per cent off, or with the scale of a block for that of another."""
    checks, multiply = provided.CHECKS["gn_kernels"], tw.scaled_mm

    def shifted(a, b, **options):
        a.scale.copy_(a.scale.roll(1, -1 if a.format.name == "mx" else 0))
        return multiply(a, b, **options)

    monkeypatch.setattr(tw, "scaled_mm", shifted)
    for name in ("tile-scaled matmul INT8", "MXFP4 matmul"):
        with pytest.raises(AssertionError):
            checks[name]("cpu")
    monkeypatch.setattr(tw, "scaled_mm", lambda *args, **options: multiply(*args, **options) * 1.01)
    for name in ("rowwise-scaled matmul INT8", "NVFP4 matmul"):
        with pytest.raises(AssertionError):
            checks[name]("cpu")


def test_wrong_results_are_noticed(monkeypatch):
    """A code one step off, a scale of twice the size and a value off in its last bit each fail a check."""
    quantize, norm = tw.quantize, tw.rms_norm

    def spoiled(part):
        def call(*args, **kwargs):
            q = quantize(*args, **kwargs)
            if part == "code":
                q.data.view(torch.uint8)[3, 5] += 1
            else:
                q.scale.mul_(2.0)
            return q

        return call

    for part in ("code", "scale"):
        monkeypatch.setattr(tw, "quantize", spoiled(part))
        with pytest.raises(AssertionError, match=part):
            provided.CHECKS["flashrt"]["quantize_fp8"]("cpu")
    monkeypatch.setattr(tw, "rms_norm", lambda *args, **kwargs: norm(*args, **kwargs) * 1.01)
    with pytest.raises(AssertionError):
        provided.CHECKS["flashrt"]["rms_norm"]("cpu")


def swapped(cache_write):
    """A write of each token into the slot of another."""
    return lambda k, v, k_cache, v_cache, slots: cache_write(k, v, k_cache, v_cache, slots.flip(0))


def spread(function):
    """Results that are off by one per cent."""

    def wrong(*args, **kwargs):
        made = function(*args, **kwargs)
        return tuple(t * 1.01 for t in made) if isinstance(made, tuple) else made * 1.01

    return wrong


@pytest.mark.parametrize(
    ("op", "wrong"),
    [
        ("cache_write", swapped), ("sparse_mm", spread), ("rwkv_keys", spread), ("rope_one", spread), ("outer", spread),
        ("instance_norm", spread),
    ],
)  # fmt: skip
def test_wrong_fused_operators_are_noticed(op, wrong, monkeypatch):
    monkeypatch.setattr(tw, op, wrong(getattr(tw, op)))
    with pytest.raises(AssertionError):
        provided.CHECKS["flaggems_features"]["fused operators"]("cpu")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name\tstatus\n", "first columns"),
        (HEAD + "a\tf(x)\tnative\n", ":2 has 3 columns"),
        (HEAD + "a\tf(x)\tperhaps\t\n", "'perhaps'"),
        (HEAD + "a\tf(x)\tmissing\t\n", ":2: a row names"),
        (HEAD + "a\t\tnative\t\n", ":2: a row names"),
        (HEAD + "a\t\tmissing\t\nb\t\tmissing\t\na\t\tmissing\t\n", "'a' stands there twice"),
    ],
)
def test_a_malformed_list_says_where(tmp_path, text, said):
    path = tmp_path / "list.tsv"
    path.write_text(text)
    with pytest.raises(ValueError, match="list.tsv") as error:
        coverage.read(path)
    assert said in str(error.value)


def test_the_command_gives_every_row():
    result = CliRunner().invoke(app, ["coverage", "--json"])
    found = json.loads(result.stdout)
    assert result.exit_code == 0 and list(found) == list(coverage.LISTS)
    assert {name: len(rows) for name, rows in found.items()} == {
        "training": 17, "training_more": 18, "flashrt": 92, "gn_kernels": 15, "aten": 288, "flaggems_features": 9,
        "linghe_more": 9,
    }  # fmt: skip
    assert all(list(row)[:4] == list(coverage.FIELDS) for rows in found.values() for row in rows)
    result = CliRunner().invoke(app, ["coverage", "training"])
    assert result.exit_code == 0 and all(row["name"] in result.stdout for row in found["training"])
    assert "GemmRunner" not in result.stdout


def test_an_unknown_list_is_one_line():
    result = CliRunner().invoke(app, ["coverage", "trainin"])
    assert result.exit_code == 2 and result.stdout == "" and result.stderr.count("\n") == 1
    assert "training" in result.stderr
