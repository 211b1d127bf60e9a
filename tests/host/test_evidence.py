"""Recorded rows: what is kept, what is refused, which are still of today's code."""

from __future__ import annotations

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path

import pytest

from tilewright.bench import evidence, source
from tilewright.bench.cases import CASES
from tilewright.core.target import TARGETS
from tilewright.runtime import source as code

CASE = "rms_norm_fwd/8192x2048"


def row(case: str = CASE, gpu: str = "NVIDIA H200", us: float = 18.0) -> evidence.Row:
    return {
        "op": "rms_norm", "case": case, "direction": "forward", "dims": {"tokens": 8192, "hidden": 2048}, "us": us,
        "floor_us": 17.5, "fraction": 17.5 / us, "rivals": {"eager": 90.0}, "error": 1.66e-3, "extra_bytes": 0,
        "host_us": 11.0, "method": "graph", "bytes": [1, 2], "gpu": gpu, "arch": "sm_90", "sms": 132, "torch": "2.11",
        "triton": "3.6.0", "date": "2026-11-15", "source": source.source(CASE),
    }  # fmt: skip


def test_a_case_is_recorded_once_and_replaced(tmp_path):
    evidence.record([row(us=20.0), row("silu_fwd/8192x2048")], tmp_path)
    evidence.record([row(us=18.0), row("not a case any more"), row(gpu="Another GPU!")], tmp_path)
    rows = evidence.read(tmp_path / "nvidia-h200.jsonl")
    assert [r["case"] for r in rows] == [
        CASE,
        "silu_fwd/8192x2048",
        "not a case any more",
    ]  # in the order of the suites
    assert rows[0]["us"] == 18.0
    assert len(evidence.everything(tmp_path)) == 4 and (tmp_path / "another-gpu.jsonl").exists()


def test_a_case_has_a_row_for_each_release_of_triton(tmp_path):
    """Another build of the same release replaces it."""
    evidence.record([{**row(us=20.0), "triton": "3.9.0"}, row(us=18.0)], tmp_path)
    evidence.record([{**row(us=19.0), "triton": "3.9.1"}], tmp_path)
    rows = evidence.read(tmp_path / "nvidia-h200.jsonl")
    assert [(r["triton"], r["us"]) for r in rows] == [("3.6.0", 18.0), ("3.9.1", 19.0)]
    assert len({evidence.key_of(r) for r in rows}) == 2
    stale = evidence.stale_keys([rows[0], {**rows[1], "source": "x"}])
    assert stale == {("NVIDIA H200", CASE, "3.9")}


def test_no_two_recorded_rows_are_of_the_same():
    recorded = evidence.everything()
    assert recorded and len({evidence.key_of(r) for r in recorded}) == len(recorded)


def test_a_row_without_its_rival_replaces_none_that_has_it(tmp_path):
    """It is kept aside, where nothing counts it; a rival that is new, or the same ones, may replace."""
    evidence.record([row(us=20.0)], tmp_path)
    bare = {**row(us=18.0), "rivals": {}, "absent": {"eager": "it raised"}}
    (said,) = evidence.record([bare], tmp_path)
    assert said.startswith(f"{CASE}: kept aside: the recorded row has eager") and "eager: it raised" in said
    assert "--rivals eager" in evidence.record([{**bare, "absent": {}}], tmp_path)[0]
    assert [r["us"] for r in evidence.everything(tmp_path)] == [20.0]
    (aside,) = evidence.read(tmp_path / evidence.ASIDE / "nvidia-h200.jsonl")
    assert aside["us"] == 18.0 and aside["rivals"] == {}
    assert evidence.record([{**bare, "triton": "3.9.0"}], tmp_path) == []  # of another Triton there was none
    assert evidence.record([{**row(us=17.0), "rivals": {"eager": 1.0, "liger": 2.0}}], tmp_path) == []
    assert [r["us"] for r in evidence.everything(tmp_path)] == [17.0, 18.0]


@pytest.mark.parametrize(
    "text, words",
    [
        ("{", ":2 is not JSON"),
        ("[1]", ":2 is not an object"),
        ('{"op": "x"}', ":2 lacks case"),
        (json.dumps({**row(), "us": "fast"}), ":2 has us"),
        (json.dumps({**row(), "rivals": {"a": "b"}}), "not a number"),
        (json.dumps({**row(), "absent": {"a": None}}), "absent without a reason"),
        ("[" * 100_000, ":2 is not JSON"),
    ],
)
def test_a_damaged_file_is_named_and_left_as_it_is(tmp_path, text, words):
    path = tmp_path / "nvidia-h200.jsonl"
    path.write_text(json.dumps(row()) + "\n" + text + "\n")
    before = path.read_text()
    with pytest.raises(evidence.Damaged, match=words):
        evidence.record([row()], tmp_path)
    assert path.read_text() == before


def test_a_row_that_is_none_is_not_recorded(tmp_path):
    with pytest.raises(ValueError, match="lacks us"):
        evidence.record([{k: v for k, v in row().items() if k != "us"}], tmp_path)
    assert not list(tmp_path.iterdir())


def _record_many(where: Path, who: int) -> None:
    for i in range(20):
        evidence.record([row(f"case {who} {i}")], where)


def test_two_runs_at_once_lose_nothing(tmp_path):
    runs = [multiprocessing.Process(target=_record_many, args=(tmp_path, who)) for who in range(3)]
    for one in runs:
        one.start()
    for one in runs:
        one.join()
    assert len(evidence.read(tmp_path / "nvidia-h200.jsonl")) == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == [".nvidia-h200.jsonl.lock", "nvidia-h200.jsonl"]


def test_an_interrupted_write_keeps_the_old_file(tmp_path, monkeypatch):
    evidence.record([row(us=20.0)], tmp_path)

    def fail(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(evidence.os, "fsync", fail)
    with pytest.raises(KeyboardInterrupt):
        evidence.record([row(us=18.0)], tmp_path)
    assert evidence.read(tmp_path / "nvidia-h200.jsonl")[0]["us"] == 20.0
    assert not [p for p in tmp_path.iterdir() if p.name.count(".jsonl.") and "lock" not in p.name]


def test_a_row_is_stale_when_what_it_measured_has_changed(monkeypatch):
    assert evidence.freshness(row()) == "fresh"
    assert evidence.freshness({**row(), "source": "0" * 16}) == "stale"
    assert evidence.freshness({**row(), "case": "gone"}) == "stale"
    assert evidence.freshness({**row(), "arch": "sm_70"}) == "stale"
    assert evidence.state("rms_norm", [row()]) == "fresh" and evidence.state("glu", [row()]) == "none"
    assert evidence.state("rms_norm", [row(), {**row(), "source": "x"}]) == "stale"


def test_the_source_follows_what_is_launched():
    target = TARGETS["sm_90"]
    case = CASES[CASE]
    first = source.digest(case, target)
    assert first == source.digest(case, target)
    assert first != source.digest(replace(case, dims={"tokens": 8192, "hidden": 4096}), target)
    assert first != source.digest(CASES["rms_norm_bwd/8192x2048"], target)
    assert first != source.digest(replace(case, options={"weight": False}), target)


def test_the_source_holds_every_function_that_a_kernel_calls():
    from tilewright.ops.norm import rms_norm

    texts = list(code.sources(rms_norm.rms_norm_forward.jit))
    functions = [text for text in texts if "def " in text]  # constants are told with each function that has them
    assert "def rms_norm_forward" in texts[0] and len(functions) > 1 and len(set(functions)) == len(functions)
    assert not any(line.startswith("#") or line != line.strip() for text in texts for line in text.splitlines())
