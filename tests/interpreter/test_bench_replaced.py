"""Calls of torch's operators as benchmark cases, in the interpreter, where replacements are in force: each is ours and right."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewright as tw
from tests.pretended import Rerunning
from tilewright.aten import table, verdicts
from tilewright.aten.router import Override
from tilewright.aten.signature import Signature
from tilewright.bench import cases, check, choices, replaced_models, timing
from tilewright.bench.replaced import CALLS, Replaced, flat, overloads, replacing
from tilewright.core.target import TARGETS

TINY = {"rows": 16, "columns": 33, "part": 7, "tokens": 20, "vocab": 9, "places": 5, "most": 40}
TINY |= {
    "batch": 2,
    "images": 2,
    "channels": 32,
    "height": 32,
    "width": 66,
}  # of images, of which pooling leaves rows and columns
TINY |= {"length": 20, "heads": 4, "kv_heads": 2, "head_dim": 16}
(SHAPES,) = cases.select(["aten_host_new_shape"])
DECLINED = cases.select(["aten_host_fallback"])


@pytest.mark.parametrize("name", CALLS)
def test_a_call_is_ours_and_right(name):
    case = replace(SHAPES, call=name, dims=TINY, options={})
    work = Replaced.build(case, device="cpu")
    assert isinstance(work.call, timing.Within)
    if CALLS[name].draws:  # a CPU's own draws are others
        assert [(t.shape, t.dtype) for t in flat(work.call())] == [(t.shape, t.dtype) for t in flat(work.plain())]
        return
    assert 0.0 <= work.verify(work.call()) < 0.01
    if not any(word.startswith("any") for word in CALLS[name].tensors):  # of dtypes of its own
        return
    for dtype in ("float32", "uint8") if name == "transpose" else ("float32",):
        work = Replaced.build(replace(case, dtype=dtype), device="cpu")
        assert 0.0 <= work.verify(work.call()) < 1e-5


@pytest.mark.parametrize(
    "name",
    [
        "add_transposed",
        "softmax_first",
        "topk_first",
        "index_put",
        "layer_norm_back",
        "isclose",
        "masked_fill",
        "cat",
        "attention_turned_causal",
    ],
)
def test_a_call_is_of_the_kind_that_its_row_is_of(name, monkeypatch):
    """What a case is found to be without memory is what the router sees."""
    case = replace(SHAPES, call=name, dims=TINY, options={}, dtype="float32")
    seen: list[Signature] = []
    tally = Override.tally

    def noted(self, args, kwargs):
        seen.append(self.signature(args, kwargs))
        return tally(self, args, kwargs)

    monkeypatch.setattr(Override, "tally", noted)
    Replaced.build(case, device="cpu").call()
    assert seen == [choices.reached(case, TARGETS["sm_90"])]
    choice = Replaced.build(replace(case, direction="choice"), device="cpu")
    choice.verify(choice.call())
    assert choice.names == (seen[0].overload,) and seen[1:] == seen[:1]


@pytest.mark.parametrize("case", DECLINED, ids=lambda c: c.call)
def test_a_call_that_is_to_be_declined_is(case):
    work = Replaced.build(case, device="cpu")
    assert 0.0 <= work.verify(work.call()) < 1e-6
    if case.dtype == "complex64":
        with pytest.raises(check.Wrong, match=r"aten's, not ours: .*complex64"):
            Replaced.build(replace(case, options={}), device="cpu").call()
    with pytest.raises(check.Wrong, match="taken, where aten should be"):
        Replaced.build(replace(case, dtype="float32", options={"declined": True}), device="cpu").call()


def test_a_call_that_every_row_takes_is_declined_where_nothing_is_measured():
    (case,) = [case for case in DECLINED if case.call == "softmax_last"]
    with timing.entered([Replaced.build(case, device="cpu").call]) as [call]:
        call()
        assert tw.aten.report()["_softmax"]["declined"] == {"nothing is measured of float32, 1 flat, dim last": 1}


def test_a_case_of_mode_auto_is_ours_where_measurements_say_so(monkeypatch):
    case = replace(SHAPES, call="isinf", dims=TINY, options={"auto": True})
    work, place, seen = Replaced.build(case, device="cpu"), verdicts.Place.here(), []
    monkeypatch.setattr(verdicts, "table", lambda arch: tuple(seen))

    def taken() -> list[int]:
        with timing.entered([work.call]) as [call]:
            assert torch.equal(call(), torch.isinf(*work.given))
            return [one["taken"] for one in tw.aten.report().values()]

    assert taken() == []
    times = {"own": 1.0, "aten": 2.0, "least": 1.9}
    about = {
        "gpu": place.gpu,
        "torch": place.torch,
        "triton": place.triton,
        "version": tw.__version__,
        "date": "",
        "source": "",
    }
    seen.append({**choices.reached(case, TARGETS["sm_90"])._asdict(), "eager": times, "graph": times, **about})
    assert taken() == [2]


def test_a_block_without_a_call_is_nobodys():
    x = torch.ones(3)
    with pytest.raises(check.Wrong, match="no replacement was called"), replacing(None, False):
        x.view(1, 3)


def test_each_call_has_a_new_shape():
    work = Replaced.build(replace(SHAPES, dims={"rows": 4, "columns": 8}), device="cpu")
    first = work.call()
    work.verify(first)
    shapes = [tuple(first.shape), *(tuple(work.call().shape) for _ in range(5))]
    assert shapes == [(4, 8), (4, 7), (4, 6), (3, 8), (3, 7), (3, 6)]


def test_batches_of_ours_and_of_atens_take_turns():
    """What a call is made inside of is entered once a batch, and outside the time."""
    work = Replaced.build(replace(SHAPES, call="neg", dims=TINY, options={}), device="cpu")
    seen: list[int] = []

    def watched() -> None:
        seen.append(len(tw.aten.report()))

    ours = timing.Within(watched, lambda: tw.aten.use("all", include="neg"))
    timing.time_host_each([ours, watched], batches=2, per_batch=2, drain=lambda: None)
    assert seen == [1, 1, 0, 0, *([1] * (timing.WARM_CALLS + 2) + [0, 0]) * 2]
    assert all(us > 0 for us in timing.time_host_each([work.call, work.plain], 2, 2, drain=lambda: None))


def test_what_a_timed_run_left_is_checked_by_aten():
    """While results are checked no replacement is in force: aten would be held against ourselves."""
    work = Replaced.build(replace(SHAPES, call="cumsum_last", dims=TINY, options={}), device="cpu")
    errors: list[float] = []

    def inspect(results: list) -> None:
        assert not tw.aten.report()
        errors.append(work.verify(results[0]))

    timed = timing.measure([work.call] * 2, 2, inspect=inspect, device=Rerunning())
    assert timed.method == "graph" and 0.0 <= errors[0] < 0.01


def test_every_overload_has_a_call_for_its_memory():
    (case,) = cases.select(["aten_memory_worst"])
    for name, work in overloads(replace(case, dims={"times": 2}), "cpu"):
        assert work.names == (name,)
        work.call()  # raises where it is not ours


@pytest.mark.parametrize("family", ["aten_auto_model", "aten_all_model", "aten_auto_decode"])
def test_a_step_of_a_model_is_held_against_plain_torch(family, monkeypatch):
    """In small, with times that are made up: mode "auto" has no measurements here, and replaces nothing."""
    tiny = small_model(family)
    times = iter([0.05] + [1.0, 2.0] * 9)
    monkeypatch.setattr(replaced_models, "seconds", lambda *_: next(times))
    row = replaced_models.measure(tiny, [], "cpu")
    assert (row["us"], row["rivals"]) == (1e6, {"eager": 2e6}) and row["error"] < 1e-5
    assert row["note"].endswith("slower in 0 of 5 runs") and ("0 calls" in row["note"]) == (family != "aten_all_model")
    monkeypatch.setitem(table.FORMS, "embedding", lambda weight, ids, *_: weight[ids] * 1.5)
    if family == "aten_all_model":
        with pytest.raises(check.Wrong, match="the loss is off by"):
            replaced_models.measure(tiny, [], "cpu")


def small_model(family: str) -> cases.Case:
    (case,) = cases.select([family])
    small = {
        "layers": 1,
        "hidden": 16,
        "inner": 24,
        "heads": 2,
        "kv_heads": 1 if case.options["causal"] else 2,
        "vocab": 40,
    }
    dims = {"batch": 2, "length": 1, "context": 6} if "context" in case.dims else {"batch": 2, "length": 6}
    return replace(case, dims=dims, options={**case.options, **small})


def test_a_short_step_is_timed_by_many(monkeypatch):
    asked = []

    def seconds(run, drain, steps):
        asked.append(steps)
        return 0.01

    monkeypatch.setattr(replaced_models, "seconds", seconds)
    replaced_models.measure(small_model("aten_auto_decode"), [], "cpu")
    assert asked == [1] + [20] * 10


def test_a_token_after_others_is_as_within_them():
    """The loss of the last token of a prompt, alone after keys and values of the others, is that of the whole prompt's."""
    tiny = small_model("aten_all_model")
    model = replaced_models.build(tiny, "cpu").model
    ids = torch.randint(40, (2, 6))
    kept = []
    attention = torch.nn.functional.scaled_dot_product_attention

    def noted(q, k, v, **how):
        kept.append((k[:, ::2], v[:, ::2]))  # each is there for two heads
        return attention(q, k, v, **how)

    logits = []
    model.head.register_forward_hook(lambda module, given, made: logits.append(made))
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", noted)
        model(ids)
        pasts = [tuple(t[:, :, :-1] for t in pair) for pair in kept]
        model(ids[:, -1:], pasts)
    torch.testing.assert_close(logits[1][:, 0], logits[0][:, -1])
