"""Commands that do work: what they print, what they write, and how they end."""

from __future__ import annotations

import functools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.bench import tune
from tilewright.check import guarded, variants
from tilewright.core.target import TARGETS, Target
from tilewright.op import Triton
from tilewright.runtime import config
from tilewright.toolchain.aot import CompileError

OPS = tw.catalogue()
HERE = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")


def run(*words: str, **environment: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(word) for word in words], env={"COLUMNS": "200", **environment})
    return result.exit_code, result.stdout, result.stderr


@HERE
@pytest.mark.parametrize("words", [["sol"], ["tune", "glu"], ["warmup", "glu"]], ids=" ".join)
def test_without_a_gpu_it_is_one_line(words):
    status, out, err = run(*words)
    assert status == 2 and out == "" and err.count("\n") == 1 and "there is none" in err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "gluu"], "glu"),
        (["check", "rms_nrm"], "rms_norm"),
        (["explain"], "--models"),
        (["explain", "glu", "--models", "--full"], "--models takes"),
        (["compile", "cross_entropi"], "cross_entropy"),
        (["warmup", "glue"], "glu"),
        (["tune", "glu", "--model", "llama"], "llama-3-8b"),
        (["check", "glu", "--property", "acuracy"], "accuracy"),
        (["compile", "glu", "--arch", "sm_91"], "sm_90"),
        (["warmup", "glu", "--dtype", "int4"], "bf16"),
        (["warmup", "cross_entropy", "--format", "fp8:e4m3:1x128:both:pow2:te"], "out_format"),
        (["warmup", "glu", "--dim", "hidden=x"], "tokens=8192"),
        (["warmup", "glu", "--dim", "=4"], "tokens=8192"),
        (["warmup", "glu", "--dim", "heads=4"], "glu has no dimension heads; it has experts, hidden, tokens"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else value,
)
def test_an_error_is_one_line(words, said):
    status, out, err = run(*words)
    assert status == 2 and out == "" and said in err and err.count("\n") == 1


# ---------------------------------------------------------------- compile


@pytest.fixture
def one_call(monkeypatch):
    """Only one small call of each op."""

    def calls(op):
        yield variants.Call(variants.drawn(op, variants.ODD), variants.FORWARD)

    monkeypatch.setattr(variants, "hot_calls", calls)


def test_compile_tells_the_cost_of_each_variant(one_call):
    status, out, _ = run("compile", "glu", "--arch", "sm_90", "--arch", "sm_80", "--json")
    rows = json.loads(out)
    assert status == 0 and [row["arch"] for row in rows] == ["sm_90", "sm_80"]
    for row in rows:
        assert row["state"] == "compiled" and row["kernel"] == "glu_forward" and row["op"] == "glu"
        assert row["registers"] > 8 and row["threads"] == 128 and row["spills"] == 0 and row["why"] == ""
        assert row["constants"]["num_warps"] == 4 and row["constants"]["ACT"] == "silu"


def test_compile_shows_a_refusal_and_its_reason(one_call, monkeypatch):
    glu = OPS["glu"]
    only = Triton(glu.implementations[-1].forward, None, lambda target, a: target.fp8, "only")
    monkeypatch.setattr(glu, "implementations", (only,))
    status, out, _ = run("compile", "glu", "--arch", "sm_80", "--json")
    (row,) = json.loads(out)
    assert status == 0 and row["state"] == "refused" and "no implementation" in row["why"] and "sm_80" in row["why"]
    assert row["registers"] is None and row["kernel"] == ""


def test_compile_fails_where_a_kernel_does_not_compile(one_call, monkeypatch):
    def broken(self):
        raise CompileError("glu_forward for sm_90: no such instruction")

    monkeypatch.setattr(variants.Variant, "compile", broken)
    status, out, _ = run("compile", "glu", "--arch", "sm_90")
    assert status == 1 and "failed" in out and "no such instruction" in out


# ---------------------------------------------------------------- explain


