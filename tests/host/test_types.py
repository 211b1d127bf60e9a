"""What an op's arguments can be beside tensors, numbers and formats, and how their sizes broadcast: toy ops with such arguments."""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilewright.check import malformed
from tilewright.core.cost import traffic
from tilewright.core.rule import INTEGERS, Row, dtypes_of
from tilewright.core.signature import at_least
from tilewright.op import OPS, Gradient, Op, Triton

_count = itertools.count()


@pytest.fixture
def declare():
    made = []

    def one(reference, **said):
        name = f"types_toy{next(_count)}"
        made.append(name)
        return Op(name, reference, dict, Triton(reference), **said)

    yield one
    for name in made:
        OPS.pop(name, None)


def reference(
    x: Tensor,
    sizes: list[int],
    flags: list[bool] = (True, False),
    scales: list[float] | None = None,
    window: tuple[int, int] = (1, 2),
    pads: tuple[float, float] | None = None,
    dtype: torch.dtype = torch.float64,
    inner: torch.dtype | None = None,
    alpha: int | float = 1,
    *,
    generator: torch.Generator | None = None,
) -> Tensor:
    """x times all numbers, in `dtype`. It takes only what a declaration promises."""
    assert type(sizes) is list and type(flags) is list and type(window) is tuple and type(dtype) is torch.dtype
    assert scales is None or type(scales) is list
    assert pads is None or type(pads) is tuple
    y = x if inner is None else x.to(inner)
    y = y * (sum(sizes) + sum(flags) + window[0] - window[1]) * (7 if type(alpha) is int else 11) * alpha
    y = y * sum(scales or [1.0]) + sum(pads or (0.0,))
    if generator is not None:
        y = y + torch.rand(x.shape, generator=generator, device=x.device)
    return y.to(dtype)


WHERE = {"x": "float[... n]", "sizes": at_least(0), "pads": at_least(-2.0), "alpha": at_least(0)}
RESULTS = {"y": "dtype[... n]"}
CALLS = (
    {"sizes": [2, 3]},
    {"sizes": (2, 3), "flags": [], "alpha": 1.0},
    {"sizes": [], "flags": [True], "scales": [0.5, 2], "window": (5, -1), "pads": (1.0, 2.0)},
    {"sizes": torch.Size([4]), "dtype": torch.float32, "inner": torch.float16, "alpha": 2, "window": [0, 0]},
)


@pytest.fixture
def toy(declare):
    return declare(reference, where=WHERE, results=RESULTS, gradient=Gradient(of=("x",)))


def example() -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(0))


def told(call: dict) -> dict:
    """A call as the reference is to see it."""
    made = {n: list(v) if n in ("sizes", "flags", "scales") else v for n, v in call.items()}
    made.setdefault("flags", [True, False])
    return {**made, "window": tuple(made.get("window", (1, 2)))}


def test_the_schema_has_every_type(toy, declare):
    schema = str(toy.overloads["default"]._schema)
    for words in (
        "int[] sizes,", "bool[] flags=[True, False],", "float[]? scales=None,", "int[2] window=[1, 2],", "float[2]? pads=None,",
        "ScalarType dtype=7,", "ScalarType? inner=None,", "Scalar alpha=1,", "Generator? generator=None)",
    ):  # fmt: skip
        assert words in schema, schema

    def unwritable(
        x: Tensor,
        a: float = 1.0,
        b: tuple[int, int] | None = (1, 2),
        c: int | float = 2.5,
        d: float = float("-inf"),
        e: int = 3,
    ) -> Tensor:
        return x + (a if b is None else sum(b)) * c + e

    op = declare(unwritable, where={"x": "float[n]"}, results={"y": "x[n]"})
    assert "float a, int[2]? b, Scalar c, float d, int e=3)" in str(op.overloads["default"]._schema)
    x = torch.zeros(2)
    with pytest.raises(ValueError, match=r"d must be finite"):
        op(x)
    torch.testing.assert_close(op(x, d=0.0), x + 10.5)
    torch.testing.assert_close(op(x, 1.0, None, 2, 0.0), x + 5)


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_eager_registered_compiled_and_fake_calls_agree(toy, call):
    x = example()
    expected = reference(x, **told(call))
    torch.testing.assert_close(toy(x, **call), expected, rtol=0, atol=0)
    torch.testing.assert_close(toy.overloads["default"](x, **call), expected, rtol=0, atol=0)
    out = torch.empty_like(expected)
    assert toy(x, **call, out=out) is out
    torch.testing.assert_close(out, expected, rtol=0, atol=0)

    torch._dynamo.reset()
    compiled = torch.compile(lambda t: toy(t, **call), fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), expected, rtol=0, atol=0)
    with FakeTensorMode() as mode:
        fake = toy(mode.from_tensor(x), **call)
        assert (fake.shape, fake.dtype) == (expected.shape, expected.dtype)
    values = toy.signature.bind((x,), call)
    assert toy.expected(values)["y"] == (expected.shape, expected.dtype)
    assert traffic(toy, values) == (x.nbytes, expected.nbytes)


