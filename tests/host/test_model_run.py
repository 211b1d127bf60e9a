"""`tilewright check --models` without a GPU: what is refused, run, kept and run again."""

from __future__ import annotations

import json
import math
import time
from functools import cache
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.bench import evidence
from tilewright.check import guarded, model_run, models
from tilewright.check.cases import Net
from tilewright.check.codes import near_codes
from tilewright.check.model_run import Here, Run, in_interpreter, read, read_rows, written
from tilewright.check.models import ModelCall, calls, place_calls
from tilewright.check.oracle import Outcome
from tilewright.core.target import TARGETS
from tilewright.op import Op

OPS = tw.catalogue()
HERE = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
H200 = Here("NVIDIA H200", TARGETS["sm_90"], 1 << 30)
OK = {"status": "ok"}


def run(*words: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["check", *(str(word) for word in words)], env={"COLUMNS": "200"})
    return result.exit_code, result.stdout, result.stderr


def replies(*rows: dict, then: type[BaseException] | None = None):
    """Instead of a worker: these replies in turn, and `then` an end or an exception."""

    def pretend(names, command, limit, **_):
        for name, row in zip(names, rows):
            yield {"case": name, "wall_s": 0.5, **row}
        if then is not None:
            raise then

    return pretend


def always(row: dict):
    def pretend(names, command, limit, **_):
        for name in names:
            yield {"case": name, "wall_s": 0.5, **row}

    return pretend


def whole(tmp_path: Path, names: list[str], part: tuple[int, int] = (1, 1), again: bool = False, **settings) -> Run:
    jobs = settings.get("jobs", 1)
    return Run(names, settings.get("models"), settings.get("here", H200), part, tmp_path / "kept.jsonl", again, jobs)


def go(made: Run, answer, seconds: float = 60.0) -> list[dict]:
    return list(made.go(lambda requests: answer(requests, [], 1.0), time.monotonic() + seconds))


# ---------------------------------------------------------------- the command


@HERE
def test_without_a_gpu_it_is_one_line():
    status, out, err = run("--models")
    assert status == 2 and out == "" and err.count("\n") == 1 and "needs a GPU" in err and "--interpreter" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "lama"], "llama-3-8b"),
        (["router_z_loss", "--model", "llama-3-8b"], "router_z_loss has no place in llama-3-8b"),
        (["--shard", "5/4"], "--shard is I/N"),
        (["--record"], "on a GPU"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_an_error_is_one_line(words, said, tmp_path):
    status, out, err = run("--models", "--interpreter", "--state", tmp_path / "kept", *words)
    assert status == 2 and out == "" and said in err and err.count("\n") == 1


@HERE
def test_the_small_form_runs_here_and_goes_on_where_it_was(tmp_path, monkeypatch):
    words = ("router_z_loss", "--models", "--interpreter", "--state", tmp_path / "kept", "--model", "mixtral-8x7b")
    status, out, _ = run(*words)
    rows = read_rows(tmp_path / "kept")
    assert status == 0 and rows and {row["outcome"] for row in rows} == {"held"}, out
    assert f"{len(rows)} held, 0 failed, 0 skipped, 0 not run, on interpreter" in out
    assert rows[0]["models"] == ["mixtral-8x7b"] and {"source", "date", "torch", "triton"} <= rows[0].keys()
    asked: list[str] = []
    monkeypatch.setattr(guarded, "supervise", lambda names, command, limit, **_: iter(asked.extend(names) or ()))
    status, out, _ = run(*words)
    assert status == 0 and not asked and f"{len(rows)} held" in out
    status, out, _ = run(*words, "--again")
    assert status == 3 and len(asked) == len(rows) and f"{len(rows)} not run" in out


def test_a_wrong_call_is_reported_and_ends_with_1(tmp_path, monkeypatch):
    wrong = {"status": "wrong", "why": "router_z_loss tokens=3: loss: RMS error"}
    monkeypatch.setattr(guarded, "supervise", replies(OK, wrong, {"status": "lost", "why": "timed out after 600 s"}))
    words = ("router_z_loss", "--models", "--interpreter", "--state", tmp_path / "kept")
    status, out, _ = run(*words)
    assert status == 1 and "WRONG\n    router_z_loss tokens=3: loss: RMS error" in out and "LOST\n    timed out" in out
    assert "1 held, 2 failed, 0 skipped" in out
    monkeypatch.setattr(guarded, "supervise", always(OK))
    status, out, _ = run(*words, "--json")
    assert status == 0 and {row["outcome"] for row in json.loads(out)} == {"held"}


def test_interrupted_it_keeps_what_ran(tmp_path, monkeypatch):
    monkeypatch.setattr(guarded, "supervise", replies(OK, then=KeyboardInterrupt))
    words = ("router_z_loss", "--models", "--interpreter", "--state", tmp_path / "kept")
    status, out, err = run(*words)
    assert status == 130 and "1 held" in out and "interrupted" in err
    assert len(read_rows(tmp_path / "kept")) == 1


def test_on_a_gpu_what_was_covered_is_recorded(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(model_run, "gpu", lambda: H200)
    monkeypatch.setattr(evidence, "folder", lambda: tmp_path / "evidence")
    monkeypatch.setattr(guarded, "supervise", always(OK))
    status, _, _ = run("router_z_loss", "--models", "--record", "--shard", "1/2")
    assert status == 0
    path = tmp_path / "evidence" / "models" / "nvidia-h200.jsonl"
    half = read_rows(path)
    run("router_z_loss", "--models", "--record", "--shard", "2/2")
    rows = read_rows(path)
    assert len(half) < len(rows) == len(calls(OPS["router_z_loss"])) and {r["where"] for r in rows} == {"NVIDIA H200"}
    assert [row["call"] for row in rows] == sorted(row["call"] for row in rows)
    assert {m for row in rows for m in row["models"]} == {m for m, f in models.known().items() if "experts" in f}
    assert (tmp_path / ".cache" / "models-nvidia-h200.jsonl").exists()


# ---------------------------------------------------------------- calls


@pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))
def test_a_call_goes_through_json(op: Op):
    plain = place_calls(op, tokens=(7,))
    for one in (*plain, *models.others(op, plain[0])):
        back = read(written(one))
        assert back.name == one.name
        assert (back.options, back.arguments, back.full, back.format) == (
            one.options, one.arguments, one.full, one.format,
        )  # fmt: skip


