"""The speed of light on a pretended device: the best shape wins, the sustained rate is the one after the second."""

from __future__ import annotations

import json
import sys
import types

import pytest
import torch
from typer.testing import CliRunner

from tests.pretended import Pretended
from tilewright.__main__ import app
from tilewright.bench import sol

SHAPES = ((1024, 1024, 1024), (2048, 1024, 1024), (1024, 1024, 2048))


class Throttled(Pretended):
    """Half as fast once it has worked for half a second without a pause."""

    def work(self, cost: float, effect=lambda: None) -> None:
        super().work(cost if self.now < 5e5 else 2 * cost, effect)


def product(device: Pretended, cost: dict):
    return lambda M, N, K: lambda: device.work(cost[M, N, K])


def test_the_best_shape_and_its_sustained_rate():
    device = Throttled()
    cost = dict(zip(SHAPES, (40.0, 50.0, 60.0)))  # the second does most work a microsecond
    clocks = []

    def clock() -> int:
        clocks.append(device.now)
        return 1455

    found = sol.matrix("bf16", product(device, cost), device, clock, SHAPES)
    flops = 2.0 * 2048 * 1024 * 1024
    assert found.shape == SHAPES[1] and found.unit == "TFLOP/s" and found.clock_mhz == 1455
    assert found.burst == pytest.approx(flops / 50.0 / 1e6)
    assert found.sustained == pytest.approx(flops / 100.0 / 1e6)
    assert len(clocks) == 1 and clocks[0] > sol.SUSTAINED_US


def test_the_best_maker_counts():
    device = Pretended()
    slow, quick = dict(zip(SHAPES, (40.0, 50.0, 60.0))), dict(zip(SHAPES, (90.0, 90.0, 45.0)))
    makers = {"torch": product(device, slow), "tilewright": product(device, quick)}
    found = sol.matrix("bf16", makers, device, lambda: None, SHAPES)
    assert (found.by, found.shape) == ("tilewright", SHAPES[2])
    del makers["tilewright"]
    found = sol.matrix("bf16", makers, device, lambda: None, SHAPES)
    assert (found.by, found.shape) == ("torch", SHAPES[1])


def test_a_dtype_that_is_not_there_says_why():
    def none(M, N, K):
        raise RuntimeError("_scaled_mm is only supported on newer chips\nsecond line")

    found = sol.matrix("fp8", none, Pretended(), lambda: None, SHAPES)
    assert found.burst is None and found.note == "RuntimeError: _scaled_mm is only supported on newer chips"
    device = Pretended()

    def large_only(M, N, K):
        if M < 2048:
            raise RuntimeError("too small")
        return lambda: device.work(100.0)

    found = sol.matrix("int8", large_only, device, lambda: None, SHAPES)
    assert found.shape == SHAPES[1] and found.unit == "TOP/s" and found.note == "" and found.clock_mhz is None


def test_bandwidth_counts_what_is_read_and_written():
    asked = []

    def floor(read: int, written: int) -> float:
        asked.append((read, written))
        return 250.0

    for what in ("copy", "read", "write"):
        assert sol.bandwidth(what, floor).burst == pytest.approx(sol.STREAMED / 250.0 / 1e6)
    assert asked[0][0] == asked[0][1] and asked[1][1] == 0 and asked[2][0] == 0
    assert {sum(pair) for pair in asked} == {sol.STREAMED}


def test_tf32_is_as_it_was_afterwards():
    before = torch.backends.cuda.matmul.allow_tf32
    with pytest.raises(ValueError), sol.tf32():
        assert torch.backends.cuda.matmul.allow_tf32
        raise ValueError
    assert torch.backends.cuda.matmul.allow_tf32 == before


def test_the_clock_comes_from_whatever_is_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert sol.sm_clock() is None
    tool = tmp_path / "nvidia-smi"
    tool.write_text('#!/bin/sh\n[ "$1" = --query-gpu=clocks.sm ] && [ "$3" = --id=1 ] && echo 1980\n')
    tool.chmod(0o755)
    assert sol.sm_clock(1) == 1980
    assert sol.sm_clock(0) is None  # it printed nothing
    nvml = types.SimpleNamespace(
        NVML_CLOCK_SM=1,
        nvmlInit=lambda: None,
        nvmlDeviceGetHandleByIndex=lambda index: index,
        nvmlDeviceGetClockInfo=lambda handle, kind: 1500 + 10 * handle + kind,
    )
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    assert sol.sm_clock(2) == 1521


def test_the_command_shows_every_row(monkeypatch):
    light = {name: sol.Light(name, "TB/s", 4.2871) for name in ("copy", "read", "write")}
    light |= {name: sol.Light(name, "TFLOP/s", 812.7, 690.2, (8192, 8192, 4096), 1455) for name in sol.PRODUCTS}
    light["fp8"] = sol.Light("fp8", "TFLOP/s", None, note="RuntimeError: no")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Pretended GPU")
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(sol, "measure", light.__getitem__)
    done = CliRunner().invoke(app, ["sol", "--json"])
    made = json.loads(done.stdout)
    assert done.exit_code == 0 and made["gpu"] == "Pretended GPU" and {"torch", "triton"} <= set(made)
    rows = {row["what"]: row for row in made["rows"]}
    assert set(rows) == set(sol.NAMES) and rows["bf16"]["shape"] == [8192, 8192, 4096] and rows["fp8"]["burst"] is None
    assert rows["bf16"]["sustained"] == 690.2 and rows["bf16"]["clock_mhz"] == 1455
    text = CliRunner().invoke(app, ["sol"], env={"COLUMNS": "160"}).stdout
    assert "4.29" in text and "813" in text and "8192x8192x4096" in text and "RuntimeError: no" in text