@pytest.mark.parametrize("call", CALLS, ids=range(len(CALLS)))
def test_gradients(toy, call):
    """Torch hands a registered op's backward a dtype that was left out as an integer."""
    x = example().requires_grad_()
    expected = torch.autograd.grad(reference(x, **told(call)).sum(), x)[0]
    torch._dynamo.reset()
    for function in (
        toy.function,
        toy.overloads["default"],
        torch.compile(toy.function, fullgraph=True, backend="aot_eager"),
    ):
        torch.testing.assert_close(torch.autograd.grad(function(x, **call).sum(), x)[0], expected, rtol=0, atol=0)


def test_a_caller_may_change_a_list_afterwards(toy):
    sizes = [2, 3]
    values = toy.signature.bind((example(), sizes), {})
    sizes.append(9)
    assert values["sizes"] == [2, 3]


def test_generators(toy):
    x = example()
    source = [torch.Generator().manual_seed(3) for _ in range(4)]
    expected = reference(x, [1], [True], generator=source[0])
    call = {"sizes": [1], "flags": [True]}
    torch.testing.assert_close(toy(x, **call, generator=source[1]), expected, rtol=0, atol=0)
    torch.testing.assert_close(toy.overloads["default"](x, **call, generator=source[2]), expected, rtol=0, atol=0)
    out = torch.empty_like(expected)
    state = source[3].get_state()
    with FakeTensorMode() as mode:
        fake = toy(mode.from_tensor(x), **call, generator=source[3])
    assert fake.shape == x.shape and torch.equal(source[3].get_state(), state), "a fake draws no numbers"
    toy(x, **call, generator=source[3], out=out)
    torch.testing.assert_close(out, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("sizes must be a list of int, got int", {"sizes": 3}),
        ("sizes must be given, got None", {"sizes": None}),
        ("sizes[1] must be int, got bool", {"sizes": [1, True]}),
        ("sizes[0] must be int, got float", {"sizes": [1.0]}),
        ("sizes[1] must be >= 0, got -1", {"sizes": [0, -1]}),
        ("flags[0] must be bool, got int", {"flags": [1]}),
        ("scales[1] must be float, got str", {"scales": [1, "2"]}),
        ("scales[0] must be finite, got nan", {"scales": [float("nan")]}),
        ("window must be a tuple of 2 int, got 3", {"window": (1, 2, 3)}),
        ("window must be a tuple of 2 int, got int", {"window": 1}),
        ("window[1] must be int, got NoneType", {"window": (1, None)}),
        ("pads[0] must be float, got bool", {"pads": (True, 1.0)}),
        ("pads[1] must be >= -2, got -3", {"pads": (0, -3)}),
        ("dtype must be torch.dtype, got str", {"dtype": "float32"}),
        ("dtype must be torch.dtype, got int", {"dtype": 7}),
        ("dtype must be given, got None", {"dtype": None}),
        ("inner must be torch.dtype, got type", {"inner": float}),
        ("alpha must be int | float, got bool", {"alpha": True}),
        ("alpha must be finite, got inf", {"alpha": float("inf")}),
        ("generator must be torch.Generator, got int", {"generator": 3}),
    ],
)
def test_refusals_name_the_argument(toy, words, call):
    with pytest.raises((TypeError, ValueError), match=re.escape(words)) as caught:
        toy(example(), **{"sizes": [1], **call})
    assert "\n" not in str(caught.value)


