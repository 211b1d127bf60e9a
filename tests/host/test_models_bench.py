"""Training steps of whole models beside their rivals': tiny ones on a CPU, and what becomes of variants that go wrong."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable
from functools import partial

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.bench import documents, evidence, models, source
from tilewright.bench.cases import CASES, GOALS, Case
from tilewright.core.target import TARGETS

MODELS = {case.family: case for case in CASES.values() if case.direction == "train"}
LLAMA = MODELS["hf_llama_train"]


# ---------------------------------------------------------------------------------------------------------------- worker


@pytest.fixture
def quick(monkeypatch):
    """Few steps, on models of transformers."""
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    monkeypatch.setattr(models, "WARM", 1)
    monkeypatch.setattr(models, "reading", partial(models.reading, steps=1))


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("family", MODELS)
def test_variants_take_the_same_step(family, quick):
    case = models.tiny(MODELS[family])
    found = {v: {**models.measure(case, v, "cpu", models.Host()), "status": "ok"} for v in ("plain", "bf16", "fp8")}
    for variant, reply in found.items():
        step = models.judged(variant, reply, found["plain"])
        assert step["us"] > 0 and evidence.is_step(step), step
        assert step["error"] < 2e-2 and (step["error"] > 0) == (variant != "plain")
    names = {name for name, _ in models.build(case, "cpu")[0].named_parameters()}
    assert set(found["bf16"]["sample"]) == names and all(1 <= len(s) <= 256 for s in found["bf16"]["sample"].values())
    damaged = {**found["bf16"], "sample": {**found["bf16"]["sample"]}}
    damaged["sample"][min(names)] = [0.0] * len(damaged["sample"][min(names)])
    assert models.judged("bf16", damaged, found["plain"])["failed"].startswith("its gradient is off by")


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_every_timed_step_has_weights_of_its_own_version_and_no_old_gradient(quick, monkeypatch):
    seen = []

    def watched(model, case):
        weight = next(model.parameters())

        def call(**given):
            seen.append((weight._version, weight.grad))
            return model(**given)

        return call

    monkeypatch.setitem(models.VARIANTS, "watched", watched)
    models.measure(models.tiny(LLAMA), "watched", "cpu", models.Host())
    versions, grads = zip(*seen)
    assert len(set(versions)) == len(versions) == 3 and grads == (None,) * 3


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_the_worker_answers_or_says_why_not(quick, monkeypatch):
    def answers(*words: str) -> list[dict]:
        readable, writable = os.pipe()
        models.main([*words, str(writable)])
        with os.fdopen(readable) as replies:
            return [json.loads(line) for line in replies]

    request = json.dumps({"case": LLAMA.name, "variant": "plain"}) + "\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(request))
    ready, row = answers("--tiny")
    assert ready == {"status": "ready"} and row["status"] == "ok" and len(row["sample"]) == 11
    monkeypatch.setattr(sys, "stdin", io.StringIO(request))
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "transformers", None)
        ready, row = answers("--tiny")  # a verdict on this case, not on the run
    assert ready == {"status": "ready"} and row["status"] == "wrong" and "transformers cannot" in row["why"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    [only] = answers()
    assert "no CUDA device" in only["status"]


# ------------------------------------------------------------------------------------------------------------ supervisor

FAKE = """
import json, os, sys, time
replies = os.fdopen(int(sys.argv[-1]), "w")
def reply(row):
    replies.write(json.dumps(row) + "\\n"); replies.flush()
ABOUT = {"op": "huggingface", "direction": "train", "dims": {"batch": 8}, "gpu": "G", "arch": "sm_90", "sms": 132, "torch": "2",
         "triton": "3", "date": "2026-01-01", "source": "s", "packages": {"transformers": "5"}}
reply({"status": "ready"})
for line in sys.stdin:
    asked = json.loads(line)
    plan = json.loads(os.environ["PLAN"]).get(asked["variant"], 200.0)
    good = {"status": "ok", "us": plan, "bytes": 5, "loss": 11.0, "norm": 2.0, "sample": {"w": [1.0, 2.0]}, "about": ABOUT}
    if plan == "hang":
        time.sleep(60)
    elif plan == "failed":
        reply({"status": "failed", "why": "RuntimeError: no"})
    elif plan == "off":
        reply({**good, "us": 1.0, "loss": 12.0})
    elif plan == "nan":
        reply({**good, "us": 1.0, "sample": {"w": [float("nan"), 2.0]}})
    else:
        reply(good)
