"""The demonstration: it trains and agrees, it fails when a part is wrong, and all parts make the same model."""

from __future__ import annotations

import dataclasses
import json
import math
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.commands import demo as command
from tilewright.demo import model, train
from tilewright.demo.model import Sizes

SMALL = dataclasses.replace(
    train.CPU, sizes=Sizes(hidden=32, layers=1, heads=2, experts=4, expert_hidden=32, length=16, batch=4)
)


@pytest.fixture
def demo(monkeypatch, tmp_path):
    """The command on a small model without a GPU: (exit status, what it printed, its last line of error, the picture)."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(train, "CPU", SMALL)

    def run(*words: str) -> tuple[int, str, str]:
        out = tmp_path / "curves.png"
        result = CliRunner().invoke(app, ["demo", "--steps", "4", "--out", str(out), *words])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        return result.exit_code, result.stdout, (result.stderr.strip().splitlines() or [""])[-1], out

    return run


def test_it_trains_and_the_curves_agree(demo):
    status, out, _, path = demo("--no-interpreter", "--json")
    found = json.loads(out)
    plain, ours = found["runs"]
    assert status == 0 and len(plain["losses"]) == len(ours["losses"]) == 4
    assert plain["losses"][-1] < plain["losses"][0] < math.log(256) + 0.5
    assert found["parting"]["tilewright"]["most"]["whole"] < 1e-4 and found["interpreter"] is None
    assert plain["step_ms"] > 0 and path.read_bytes().startswith(b"\x89PNG")


def test_it_prints_both_curves(demo):
    status, out, _, path = demo("--no-interpreter")
    assert status == 0 and str(path) in out.replace("\n", "")
    for words in ("plain PyTorch", "tilewright", "ms a step", "peak", "reference"):
        assert words in out


def scaled_loss(logits, labels):
    return 1.1 * tw.cross_entropy(logits, labels)


def infinite_loss(logits, labels):
    return tw.cross_entropy(logits, labels) * math.nan


def forgetful_experts(sizes):
    return tw.nn.MoEFeedForward(
        sizes.hidden, sizes.expert_hidden, sizes.experts, sizes.chosen, norm=False, normalize=False
    )


@pytest.mark.parametrize(
    "broken", [dict(cross_entropy=scaled_loss), dict(experts=forgetful_experts), dict(cross_entropy=infinite_loss)]
)
def test_a_broken_part_fails(demo, monkeypatch, broken):
    monkeypatch.setitem(model.PARTS, model.OURS, dataclasses.replace(model.PARTS[model.OURS], **broken))
    status, _, said, _ = demo("--no-interpreter", "--steps", "20")
    assert status == 1 and said.startswith("tilewright: tilewright parts from plain PyTorch by")


@pytest.mark.parametrize(
    ("step", "said"),
    [
        ({"error": "no interpreter"}, "no interpreter"),
        ({"launches": {}, "loss_error": 0.0, "gradient_error": 0.0}, "no kernel"),
        ({"launches": {"k": 1}, "loss": 1.0, "loss_after": 0.9, "loss_error": 0.0, "gradient_error": 0.01}, "0.01"),
        (
            {"launches": {"k": 1}, "loss": 1.0, "loss_after": 0.9, "loss_error": 0.0, "gradient_error": math.nan},
            "from plain",
        ),
    ],
)
def test_a_wrong_interpreted_step_fails(demo, monkeypatch, step, said):
    monkeypatch.setattr(command, "_interpreted", lambda seed: step)
    status, _, last, _ = demo("--json")
    assert status == 1 and said in last


def test_the_interpreted_step_runs_kernels():
    step = command._interpreted(0)
    assert {"rms_norm_forward", "rms_norm_backward", "glu_forward", "glu_backward", "cross_entropy_forward"} <= set(
        step["launches"]
    ), step
    assert step["loss_error"] < command.STEP_TOLERANCE and step["gradient_error"] < command.STEP_TOLERANCE
    assert step["loss_after"] < step["loss"]


@pytest.mark.parametrize("fp8", [True, False])
def test_on_a_gpu_experts_in_fp8_are_a_curve_of_their_own(demo, monkeypatch, fp8):
    for name, value in (("is_available", True), ("current_device", 0), ("get_device_name", "a GPU")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    monkeypatch.setattr(command, "_target", lambda device: SimpleNamespace(fp8=fp8))
    monkeypatch.setattr(train, "train", lambda name, setting, *, steps, **_: train.Run(name, [3.0] * steps, 1.0, 2**20))
    status, out, _, _ = demo("--json")
    found = json.loads(out)
    names = [model.PLAIN, model.OURS, *([model.FP8] if fp8 else [])]
    assert status == 0 and [run["name"] for run in found["runs"]] == names
    assert found["dtype"] == "bfloat16" and any("no FP8" in note for note in found["notes"]) != fp8


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--steps", "-1"], "--steps"), (["--out", "no/such/folder/a.png"], "--out"), (["--out", "a.txt"], ".png")],
)
def test_bad_input_is_one_line(demo, words, said):
    status, out, last, _ = demo(*words)
    assert status == 2 and out == "" and said in last


def test_parting():
    a, b = train.Run("a", [3.0, 2.0, 1.0]), train.Run("b", [3.0, 2.0, 1.3])
    assert train.smooth([1.0, 3.0, 8.0], 2) == [1.0, 2.0, 5.5]
    assert train.parting(a, a) == (0, 0) and train.parting(a, b) == pytest.approx((0.1, 0.1))
    assert train.parting(a, train.Run("c", [3.0, math.nan, 1.0])) == (math.inf, math.inf)
    late = train.parting(train.Run("a", [1.0] * 30), train.Run("b", [1.0] * 20 + [1.2] * 10))
    assert late == pytest.approx((0, 0.2))


def test_every_run_sees_the_same_text():
    first, again, other = (torch.stack([*train.batches(SMALL.sizes, 3, seed)]) for seed in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.shape == (3, 4, 17) and first.max() < 256
    assert len(train.TEXT.read_bytes()) > 50_000


@pytest.mark.parametrize("name", [model.OURS, model.FP8])
def test_all_parts_make_one_model(name):
    sizes = Sizes(hidden=32, layers=2, heads=2, experts=5, expert_hidden=128, length=16, batch=2)
    (text,) = train.batches(sizes, 1, 0)
    plain, ours = (train.build(one, sizes, 0) for one in (model.PLAIN, name))
    assert all(map(torch.equal, plain.parameters(), ours.parameters()))
    assert isinstance(ours.layers[0].experts, tw.nn.MoEFeedForward)
    losses = [network(text) for network in (plain, ours)]
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses)
    for one, other in zip(plain.parameters(), ours.parameters()):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_plain_experts_are_what_they_say():
    torch.manual_seed(0)
    sizes = Sizes(hidden=16, layers=1, heads=1, experts=3, expert_hidden=8, length=1, batch=1)
    layer, x = model.Experts(sizes), torch.randn(5, 16)
    probability, expert = torch.softmax(x @ layer.router.t(), -1).topk(2)
    want = torch.zeros(5, 16)
    for t in range(5):
        for p, e in zip(probability[t] / probability[t].sum(), expert[t]):
            gate, up = (layer.gate_up[e] @ x[t]).chunk(2)
            want[t] += p * (layer.down[e] @ (torch.nn.functional.silu(gate) * up))
    y, _ = layer(x)
    torch.testing.assert_close(y, want)


@pytest.mark.filterwarnings("ignore:mkldnn_matmul failed")  # torch, on a CPU without bf16
def test_in_bf16_it_learns_alike():
    coarse = dataclasses.replace(SMALL, dtype=torch.bfloat16)
    rough, exact = (
        train.train(model.OURS, setting, steps=8, seed=0, device=torch.device("cpu")) for setting in (coarse, SMALL)
    )
    assert exact.losses[-1] < exact.losses[0] - 0.2 and train.parting(rough, exact).whole < 0.02