def test_shards_cover_every_call_once(tmp_path, monkeypatch):
    names = ["topk_routing", "rms_norm"]
    every = [one.call.name for one in whole(tmp_path, names).planned]
    monkeypatch.setattr(
        model_run, "listed", cache(model_run.listed)
    )  # seconds each time: listed once more for all parts
    parts = [one.call.name for i in range(4) for one in whole(tmp_path, names, (i + 1, 4)).planned]
    assert sorted(parts) == sorted(every) and len(set(parts)) == len(parts) > 100


def test_only_one_model_s_calls(tmp_path):
    made = whole(tmp_path, ["rms_norm"], models=["qwen3-8b"]).planned
    assert {one.call.dims["hidden"] for one in made} == {4096, 128}
    assert {models for one in made for models in one.call.models} == {"qwen3-8b"}


def test_several_processes_list_the_same_calls(tmp_path):
    names = ["router_z_loss", "load_balancing_loss"]
    assert whole(tmp_path, names, jobs=2).planned == whole(tmp_path, names).planned


def test_changed_code_runs_again_and_a_torn_line_is_none(tmp_path, monkeypatch):
    made = whole(tmp_path, ["router_z_loss"])
    rows = go(made, always(OK))
    assert len(rows) == len(made.planned) and not whole(tmp_path, ["router_z_loss"]).pending
    with (tmp_path / "kept.jsonl").open("a") as file:
        file.write('{"call": "torn')
    assert not whole(tmp_path, ["router_z_loss"]).pending
    assert whole(tmp_path, ["router_z_loss"], again=True).pending == made.planned
    monkeypatch.setattr(model_run, "digest", lambda op, call, target: "other")
    assert [one.call for one in whole(tmp_path, ["router_z_loss"]).pending] == [one.call for one in made.planned]


def test_what_failed_runs_again(tmp_path):
    made = whole(tmp_path, ["router_z_loss"])
    go(made, replies(OK, {"status": "failed", "why": "ValueError: refused"}))
    left = whole(tmp_path, ["router_z_loss"])
    assert len(left.pending) == len(left.planned) - 1 and len(left.rows()) == 1
    assert not go(left, always(OK), seconds=0.0)


def test_what_cannot_fit_is_skipped_with_the_reason(tmp_path):
    tight = Here("small", TARGETS["sm_90"], 1 << 22)
    made = whole(tmp_path, ["rms_norm"], here=tight, models=["llama-3-70b"])
    rows = {row["call"]: row for row in go(made, always(OK))}
    large = [one.call for one in made.planned if one.elements > tight.limit]
    assert large and all("elements" in rows[c.name]["why"] and rows[c.name]["outcome"] == "skipped" for c in large)
    assert sum(row["outcome"] == "held" for row in rows.values()) == len(made.planned) - len(large)
    assert in_interpreter().most < tight.most