"""


@pytest.fixture
def fake(tmp_path, monkeypatch) -> Callable[..., list[str]]:
    """A worker without a device; the function sets what becomes of each variant."""
    script = tmp_path / "worker.py"
    script.write_text(FAKE)

    def plan(**what: float | str) -> list[str]:
        monkeypatch.setenv("PLAN", json.dumps(what))
        return [sys.executable, str(script)]

    return plan


def test_a_row_has_every_variant_or_why_it_has_none(fake):
    said = []
    command = fake(bf16=100.0, fp8="off", liger=110.0, compile="hang")
    row = models.compare(LLAMA, 2.0, command, said.append)
    assert row["status"] == "ok" and row["us"] == 100.0 and row["measured"] == pytest.approx(1.1)
    assert row["rivals"] == {"plain": 200.0, "liger": 110.0} and row["wall_s"] < 5
    assert list(row["steps"]) == list(models.VARIANTS) == [line.split()[1].rstrip(":") for line in said]
    assert "its loss is off by 9.09e-02" in row["absent"]["fp8"] and "timed out" in row["absent"]["compile"]
    assert evidence.problem({name: row[name] for name in (*evidence.FIELDS, *evidence.OPTIONAL) if name in row}) is None


@pytest.mark.parametrize("outcome, status", [("off", "wrong"), ("nan", "wrong"), ("failed", "failed")])
def test_without_a_right_step_of_ours_there_is_no_time(fake, outcome, status):
    row = models.compare(LLAMA, 60.0, fake(bf16=outcome), print)
    assert row["status"] == status and "us" not in row and row["why"].startswith("bf16: ")


def test_a_case_may_be_of_the_step_in_fp8_and_ask_for_few_others(fake):
    """Beside what it is judged by and the rival of its goal: the other case of that model has the rest."""
    case = MODELS["hf_fp8_train"]
    row = models.compare(case, 60.0, fake(fp8=100.0, liger=130.0), print)
    assert (
        row["us"] == 100.0 and row["measured"] == pytest.approx(1.3) and list(row["steps"]) == ["plain", "fp8", "liger"]
    )
    assert case.dims == LLAMA.dims and case.parts == LLAMA.parts
    row = models.compare(case, 60.0, fake(fp8="failed"), print)
    assert row["status"] == "failed" and row["why"].startswith("fp8: ")


@pytest.mark.parametrize("family", ["hf_llama_train", "hf_fp8_train", "hf_qwen3_wide_train"])
def test_attention_is_patched_where_a_case_says_so(family, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
    asked = []
    monkeypatch.setattr(tw, "patch", lambda model, **given: asked.append(given))
    for variant in ("bf16", "fp8"):
        models.VARIANTS[variant](torch.nn.Identity(), MODELS[family])
        models.VARIANTS[variant](torch.nn.Identity(), MODELS["hf_qwen3_moe_train"])
    assert asked == [{"fp8": fp8, "attention": own} for fp8 in (False, True) for own in (True, False)]
    config = models.build(models.tiny(MODELS[family]), "cpu")[0].config
    assert not {"attention", "fp8"} & set(config.to_dict())


def test_without_a_step_to_hold_them_against_nothing_is_right(fake):
    row = models.compare(LLAMA, 60.0, fake(plain="failed"), print)
    assert row["status"] == "wrong" and all("failed" in step for step in row["steps"].values())


def test_the_command_records_models(fake, tmp_path, monkeypatch):
    command = fake(bf16=100.0, fp8=80.0, liger=101.0, compile="failed")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(models, "supervise", partial(models.supervise, command=command))
    done = CliRunner().invoke(app, ["bench", "hf_*", "--record", "--evidence", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"hf_llama_train/8x2048: 100.00 us, 1.010, short of {GOALS['hf_llama_train'].goal}" in done.stderr
    assert "rival compile: not timed for some cases: RuntimeError: no" in done.stdout
    rows = evidence.everything(tmp_path)
    assert {row["case"] for row in rows} == {case.name for case in MODELS.values()}
    assert rows[0]["steps"]["fp8"]["us"] == 80.0 and rows[0]["steps"]["compile"] == {"failed": "RuntimeError: no"}
    for damage in ({"fp8": {"us": 1.0}}, {"fp8": {"failed": 1}}, {"fp8": 3}, [], None):
        assert "step" in evidence.problem({**rows[0], "steps": damage})


# ------------------------------------------------------------------------------------------------------------- what is said


def test_the_table_hides_nothing():
    cases = [
        Case("m/1", "m", "models", "huggingface", "train", {}, beside=["fp8"]),
        Case("n/1", "n", "models", "huggingface", "train", {}),
    ]
    good = {"us": 123_456.0, "bytes": 41_000_000_000, "loss": 1.0, "norm": 1.0, "error": 0.0}
    steps = {"plain": good, "bf16": {**good, "note": "so"}, "compile": {"failed": "timed out after 50 s"}}
    rows = [{"case": "m/1", "gpu": "G", "steps": steps}]
    made = documents.models_section(rows, {("G", "m/1", "")}, [*cases, LLAMA][:2], documents.VARIANTS)
    first, second = (line.split(" | ") for line in made.splitlines() if line.startswith(("| m/1", "| n/1")))
    assert first[1:] == [
        "G",
        "123.5 ms, 41.0 GB",
        "none",
        "not asked for",
        "123.5 ms, 41.0 GB (stale)",
        "not recorded yet |",
    ]
    assert second[2:] == ["not recorded yet"] * 4 + ["not recorded yet |"]
    assert "- `m/1`, torch.compile: timed out after 50 s" in made and "- `m/1`, tilewright, bf16: so" in made
    assert set(documents.VARIANTS) == set(models.VARIANTS)


@pytest.mark.parametrize("family", MODELS)
def test_a_models_source_is_that_of_its_ops(family):
    case, target = MODELS[family], TARGETS["sm_90"]
    assert {part["op"] for part in case.parts} <= set(tw.catalogue())
    assert (
        evidence.freshness({"case": case.name, "arch": "sm_90", "sms": 132, "triton": "3.6.0", "source": "x"})
        == "stale"
    )
    digests = {source.digest(Case(**{**vars(case), "parts": [part]}), target) for part in case.parts}
    assert len(digests) == len(case.parts)
