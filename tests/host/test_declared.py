"""All that follows from one declaration (tests/remember.py): the public function, memory for results, an argument that is written,
the registered op and its fake, the gradient, the rule for ranks, the page, refused calls, the source that evidence goes by."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import tilewright as tw
from tests.remember import in_catalogue, remember
from tilewright.bench import documents
from tilewright.check import malformed
from tilewright.check.oracle import same_bits
from tilewright.check.variants import Call, launches
from tilewright.runtime.source import hashed


@pytest.fixture(autouse=True)
def _declared():
    with in_catalogue():
        yield


def arguments(tokens: int = 4, hidden: int = 32, wide: bool = True) -> dict:
    source = torch.Generator().manual_seed(tokens + hidden)
    x = torch.randn(tokens, hidden, generator=source)
    return {"x": x, "gain": torch.randn(hidden if wide else 1, generator=source), "cache": torch.zeros(3, hidden)}


def test_the_public_function_shows_what_it_gives_and_takes():
    shown = inspect.signature(remember.function)
    assert [*shown.parameters] == ["x", "gain", "cache", "slot", "out_format", "out"]
    assert shown.return_annotation == "tuple[Tensor, Tensor]"
    assert shown.parameters["out"].annotation == "tuple[Tensor | Quantized | None, Tensor | None] | None"
    assert tw.remember is remember.function


@pytest.mark.parametrize("wide", [True, False])
def test_results_and_what_is_written(wide):
    a = arguments(wide=wide)
    y, total = remember(**a, slot=1)
    same_bits("y", y, a["x"] * a["gain"])
    same_bits("total", total, (a["x"] * a["gain"]).sum(-1))
    same_bits("cache", a["cache"], torch.stack([torch.zeros(32), a["x"].sum(0), torch.zeros(32)]))


def test_shapes_and_dtypes_are_known_beforehand():
    a = arguments(wide=False)
    said = remember.expected(remember.signature.bind((), a))
    assert said == {"y": (torch.Size([4, 32]), torch.float32), "total": (torch.Size([4]), torch.float32)}


def test_memory_for_all_results_or_some():
    a = arguments()
    y, total = remember(**a)
    for outs in ((torch.empty(4, 32), torch.empty(4)), (None, torch.empty(4)), (torch.empty(32, 4).t(), None)):
        made = remember(**a, out=outs)
        for out, found, wanted in zip(outs, made, (y, total)):
            assert out is None or found is out
            same_bits("with out", found, wanted)


def test_a_result_in_four_bits_into_memory():
    a = arguments(tokens=16, hidden=64)
    fmt = tw.nvfp4()
    expected, total = remember(**a, out_format=fmt)
    out = fmt.empty((16, 64), torch.float32, "cpu")
    made, again = remember(**a, out_format=fmt, out=(out, None))
    assert made is out
    for found, wanted in zip(out.tensors(), expected.tensors()):
        same_bits("nvfp4", found.view(torch.uint8), wanted.view(torch.uint8))
    same_bits("total", again, total)


def test_versions_move_and_shared_memory_is_refused():
    a = arguments()
    before = a["cache"]._version
    remember(**a)
    assert a["cache"]._version > before
    shared = torch.zeros(7, 32)
    for change, named in (
        ({"cache": shared[:3], "x": shared[2:6]}, "cache"),
        ({"cache": torch.zeros(1, 32).expand(3, 32)}, "cache"),
        ({"cache": shared[:3], "out": (shared[2:6], None)}, "cache"),
        ({"cache": a["cache"].clone().requires_grad_()}, "cache"),
    ):
        kept = {n: t.detach().clone() for n, t in change.items() if isinstance(t, torch.Tensor)}
        with pytest.raises((ValueError, RuntimeError), match=named):
            remember(**{**a, **change})
        for n, t in kept.items():
            same_bits(f"{n} is as it was", change[n].detach(), t)


def test_the_gradient_leaves_out_what_is_written():
    a = arguments()
    x = a["x"].requires_grad_()
    y, total = remember(x, a["gain"], a["cache"])
    (dx,) = torch.autograd.grad([y, total], x, [torch.ones_like(y), 2 * torch.ones_like(total)])
    same_bits("dx", dx, 3 * a["gain"].expand(4, 32))
    assert float(a["cache"][0].abs().sum()) > 0


def test_registered_schema_says_what_is_written_and_where_results_go():
    schema = str(torch.ops.tilewright.remember.default._schema)
    assert "Tensor(z!) cache" in schema and schema.endswith("-> (Tensor, Tensor)")
    schema = str(torch.ops.tilewright.remember.out._schema)
    assert "Tensor(a!)? out_y=None, Tensor(b!)? out_total=None" in schema and "Tensor(z!) cache" in schema


def test_torch_checks_both_overloads():
    a = arguments()
    given = (a["x"], a["gain"], a["cache"], 1)
    which = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(remember.overloads["default"], given, test_utils=which)
    outs = {"out_y": torch.empty(4, 32), "out_total": torch.empty(4)}
    torch.library.opcheck(remember.overloads["out"], given, outs, test_utils=which)
    torch.library.opcheck(remember.overloads["out"], given, {"out_total": torch.empty(4)}, test_utils=which)


def test_fakes_write_nothing_and_have_the_shapes():
    with FakeTensorMode() as mode:
        a = {n: mode.from_tensor(t) for n, t in arguments().items()}
        y, total = remember(**a)
        assert y.shape == (4, 32) and total.shape == (4,)
        with pytest.raises(ValueError, match=r"out\[1\], for total"):
            remember(**a, out=(None, torch.empty(5)))


@pytest.mark.parametrize("view", [False, True], ids=["argument", "view"])
def test_compiled_it_writes_in_place(view):
    def step(x, gain, cache, out):
        there = cache[1:] if view else cache
        y, _ = tw.remember(x, gain, there, slot=0, out=(out, None))
        return y + 1

    torch._dynamo.reset()
    a = arguments()
    cache, out, plain = torch.zeros(4, 32), torch.empty(4, 32), torch.zeros(4, 32)
    expected = step(a["x"], a["gain"], plain, torch.empty(4, 32))
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for _ in range(2):
        same_bits("compiled", compiled(a["x"], a["gain"], cache, out), expected)
        same_bits("cache", cache, plain)
        same_bits("out", out, a["x"] * a["gain"])


def test_a_gradient_through_the_registered_op_is_refused_in_words():
    a = arguments()
    x = a["x"].requires_grad_()
    with pytest.raises(Exception, match="it writes cache"):
        torch.compile(lambda x: tw.remember(x, a["gain"], a["cache"])[0], fullgraph=True, backend="eager")(x)


def test_malformed_calls_cover_results_broadcasting_and_what_is_written():
    a = remember.signature.bind((), arguments())
    bad = list(malformed.calls(remember, a))
    words = {one.what for one in bad}
    assert {"out: one fewer", "out: another dtype", "out: the memory of x"} <= words and len(bad) > 100
    for one in bad:
        with pytest.raises((TypeError, ValueError)):
            remember.function(*one.args, **one.kwargs)


def test_its_page_names_results_and_what_is_written():
    text = "\n".join(documents._entry(remember, ()))
    assert "`y`" in text and "- Writes: `cache`" in text and "out: tuple[" in text


def test_evidence_goes_by_its_kernels():
    source = hashed(launches(remember, Call(arguments())))
    assert len(source) == 16 and source == hashed(launches(remember, Call(arguments(tokens=4))))
    assert source != hashed(launches(remember, Call(arguments(hidden=64))))