def test_memory_that_runs_out_is_a_reason_too(monkeypatch):
    def full(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate")

    monkeypatch.setattr(model_run, "hold", full)
    reply = model_run.answer(OPS["glu"], place_calls(OPS["glu"], tokens=(1,))[0], Net())
    assert reply == {"skipped": "did not fit: CUDA out of memory", "crowded": True, "spoiled": True}


def test_what_does_not_fit_beside_others_is_made_alone(tmp_path):
    made = whole(tmp_path, ["router_z_loss"])
    asked: list[str] = []

    def tight(names, command, limit):
        for name in names:
            asked.append(name)
            beside = made.weights[name] < math.inf and '"tokens": 7' in name
            yield {"case": name, "wall_s": 0.0, **OK, **({"skipped": "did not fit", "crowded": True} if beside else {})}

    rows = go(made, tight)
    twice = [name for name in set(asked) if asked.count(name) == 2]
    assert len(rows) == len(made.planned) and {row["outcome"] for row in rows} == {"held"}
    assert twice and asked[-len(twice) :] == [name for name in asked[: len(rows)] if name in twice]


def test_a_truth_that_does_not_fit_is_had_in_parts(monkeypatch):
    """All that parts say is held to, gradients too."""
    op, net = OPS["attention"], Net()
    call = next(one for one in place_calls(op, ["llama-3-8b"], tokens=(7,)) if one.dims["length"] == 7)
    seen, check = [], model_run.check

    def small(op, label, values, actual):
        if values["q"].shape[2] == 32:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        seen.append({name: tuple(t.shape) for name, t in actual.items()})
        check(op, label, values, actual)

    monkeypatch.setattr(model_run, "check", small)
    assert model_run.answer(op, call, net) == {"why": "2 parts of it: the whole truth did not fit"}
    shape, narrow = (1, 7, 4, 128), (1, 7, 1, 128)
    assert seen == [{"o": shape, "d_q": shape, "d_k": narrow, "d_v": narrow}] * 2
    whole_outcome = model_run.outcome
    wrong = lambda *a, **k: bent(whole_outcome(*a, **k))  # noqa: E731
    monkeypatch.setattr(model_run, "outcome", wrong)
    with pytest.raises(AssertionError, match="d_k"):
        model_run.answer(op, call, net)


def bent(made: Outcome) -> Outcome:
    made["d_k"] = made["d_k"] * 1.1
    return made


def test_replies_may_come_in_any_order(tmp_path):
    made = whole(tmp_path, ["router_z_loss"])

    def backwards(names, command, limit):
        for name in reversed(list(names)):
            yield {"case": name, "wall_s": 0.0, "status": "wrong" if '"tokens": 7' in name else "ok"}

    rows = go(made, backwards)
    assert len(rows) == len(made.planned) and sum(made.weights.values()) > 0
    for row in rows:
        assert (row["outcome"] == "wrong") == ("tokens=7 " in row["call"]), row


# ---------------------------------------------------------------- the comparison at scale


def held(op: Op, call: ModelCall, change=None) -> None:
    """The reference in its own arithmetic, perhaps changed, held to the truth as kernels are on a GPU."""
    values = call.values(op, call.source(op, models.Plain))
    with model_run.truth_on("cpu"):
        actual = model_run.outcome(op, values)
        if change is not None:
            change(actual)
        model_run.check(op, call.name, values, actual)


def call_of(name: str, model: str, tokens: int, at: int = 0) -> tuple[Op, ModelCall]:
    return OPS[name], place_calls(OPS[name], [model], (tokens,), most=1 << 23)[at]


@pytest.mark.parametrize(
    ("name", "model"),
    [
        ("topk_routing", "256-in-32-groups"),
        ("rms_norm", "deepseek-v3"),
        ("matmul", "ling-mini-2.0"),
        ("glu", "gpt-oss-20b"),
    ],
)
def test_an_honest_computation_is_near_enough(name, model):
    held(*call_of(name, model, 128))


def test_a_choice_may_differ_where_it_hangs_by_a_rounding():
    op, call = call_of("topk_routing", "deepseek-v3", 64)
    values = call.values(op, call.source(op, models.Plain))
    logits = values["logits"]
    bias = values["bias"].zero_()
    best = (logits.sigmoid() + bias)[3].argsort(descending=True)[:2]
    logits[3, best[1]] = torch.nextafter(
        logits[3, best[0]], torch.tensor(-torch.inf)
    )  # two that a rounding tells apart

    def exchanged(row: int):
        with model_run.truth_on("cpu"):
            actual = model_run.outcome(op, values)
            chosen = actual["chosen"][row]
            replayed = actual["chosen"].clone()
            replayed[row, :2] = chosen[:2].flip(0)
            again = model_run.outcome(op, {**values, "indices": replayed}, grads=actual.grads)
            model_run.check(op, call.name, values, again)

    exchanged(3)
    with pytest.raises(AssertionError, match="chosen: 1 of 64 rows chose others, first row 5"):
        exchanged(5)


def test_a_scale_of_what_is_all_noise_may_be_smaller_and_no_other():
    fmt = tw.fp8("1x128", ways="both", pow2=False)
    there = torch.randn(1, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    there[0, 7] = 1e-12
    noise = torch.full((1, 1), 1e-9, dtype=torch.float64)

    def hold(at: int, factor: float) -> None:
        found = there.clone()
        found[0, at] *= factor
        stored = fmt.quantize(found, torch.float32).tensors()
        actual = Outcome({f"y.{part}": t for part, t in zip(fmt.tensor_names, stored)})
        near_codes(tw.catalogue()["rms_norm"], "held", "y", {"out_format": fmt}, actual, there, noise)

    hold(7, 1 - 1e-5)
    hold(7, 1 + 1e-5)
    with pytest.raises(AssertionError, match="scale_t: 1 of 256 scales differ"):
        hold(8, 1 - 1e-5)