def refused(op: Op, values: dict) -> set[str]:
    """Every malformed call of an op is refused by name; gives what was wrong with them."""
    seen = set()
    for bad in malformed.calls(op, op.signature.bind((), values)):
        with pytest.raises((TypeError, ValueError)) as caught:
            op(*bad.args, **bad.kwargs)
        assert any(re.search(rf"\b{re.escape(n)}\b", str(caught.value)) for n in bad.names), (bad.what, caught.value)
        seen.add(bad.what)
    return seen


def test_malformed_calls(toy):
    seen = refused(toy, {"x": example(), "sizes": [1, 2], "pads": (1.0, 2.0), "inner": torch.float32})
    assert {
        "sizes: a truth value at 1", "sizes: a fraction at 0", "sizes: a str", "sizes: None", "flags: a number at 0",
        "scales: a string at 0", "window: one more", "window: one fewer", "window: none", "pads: nan at 1", "pads: -1e+30 at 0",
        "dtype: 'float32'", "dtype: None", "dtype: a generator", "inner: 6", "alpha: a truth value", "alpha: 1j", "alpha: -1.0",
        "generator: a dtype", "generator: 6",
    } <= seen  # fmt: skip


def test_types_that_no_argument_has(declare):
    def mixed(x: Tensor, a: tuple[int, float]) -> Tensor: ...
    def endless(x: Tensor, a: tuple[int, ...]) -> Tensor: ...
    def words(x: Tensor, a: list[str]) -> Tensor: ...
    def either(x: Tensor, a: int | str) -> Tensor: ...

    for function in (mixed, endless, words, either):
        with pytest.raises(TypeError, match="an op's argument"):
            declare(function, where={"x": "float[n]"}, results={"y": "x[n]"})


# ---------------------------------------------------------------- dtypes


def test_classes_of_dtypes(declare):
    def first(x: Tensor, mask: Tensor, either: Tensor) -> Tensor:
        return x + mask + either

    where = {"x": "integer[n]", "mask": "integer_or_bool[n]", "either": "float|int32[n]"}
    op = declare(first, where=where, results={"y": "either[n]"})
    ones = torch.ones(2)
    for dtype in INTEGERS:
        assert op(ones.to(dtype), ones.bool(), ones).dtype == torch.float32
        op(ones.to(dtype), ones.to(dtype), ones.half())
    for words, *bad in (
        ("x must be uint8 or int8 or int16 or int32 or int64, got bool", ones.bool(), ones.bool(), ones),
        ("mask must be uint8 or int8 or int16 or int32 or int64 or bool, got float32", ones.int(), ones, ones),
        (
            "either must be bfloat16 or float16 or float32 or float64 or int32, got int64",
            ones.int(),
            ones.int(),
            ones.long(),
        ),
    ):
        with pytest.raises(TypeError, match=words):
            op(*bad)
    seen = refused(op, {"x": ones.int(), "mask": ones.bool(), "either": ones})
    assert {"x: booleans", "x: floats", "mask: floats", "either: integers", "either: booleans"} <= seen
    assert not {"x: int8", "mask: booleans", "mask: int8"} & seen


def test_rows_are_parsed_strictly(declare):
    row = Row.parse("float|int32[...?, heads?, 4?, n+?]")
    assert row == Row(
        "float|int32", ("heads", "4", "n"), False, frozenset({"n"}), loose=frozenset({0, 1, 2}), spread=True
    )
    assert row.words == "float|int32[...?, heads?, 4?, n?]" and Row.parse("x[... n]").words == "x[..., n]"
    for text in (
        "float",
        "float[n",
        "float|[n]",
        "|float[n]",
        "float[n ...]",
        "float[n??]",
        "float[n!]",
        "float[?]",
        "float[....]",
    ):
        with pytest.raises(ValueError, match=r"^where: "):
            Row.parse(text)
    for text in ("flot", "float|x", "float|any", "Tensor"):
        with pytest.raises(ValueError, match=r"^where: "):
            dtypes_of(text)

    def plain(x: Tensor, y: list[Tensor]) -> Tensor: ...

    for words, x, y, result in (
        ("flot", "flot[n]", "float[n]", "x[n]"),
        ("y is a list", "float[n]", "float[n?]", "x[n]"),
        ("the result", "float[n]", "float[n]", "x[n?]"),
        ("the result", "float[n]", "float[n]", "float16|float32[n]"),
    ):
        with pytest.raises(ValueError, match=words):
            declare(plain, where={"x": x, "y": y}, results={"z": result})