def test_explain_says_which_variants_models_reach():
    status, out, _ = run("explain", "topk_routing", "--models", "--json")
    rows = json.loads(out)
    fault = [row for row in rows if "GROUPS=32 " in row["variant"]]
    assert status == 0 and fault and all(row["models"] == ["256-in-32-groups"] for row in fault)
    assert {row["kernel"] for row in rows} == {"topk_routing_forward", "topk_routing_backward"}
    assert any({"deepseek-v3", "ling-1t"} <= set(row["models"]) for row in rows)
    assert len({row["variant"] for row in rows}) <= len(rows)
    status, out, _ = run("explain", "router_z_loss", "--models")
    assert status == 0 and "mixtral-8x7b" in out and "router_z_loss" in out


# ---------------------------------------------------------------- check


@HERE
def test_check_runs_properties_in_the_interpreter():
    status, out, _ = run("check", "quantize", "--property", "leading", "--property", "refusals")
    lines = out.splitlines()
    assert status == 0 and [line.split()[:2] for line in lines[:2]] == [
        ["quantize", "leading"],
        ["quantize", "refusals"],
    ]
    assert all(line.endswith("held") for line in lines[:2])
    assert lines[2] == "2 held, 0 failed, 0 not run, in the interpreter"


def replies(*rows: dict):
    """Instead of a worker: one of these rows for each request."""

    def pretend(names, command, limit):
        for name, row in zip(names, rows):
            yield {"case": name, "wall_s": 0.5, **row}

    return pretend


def test_check_fails_with_the_reason(monkeypatch):
    why = "glu(seed=3): y is off\n" + "\n".join(f"line {i}" for i in range(50))
    bad = {"status": "wrong", "why": why}
    monkeypatch.setattr(guarded, "supervise", replies({"status": "ok"}, bad, {"status": "lost", "why": "timed out"}))
    words = ["check", "glu", *(w for p in ("accuracy", "sizes", "strides") for w in ("--property", p))]
    status, out, _ = run(*words)
    assert status == 1 and "1 held, 2 failed, 0 not run" in out
    assert (
        "WRONG\n    glu(seed=3): y is off\n    line 0" in out and "line 40" not in out and "LOST\n    timed out" in out
    )
    status, out, _ = run(*words, "--json")
    assert status == 1 and [row["status"] for row in json.loads(out)] == ["ok", "wrong", "lost"]
    assert json.loads(out)[1]["property"] == "sizes" and json.loads(out)[1]["why"] == why


def test_check_begins_nothing_after_its_time():
    status, out, _ = run("check", "glu", "--minutes", "0", "--property", "accuracy")
    assert status == 0 and out.startswith("0 held, 0 failed, 1 not run")


def test_check_interrupted_says_what_is_left(monkeypatch):
    def interrupted(names, command, limit):
        yield {"case": next(iter(names)), "wall_s": 0.5, "status": "ok"}
        raise KeyboardInterrupt

    monkeypatch.setattr(guarded, "supervise", interrupted)
    words = ["check", "glu", *(w for p in ("accuracy", "sizes", "strides") for w in ("--property", p))]
    status, out, err = run(*words)
    assert status == 130 and "1 held, 0 failed, 2 not run" in out
    assert err.splitlines()[-1] == "interrupted: 2 of 3 properties left"
    assert run(*words, "--json")[0] == 130


def test_check_says_why_it_cannot_start(monkeypatch):
    def none(names, command, limit):
        raise guarded.NoWorker("no CUDA device")
        yield

    monkeypatch.setattr(guarded, "supervise", none)
    status, out, err = run("check", "glu", "--property", "accuracy")
    assert status == 2 and out == "" and err == "tilewright: no CUDA device\n"


