"""The examples, small and on a CPU: each runs, prints what it shows, and a patched model goes the way of the plain one."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOK = ROOT / "examples" / "first_ten_minutes.ipynb"
NEEDS = {
    "trainer": ("transformers", "accelerate"),
    "lora_moe": ("transformers", "peft"),
    "trl_sft": ("trl", "accelerate"),
}


def shown(name: str, steps: int, monkeypatch, capsys) -> str:
    """What the example prints."""
    for module in NEEDS.get(name, ()):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed: pip install {module}")
    example = importlib.import_module(f"examples.{name}")
    monkeypatch.setattr(sys, "argv", [f"{name}.py", "--steps", str(steps)])
    example.main()
    return capsys.readouterr().out


@pytest.mark.parametrize("name", NEEDS)
def test_a_patched_model_learns_as_the_plain_one(name, monkeypatch, capsys):
    out = shown(name, 4, monkeypatch, capsys)
    pairs = [tuple(map(float, pair)) for pair in re.findall(r"^step \d+: loss ([\d.]+), patched ([\d.]+)$", out, re.M)]
    assert len(pairs) == 4 and all(abs(plain - patched) < 2e-4 for plain, patched in pairs)
    assert pairs[-1][1] < pairs[0][1]
    assert " replaced, 0 skipped (tilewright " in out and re.search(r"^calls: \{.*'rms_norm': \d+", out, re.M)
    assert "'linear_cross_entropy': 4" in out


def test_fsdp2_on_one_process(monkeypatch, capsys):
    losses = [
        float(loss) for loss in re.findall(r"^step \d: loss ([\d.]+)$", shown("fsdp2", 3, monkeypatch, capsys), re.M)
    ]
    assert len(losses) == 3 and losses[-1] < losses[0]


@pytest.mark.parametrize(("words", "most"), [((), 0.1), (("--bf16",), 1e-2)], ids=["fp8", "bf16"])
def test_a_decoder_layer_is_near_torchs_own_operators(words, most, monkeypatch, capsys):
    """Roundings of products are what is left: each of e4m3 codes is off by 3.7e-2, of bf16 numbers by 1.7e-3."""
    example = importlib.import_module("examples.decode_layer")
    monkeypatch.setattr(sys, "argv", ["decode_layer.py", "--steps", "3", "--batch", "3", *words])
    example.main()
    lines = re.findall(r"^step \d: off by (\S+), the stream by (\S+)$", capsys.readouterr().out, re.M)
    assert len(lines) == 3
    assert all(float(update) < most and float(stream) < most / 3 for update, stream in lines)


@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize(("words", "most"), [(("--fp8",), 0.06), ((), 1e-2)], ids=["fp8", "bf16"])
def test_a_denoise_loop_is_near_torchs_own_operators(words, most, norm, monkeypatch, capsys):
    example = importlib.import_module("examples.denoise")
    monkeypatch.setattr(sys, "argv", ["denoise.py", "--norm", norm, *words])
    example.main()
    lines = re.findall(r"^(\w+) times: off by (\S+)$", capsys.readouterr().out, re.M)
    assert [times for times, _ in lines] == ["equal", "squared"]
    assert all(float(off) < most for _, off in lines)


def test_a_calibration_that_sees_zeros_alone_writes_a_scale_that_is_not_0():
    """One of 0 would turn the zeros into NaN (docs/contracts.md)."""
    layer, loops = importlib.import_module("examples.decode_layer"), importlib.import_module("examples.denoise")
    step, loop = layer.build(layer.TINY, 2, 20, True, "cpu"), loops.build(loops.TINY, 1, True, "cpu")
    for zero in (step.update, step.stream, loop.context):
        zero.zero_()
    for one, scales in ((step, [step.scales]), (loop, loop.scales)):
        one.calibrate()
        written = torch.cat([scale for mine in scales for scale in mine.values()])
        assert written.min() == torch.tensor(1e-12) and written.max() > 1e-6
    assert all(t.isfinite().all() for t in (*step(), loop()))


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a CUDA device")
def test_a_programs_calls_are_counted_without_a_gpu(monkeypatch, capsys):
    lines = shown("aten", 1, monkeypatch, capsys).splitlines()
    assert lines[0].split()[:5] == ["overload", "dtype", "layout", "bytes", "calls"]
    assert any(line.startswith("_softmax ") and "1 flat, dim first" in line for line in lines)
    assert lines[-1].startswith("there is no GPU whose operators could be replaced")


def test_the_notebook_runs(tmp_path):
    cells = json.loads(NOTEBOOK.read_text())["cells"]
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code), "outputs are not committed"
    (tmp_path / "notebook.py").write_text("\n".join("".join(cell["source"]) for cell in code))
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "notebook.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "12 replaced, 0 skipped" in done.stdout and "'linear_cross_entropy': 5" in done.stdout
    errors = {who: float(value) for who, value in re.findall(r"^(torch|tilewright) +([\d.e-]+)$", done.stdout, re.M)}
    assert errors["tilewright"] < errors["torch"]