# ---------------------------------------------------------------- broadcasting


def test_dimensions_that_broadcast(declare):
    def product(q: Tensor, k: Tensor, g: Tensor | None = None) -> Tensor:
        return q * k if g is None else q * k * g

    where = {"q": "float[b heads? d]", "k": "float[b heads? d]", "g": "float[heads? 1]"}
    op = declare(product, where=where, results={"y": "q[b heads d]"}, gradient=Gradient(of=("q", "k", "g")))
    for mine, other, third in itertools.product((1, 4), (1, 4), (None, 1, 4)):
        values = {"q": torch.randn(2, mine, 3), "k": torch.randn(2, other, 3)}
        values["g"] = None if third is None else torch.randn(third, 1)
        expected = product(**values)
        torch.testing.assert_close(op(**values), expected)
        torch.testing.assert_close(op(**values, out=torch.empty_like(expected)), expected)
        assert op.expected(op.signature.bind((), values))["y"][0] == expected.shape
        torch._dynamo.reset()
        compiled = torch.compile(op.function, fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(**values), expected)
        refused(op, values)
    for words, *shapes in (
        ("k is float32[2, 3, 3], but heads must be 4 or 1, as in q", (2, 4, 3), (2, 3, 3)),
        ("k is float32[2, 0, 3], but heads must be 4 or 1, as in q", (2, 4, 3), (2, 0, 3)),
        ("g is float32[5, 1], but heads must be 4 or 1, as in k", (2, 1, 3), (2, 4, 3), (5, 1)),
        ("k is float32[2, 4, 5], but d must be 3, as in q", (2, 4, 3), (2, 4, 5)),
    ):
        with pytest.raises(ValueError, match=re.escape(words)):
            op(*map(torch.zeros, shapes))


def test_a_plain_dimension_is_not_broadcast(declare):
    def after(x: Tensor, bias: Tensor) -> Tensor:
        return x + bias

    def before(bias: Tensor, x: Tensor) -> Tensor:
        return x + bias

    for function in (after, before):
        op = declare(function, where={"x": "float[m n]", "bias": "float[m? n?]"}, results={"y": "x[m n]"})
        for shape in ((2, 3), (1, 3), (2, 1), (1, 1)):
            assert op(x=torch.zeros(2, 3), bias=torch.zeros(shape)).shape == (2, 3)
            assert refused(op, {"x": torch.zeros(2, 3), "bias": torch.zeros(shape)}) >= {
                "bias: 3 m",
                "bias: 4 n",
                "bias: 0 n",
            }
        with pytest.raises(ValueError, match="bias"):
            op(x=torch.zeros(1, 3), bias=torch.zeros(2, 3))


def test_leading_dimensions_that_broadcast(declare):
    def add(bias: Tensor, x: Tensor) -> Tensor:
        return x + bias

    op = declare(add, where={"bias": "float[...? n]", "x": "float[... n]"}, results={"y": "x[... n]"})
    x = torch.randn(2, 5, 3)
    for shape in ((3,), (5, 3), (1, 3), (2, 1, 3), (1, 1, 3), (2, 5, 3)):
        bias = torch.randn(shape)
        torch.testing.assert_close(op(bias, x), x + bias)
        assert op.expected(op.signature.bind((bias, x), {}))["y"][0] == x.shape
        seen = refused(op, {"bias": bias, "x": x})
        assert {"bias: a leading dimension more", "bias: leading dimensions that do not broadcast"} <= seen
    with pytest.raises(ValueError, match=re.escape("but its leading dimensions must broadcast to [5] as in x")):
        op(torch.zeros(2, 5, 3), torch.zeros(5, 3))

    both = declare(add, where={"bias": "float[...?]", "x": "float[...?]"}, results={"y": "x[...]"})
    assert both(torch.zeros(4, 1), torch.zeros(3)).shape == (4, 3)
    assert both(torch.zeros(4, 1), torch.zeros(3), out=torch.ones(4, 3)).sum() == 0
    with FakeTensorMode():
        assert both(torch.zeros(4, 1), torch.zeros(3)).shape == (4, 3)
    with pytest.raises(
        ValueError, match=re.escape("x is float32[2], but its leading dimensions must broadcast with [4, 3]")
    ):
        both(torch.zeros(4, 3), torch.zeros(2))