# ---------------------------------------------------------------- on a GPU, pretended


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """An H200 as far as the commands look."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Pretended GPU")
    monkeypatch.setattr(Target, "of", staticmethod(lambda index: TARGETS["sm_90"]))
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    config.table.cache_clear()
    yield tmp_path
    config.table.cache_clear()


def timed(names, command, limit):
    """Wide tiles are best, and one config hangs."""
    assert command[-1] == "tilewright.bench.tune"
    for name in names:
        asked = json.loads(name)["config"]
        if asked["num_warps"] == 8 and asked["COLS"] == 512:
            yield {"status": "lost", "why": "timed out after 90 s"}
        else:
            yield {"status": "ok", "us": 100.0 - asked["COLS"] / 100 + asked["ROWS"] / 10}


def test_tune_writes_the_winners(gpu, monkeypatch):
    monkeypatch.setattr(guarded, "supervise", timed)
    status, out, err = run("tune", "glu", "--model", "mixtral-8x7b", "--json")
    rows = {row["kernel"]: row for row in json.loads(out)}
    assert status == 0 and set(rows) == {"glu_forward", "glu_backward"}
    best = rows["glu_forward"]
    assert best["key"] == {"N": 14336} and best["config"]["COLS"] == 2048 and best["gain"].endswith(" %")
    assert err.count("timed out after 90 s") == 6  # three such configs of either kernel
    path = config.folder() / "sm_90.jsonl"
    written = {(r["kernel"], r["key"]["N"]): r["config"] for r in map(json.loads, path.read_text().splitlines())}
    assert written[("glu_forward", 14336)] == best["config"] and len(written) == 2
    other = gpu / "deep" / "rows.jsonl"
    status, out, _ = run("tune", "glu", "--model", "mixtral-8x7b", "--out", other)
    assert status == 0 and other.read_text() == path.read_text() and "2 of 2 kernels and sizes tuned" in out


def test_tune_interrupted_keeps_what_is_finished(gpu, monkeypatch):
    def interrupted(names, command, limit):
        for count, row in enumerate(timed(names, command, limit)):
            if count == 25:
                raise KeyboardInterrupt
            yield row

    monkeypatch.setattr(guarded, "supervise", interrupted)
    status, out, err = run("tune", "glu", "--model", "mixtral-8x7b", "--json")
    assert status == 130 and [row["kernel"] for row in json.loads(out)] == ["glu_forward"] and "interrupted" in err
    assert len((config.folder() / "sm_90.jsonl").read_text().splitlines()) == 1


def test_tune_says_what_it_cannot_do(gpu, monkeypatch):
    status, _, err = run("tune", "quantize")
    assert status == 2 and "no kernel of quantize has configs" in err and err.count("\n") == 1
    monkeypatch.setattr(guarded, "supervise", timed)
    blocked = gpu / "file"
    blocked.write_text("")
    status, _, err = run("tune", "glu", "--model", "mixtral-8x7b", "--out", blocked / "rows.jsonl")
    assert status == 2 and "cannot write" in err.splitlines()[-1]


def test_warmup_compiles_the_call_that_was_asked_for(gpu, monkeypatch):
    made = []
    monkeypatch.setattr(tw, "warmup", lambda op, **given: made.append((op, given)), raising=False)
    real = variants.Plain.__init__
    monkeypatch.setattr(
        variants.Plain,
        "__init__",
        functools.wraps(real)(lambda self, *args, **named: real(self, *args, **{**named, "device": "cpu"})),
    )
    words = ["warmup", "rms_norm", "--dim", "tokens=6", "--dim", "hidden=256", "--dtype", "fp16", "--full", "--json"]
    status, out, err = run(*words)
    assert status == 0, err
    (op, given), rows = made[0], json.loads(out)
    assert op is OPS["rms_norm"] and given["x"].shape == (6, 256) and given["x"].dtype == torch.float16
    assert given["weight"] is not None
    assert "rms_norm_forward" in [row["kernel"] for row in rows]


def test_models_are_shipped_with_the_package():
    assert (Path(tune.__file__).parent.parent / "data" / "models.json").is_file()
