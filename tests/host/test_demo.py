"""The demonstration: it trains and agrees, it fails when an op is wrong, and its FP8 products are products."""

from __future__ import annotations

import dataclasses
import json
import math

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.commands import demo as command
from tilewright.demo import fp8, model, train
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
    assert ours["implementations"]["add_rms_norm"] == {"reference": 2} and not plain["implementations"]
    assert plain["step_ms"] > 0 and path.read_bytes().startswith(b"\x89PNG")


def test_it_prints_both_curves(demo):
    status, out, _, path = demo("--no-interpreter")
    assert status == 0 and str(path) in out.replace("\n", "")
    for words in ("plain PyTorch", "tilewright", "ms a step", "peak", "cross_entropy", "reference"):
        assert words in out


def scaled_loss(logits, labels):
    return 1.1 * model.tw.cross_entropy(logits, labels)


def forgetful_glu(x, *, scale, offsets):
    return model.tw.glu(x, offsets=offsets)


def infinite_loss(logits, labels):
    return model.tw.cross_entropy(logits, labels) * math.nan


@pytest.mark.parametrize(
    "broken", [dict(cross_entropy=scaled_loss), dict(glu=forgetful_glu), dict(cross_entropy=infinite_loss)]
)
def test_a_broken_op_fails(demo, monkeypatch, broken):
    make = model.tilewright
    monkeypatch.setattr(model, "tilewright", lambda *wrap: dataclasses.replace(make(*wrap), **broken))
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


@pytest.mark.parametrize("align", [1, 128])
def test_choices_are_sorted_by_expert(align):
    expert = torch.tensor([2, 0, 2, 2, 4, 0] * 50)
    row, ends = model.sorted_places(expert, 5, align)
    starts = [0, *ends.tolist()]
    assert ends.dtype == torch.int32 and len(set(row.tolist())) == len(row)
    for e in range(5):
        count = int((expert == e).sum())
        assert starts[e + 1] - starts[e] == -(-count // align) * align
        assert row[expert == e].tolist() == list(range(starts[e], starts[e] + count))  # in the order they came


def test_fp8_products_are_those_of_the_quantised_values():
    draw = torch.Generator().manual_seed(0)
    x, w, dy = (torch.randn(s, generator=draw) for s in ((384, 256), (3, 128, 256), (384, 128)))
    x, w, ends = x.requires_grad_(), w.requires_grad_(), torch.tensor([128, 128, 384])
    y = fp8.linear(x, w, ends)
    dx, dw = torch.autograd.grad(y, (x, w), dy)

    def both(t, format):  # the row-wise and the column-wise value
        one = [
            dataclasses.replace(format, ways=way).quantize(t.detach()).dequantize(torch.float32)
            for way in ("row", "col")
        ]
        return [v.reshape(t.shape) for v in one]

    (xr, xc), (gr, gc) = both(x, fp8.ACTIVATIONS), both(dy, fp8.ACTIVATIONS)
    wr = both(w.flatten(0, 1), fp8.WEIGHTS)[0].view(3, 128, 256)
    for e, rows in enumerate(map(slice, (0, 128, 128), ends.tolist())):
        torch.testing.assert_close(y[rows], xr[rows] @ wr[e].t(), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dx[rows], gr[rows] @ wr[e], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(dw[e], gc[rows].t() @ xc[rows], rtol=1e-4, atol=1e-4)
    assert not dw[1].any()


def test_the_fp8_model_is_the_same_model():
    sizes = Sizes(hidden=128, layers=1, heads=2, experts=4, expert_hidden=128, length=32, batch=2)
    setting = dataclasses.replace(SMALL, sizes=sizes)
    (text,) = train.batches(sizes, 1, 0)
    grads = {}
    for make in (model.plain, model.tilewright_fp8):
        network = train.build(make(), setting, 0, text.device)
        loss = network(text)
        loss.backward()
        grads[make] = loss.detach(), [p.grad for p in network.parameters()]
    (a, these), (b, those) = grads.values()
    assert abs(a - b) < 0.02
    for one, other in zip(these, those):
        # e4m3 rounds by 2.6 % on average, and three products in a row touch every gradient
        assert (one - other).norm() < 0.15 * one.norm()


def test_fp8_says_why_not(monkeypatch):
    assert fp8.why_not(torch.device("cpu")) is None
    right = tw.grouped_mm
    monkeypatch.setattr(tw, "grouped_mm", lambda *args, **options: 1.1 * right(*args, **options))
    assert "differs" in fp8.why_not(torch.device("cpu"))

    def missing(*args, **options):
        raise RuntimeError("no kernel for this chip\nand more")

    monkeypatch.setattr(tw, "grouped_mm", missing)
    assert fp8.why_not(torch.device("cpu")) == "no kernel for this chip"
