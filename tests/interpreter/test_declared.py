"""The kernels of a declaration that says everything (tests/remember.py): each property that any op is held to."""

from __future__ import annotations

import shutil

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import tilewright as tw
from tests.remember import in_catalogue, remember
from tilewright.check import properties, registration
from tilewright.check.cases import Net
from tilewright.check.oracle import same_bits

NET = Net(interpreter=True)


@pytest.fixture(autouse=True)
def _declared():
    with in_catalogue():
        yield


@pytest.mark.parametrize(
    "prop",
    [
        properties.accuracy,
        properties.strides,
        properties.outs,
        properties.sizes,
        registration.refusals,
        registration.fakes,
    ],
    ids=lambda prop: prop.__name__,
)
def test_property(prop):
    prop(remember, NET)


def arguments() -> dict:
    source = torch.Generator().manual_seed(3)
    x = torch.randn(4, 32, generator=source)
    return {"x": x, "gain": torch.randn(32, generator=source), "cache": torch.zeros(3, 32)}


def test_a_written_argument_is_a_slot_of_the_plan():
    a, b = arguments(), arguments()
    with tw.force("triton"):
        expected = remember(**a)
        for slot in (0, 0, 2):
            before = b["cache"]._version
            made = remember(**b, slot=slot)
            assert b["cache"]._version > before
            for found, wanted in zip(made, expected):
                same_bits("replayed", found, wanted)
            same_bits("cache", b["cache"][slot], a["cache"][0])
        other = torch.zeros(3, 32)
        remember(b["x"], b["gain"], other)
        same_bits("another cache", other, a["cache"])
        with pytest.raises(ValueError, match="cache, which is written, shares memory with x"):
            remember(other[:2], b["gain"], other)


def test_memory_for_results_is_written_once_and_nothing_else_is_allocated(monkeypatch):
    """A replayed plan with memory for every result allocates nothing."""
    a = arguments()
    outs = torch.empty(4, 32), torch.empty(4)
    with tw.force("triton"), torch.no_grad():
        expected = remember(**a)
        for _ in range(2):
            remember(**a, out=outs)
        monkeypatch.setattr(torch, "empty_strided", None)
        monkeypatch.setattr(torch, "empty_like", None)
        made = remember(**a, out=outs)
    for found, out, wanted in zip(made, outs, expected):
        assert found is out
        same_bits("out", out, wanted)


def test_four_bits_into_memory_by_a_plan():
    a, fmt = arguments(), tw.nvfp4()
    with tw.force("triton"), torch.no_grad():
        expected, _ = remember(**a, out_format=fmt)
        out = fmt.empty((4, 32), torch.float32, "cpu")
        for _ in range(2):
            made, _ = remember(**a, out_format=fmt, out=(out, None))
            assert made is out
            for found, wanted in zip(out.tensors(), expected.tensors()):
                same_bits("nvfp4", found.view(torch.uint8), wanted.view(torch.uint8))


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++, by which Inductor compiles for a CPU")
@pytest.mark.parametrize("view", [False, True], ids=["argument", "view"])
def test_compiled_what_is_written_is_not_copied(view):
    """Inductor would clone an argument that it thought it had to keep: shown by the bytes that a call allocates."""

    def step(x, gain, cache):
        y, total = tw.remember(x, gain, cache[1:] if view else cache, slot=1)
        return y + 1, total

    torch._dynamo.reset()
    a = {**arguments(), "cache": torch.zeros(1 << 14, 32)}
    compiled = torch.compile(step, fullgraph=True)
    with tw.force("triton"), torch.no_grad():
        compiled(**a)
        before = a["cache"].data_ptr()
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            y, _ = compiled(**a)
    taken = [e.nbytes() for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert 0 < sum(n for n in taken if n > 0) < a["cache"].nbytes / 16
    same_bits("y", y, a["x"] * a["gain"] + 1)
    torch.testing.assert_close(a["cache"][2 if view else 1], a["x"].sum(0))
    assert a["cache"].data_ptr() == before and not a["cache"][3:].any()
