"""Benchmark cases that are no call of one op, small and on a CPU: a layer and a loop of the examples, and a product of JAX."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch

from tests.pretended import measuring
from tilewright.bench import cases, programs, rivals, run
from tilewright.bench.check import Absent, Wrong
from tilewright.bench.work import build

TINY = [64, 128, 4, 2, 32]
LAYERS = {"decode_layer": True, "decode_layer_bf16": False}


def layer(family: str) -> programs.Layer:
    (case,) = (case for case in cases.select([family]) if case.own)
    options = {**case.options, "sizes": TINY}
    assert case.options == {"fp8": LAYERS[family]}
    return build(replace(case, dims={"batch": 2, "context": 40}, options=options), device="cpu")


@pytest.mark.parametrize("family", LAYERS)
def test_a_layer_is_checked_and_set_beside_its_compiled_twin(family, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    work = layer(family)
    result = work.call()
    assert 0 < work.verify(result) < programs.OFF[LAYERS[family]]
    read, written = work.traffic(result)
    weights = sum(w.numel() for w in work.step.layer.weights.values())
    tokens = 2 * 40 * 2 * 32 * 2  # of keys and values: sequences, tokens, heads, columns
    assert (
        (weights + tokens) * (1 if LAYERS[family] else 2)
        < read
        < 1.05 * (weights + tokens) * (1 if LAYERS[family] else 2)
    )
    assert written == 2 * 2 * 64 * 2 and work.result_bytes(result) == 0
    theirs = rivals.call_of("compile_graph", work)()
    assert rivals.agrees(result, theirs, rivals.LOOSER["compile_graph"])
    assert not rivals.agrees(result, (theirs[0] * 1.2, theirs[1]), rivals.LOOSER["compile_graph"])
    with pytest.raises(Absent, match="jax_bf16 has nothing for qwen3 layer"):
        rivals.call_of("jax_bf16", work)


def test_a_layer_is_timed_beside_its_compiled_twin(monkeypatch):
    measuring(monkeypatch)
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(run, "build", lambda case, seed=0: build(case, seed, "cpu"))
    row = run.measure(layer("decode_layer").case, ["eager"])
    assert row["us"] == pytest.approx(5.0) and row["method"] == "graph" and row["extra_bytes"] == 7
    assert row["rivals"] == {"compile_graph": pytest.approx(5.0)} and row["measured"] == pytest.approx(1.0)
    assert row["absent"] == {"eager": "eager has nothing for qwen3 layer"} and not row["spoiled"]


def test_a_wrong_layer_gets_no_speed():
    work = layer("decode_layer_bf16")
    update, stream = work.call()
    for made in ((update * 1.02, stream), (update, stream * 1.01)):
        with pytest.raises(Wrong, match="off by"):
            work.verify(made)


def test_a_layer_wants_a_checkout(monkeypatch):
    def gone(name):
        raise ImportError(name)

    monkeypatch.setattr(importlib, "import_module", gone)
    with pytest.raises(Absent, match="measure it from a checkout"):
        layer("decode_layer")


@pytest.mark.parametrize("norm", ["layer", "rms"])
def test_a_denoise_loop_is_checked_and_set_beside_its_compiled_twin(norm, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    (case,) = (case for case in cases.select(["denoise_loop"]) if case.own)
    options = {**case.options, "sizes": [2, 64, 4, 16, 128, 1, 1, 8, 3, norm]}  # tokens are the case's
    small = replace(case, dims={"batch": 2, "tokens": 12, "context": 10}, options=options)
    work = build(small, device="cpu")
    result = work.call()
    assert 0 < work.verify(result) < programs.OFF_LOOP[False]
    read, written = work.traffic(result)
    weights = 2 * 2 * 64 * (3 * 64 + 3 * 64 + 2 * 128)  # bytes of two blocks, which three steps read
    assert 3 * weights < read < 1.5 * 3 * weights and written == 4 * 2 * 12 * 8 and work.result_bytes(result) == 0
    theirs = rivals.call_of("compile_graph", work)()
    assert rivals.agrees(result, theirs, 2e-2) and not torch.equal(result, theirs)
    with pytest.raises(Wrong, match="off by"):
        work.verify(result * 1.05)
    coded = build(replace(small, options={**options, "fp8": True}), device="cpu")
    assert 0 < coded.verify(coded.call()) < programs.OFF_LOOP[True] and coded.traffic(result)[0] < 0.7 * read
    with pytest.raises(Absent, match="is bf16"):
        rivals.call_of("compile_graph", coded)


def test_a_product_of_jax_is_timed_in_a_queue(monkeypatch):
    pytest.importorskip("jax", reason="jax is not installed: pip install jax")
    (case,) = (case for case in cases.select(["jax_gemm_fp8"]) if case.own)
    small = replace(case, dims={"tokens": 64, "columns": 48, "hidden": 96})
    monkeypatch.setattr(run, "build", lambda case: build(case, device="cpu"))
    for name, few in (("QUEUED", 2), ("BATCHES", 3), ("WARM", 1)):
        monkeypatch.setattr(programs, name, few)
    row = run.measure(small, [])
    assert row["us"] > 0 and row["method"] == "queue" and 0 < row["error"] < 1.8e-3 * 1.1
    assert row["rivals"].keys() == {"jax_bf16", "jax_codes"} and row["absent"] == {}
    assert row["measured"] == pytest.approx(row["rivals"]["jax_bf16"] / row["us"])
    assert row["bytes"] == [2 * (64 * 96 + 96 * 48), 2 * 64 * 48]
    work = build(small, device="cpu")
    with pytest.raises(Wrong, match="relative RMS error"):
        work.verify(work.call() * 1.01)


def test_rivals_of_programs_are_of_no_other_case():
    (case,) = (case for case in cases.select(["rms_norm_fwd"]) if case.own)
    work = build(replace(case, dims={"tokens": 4, "hidden": 64}), device="cpu")
    for name in rivals.OF_PROGRAMS:
        assert rivals.missing(name) is None
        with pytest.raises(Absent, match=f"{name} has nothing for rms_norm"):
            rivals.call_of(name, work)
