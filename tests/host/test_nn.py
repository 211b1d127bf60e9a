"""The layers on a CPU: the op under them against the formula token by token, parameters, codes of weights, compilation."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright.nn.expert_codes import blocks_of, transposed_blocks

ACTS = {"silu": F.silu, "relu": F.relu, "gelu_erf": F.gelu}


def drawn(tokens=9, hidden=12, ffn=6, experts=4, k=3, dtype=torch.float64):
    source = torch.Generator().manual_seed(3)
    normal = lambda *shape: torch.randn(shape, generator=source, dtype=dtype)  # noqa: E731
    routing = torch.randint(-1, experts, (tokens, k), generator=source)
    return {
        "x": normal(tokens, hidden),
        "gate_up": 0.3 * normal(experts, 2 * ffn, hidden),
        "down": 0.3 * normal(experts, hidden, ffn),
        "routing": routing,
        "probs": torch.rand(tokens, k, generator=source, dtype=dtype),
    }


def by_token(x, gate_up, down, routing, probs, act="silu", limit=None, kept=lambda t, e: True):
    """The formula, one slot of a token at a time."""
    y = torch.zeros_like(x)
    for t in range(x.shape[0]):
        for e, p in zip(routing[t].tolist(), probs[t]):
            if e < 0 or not kept(t, e):
                continue
            gate, up = (gate_up[e] @ x[t]).chunk(2)
            if limit is not None:
                gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
            y[t] += p * (down[e] @ (ACTS[act](gate) * up))
    return y


@pytest.mark.parametrize(("act", "limit"), [("silu", None), ("relu", 0.5), ("gelu_erf", None)])
def test_the_reference_is_the_formula(act, limit):
    values = drawn()
    torch.testing.assert_close(
        tw.moe_feed_forward(**values, act=act, limit=limit), by_token(**values, act=act, limit=limit)
    )


def test_what_does_not_fit_is_dropped():
    """Pairs past the capacity, the last in the order of experts."""
    values = drawn()
    pairs = sorted({(e, t) for t, row in enumerate(values["routing"].tolist()) for e in row if e >= 0})
    kept = set(pairs[:10])
    y = tw.moe_feed_forward(**values, capacity=10)
    torch.testing.assert_close(y, by_token(**values, kept=lambda t, e: (e, t) in kept))
    assert len(pairs) > 12 and not torch.equal(y, tw.moe_feed_forward(**values))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"precision": "fp8"}, "gate_up must have a multiple of 256 rows in FP8, got 12"),
        ({"routing": None}, "probs is for tokens with a routing"),
        ({"routing": None, "probs": None}, "routing must be given, for gate_up has 4 experts"),
        (
            {"down": torch.zeros(4, 12, 7, dtype=torch.float64)},
            "gate_up has 12 rows, but must have two for each of the 7",
        ),
        ({"gate_up_scale": torch.zeros(4, 1)}, "gate_up_codes, gate_up_scale and gate_up_codes_t are given together"),
    ],
)
def test_errors_name_the_argument(change, message):
    with pytest.raises(ValueError, match=message):
        tw.moe_feed_forward(**{**drawn(), **change})


def test_codes_of_another_weight_are_refused():
    values = drawn(hidden=128, ffn=128, dtype=torch.bfloat16) | {"precision": "fp8"}
    q = tw.nn.quantize_experts(values["gate_up"])
    codes = {"gate_up_codes": q.data, "gate_up_scale": q.scale, "gate_up_codes_t": q.data_t}
    tw.moe_feed_forward(**values, **codes)
    for name, wrong in (("gate_up_scale", q.scale[:3]), ("gate_up_codes_t", q.data_t[:, :256])):
        with pytest.raises(ValueError, match=f"{name} must be"):
            tw.moe_feed_forward(**values, **{**codes, name: wrong})


@pytest.mark.parametrize("rows", [256, 130])
def test_blocks_begin_anew_at_each_expert(rows):
    weight = torch.randn(3, rows, 200, generator=torch.Generator().manual_seed(1))
    q = tw.nn.quantize_experts(weight)
    scale = blocks_of(q.scale, weight.shape)
    for e in range(3):
        alone = tw.fp8("128x128", ways="both").quantize(weight[e])
        assert torch.equal(q.data[e].view(torch.uint8), alone.data.view(torch.uint8))
        assert torch.equal(scale[e], alone.scale)
        there = transposed_blocks(q.data_t, weight.shape)[e]
        assert there.stride(0) == 1 and torch.equal(there.view(torch.uint8), alone.data.view(torch.uint8))
    with pytest.raises(ValueError, match="weight must be"):
        tw.nn.quantize_experts(weight[0])


# ---- layers ----------------------------------------------------------------------------------------------------------


def dense(**options) -> tw.nn.FeedForward:
    torch.manual_seed(0)
    return tw.nn.FeedForward(64, 128, **options)


def mixture(**options) -> tw.nn.MoEFeedForward:
    torch.manual_seed(0)
    return tw.nn.MoEFeedForward(64, 128, 4, 2, **options)


X = torch.randn(2, 7, 64, generator=torch.Generator().manual_seed(5))


def test_feed_forward_is_its_formula():
    layer = dense(residual=True)
    gate, up = F.linear(F.rms_norm(X, (64,), layer.norm, 1e-6), layer.gate_up).chunk(2, -1)
    torch.testing.assert_close(layer(X), X + F.linear(F.silu(gate) * up, layer.down))
    assert list(layer.state_dict()) == ["norm", "gate_up", "down"] and "precision=input" in repr(layer)


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_the_mixture_is_its_formula(score):
    layer = mixture(score=score, z_loss=0.1, balance_loss=0.2, shared_ffn=128, balance_bias=True)
    layer.bias += torch.tensor([0.0, 0.3, 0.0, -0.3])
    y, loss = layer(X)
    normed = F.rms_norm(X, (64,), layer.norm, 1e-6).flatten(0, 1)
    logits = normed @ layer.router.t()
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    chosen = (scores + layer.bias).topk(2).indices
    probs = scores.gather(1, chosen)
    probs = probs / probs.sum(1, keepdim=True)
    expected = by_token(normed, layer.gate_up, layer.down, chosen, probs) + layer.shared(normed)
    torch.testing.assert_close(y.flatten(0, 1), expected)
    share = torch.bincount(chosen.flatten(), minlength=4) / chosen.numel()
    balance = 4 * (share * (scores / scores.sum(1, keepdim=True)).mean(0)).sum()
    torch.testing.assert_close(loss, 0.1 * logits.logsumexp(1).square().mean() + 0.2 * balance)
    names = ["norm", "router", "gate_up", "down", "bias", "shared.gate_up", "shared.down"]
    assert sorted(layer.state_dict()) == sorted(names)
    without = mixture(norm=False)
    assert float(without(X)[1]) == 0.0 and without.norm is None


def test_state_goes_from_layer_to_layer():
    one, other = mixture(precision="fp8"), mixture(precision="fp8", shared_ffn=None)
    other.load_state_dict({n: 2 * t for n, t in one.state_dict().items()})
    assert not torch.equal(one(X)[0], other(X)[0])
    other.load_state_dict(one.state_dict())
    assert torch.equal(one(X)[0], other(X)[0])


def test_codes_are_made_once_for_each_version_of_a_weight():
    layer = mixture(precision="fp8").requires_grad_(False)
    layer(X)
    first = dict(layer.codes.made)
    layer(X)
    assert layer.codes.made["down"] is first["down"]
    layer.down.mul_(1.5)
    layer(X)
    assert layer.codes.made["gate_up"] is first["gate_up"] and layer.codes.made["down"] is not first["down"]
    assert not torch.equal(layer.codes.made["down"][1].dequantize(), first["down"][1].dequantize())
    assert not copy.deepcopy(layer).codes.made
    for change in (lambda: layer.to(torch.bfloat16), lambda: layer.load_state_dict(layer.state_dict())):
        layer(X.to(layer.down.dtype))
        change()
        assert not layer.codes.made
    before = layer.codes.of("down", layer.down)
    layer.down.data = layer.down.data.clone()
    assert layer.codes.of("down", layer.down) is not before


def test_codes_kept_until_cleared_outlive_micro_batches():
    layer = mixture(precision="fp8")
    layer.codes.until_cleared = True
    layer(X)[0].sum().backward()
    kept = layer.codes.made["down"]
    layer(X)[0].sum().backward()
    assert layer.codes.made["down"] is kept
    layer.codes.clear()
    layer(X)
    assert layer.codes.made["down"] is not kept


def test_nothing_but_the_input_is_kept_without_gradients(monkeypatch):
    layer, seen = dense(), []
    call = tw.moe_feed_forward.op.function
    monkeypatch.setattr(tw.moe_feed_forward.op, "function", lambda *a, **k: (seen.append(k["keep"]), call(*a, **k))[1])
    layer(X)
    with torch.no_grad():
        layer(X)
    assert seen == ["all", "input"]


@pytest.mark.parametrize("precision", ["input", "fp8"])
def test_layers_compile_whole(precision):
    torch._dynamo.reset()
    first, second = mixture(precision=precision, balance_loss=0.1, shared_ffn=128), dense(precision=precision)

    def run(call_first, call_second):
        x = X.clone().requires_grad_()
        y, loss = call_first(x)
        total = call_second(y).square().sum() + loss
        parameters = [*first.parameters(), *second.parameters()]
        return total, *torch.autograd.grad(total, [x, *parameters])

    compiled = [torch.compile(m, fullgraph=True, backend="aot_eager") for m in (first, second)]
    for got, expected in zip(run(*compiled), run(first, second)):
        # Gradients that meet at one tensor are added in another order
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("make", [mixture, lambda: tw.nn.FeedForward(64, 128, norm=False)])
def test_tokens_of_another_width_are_refused(make):
    layer = make()
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., 64\], got \[4, 32\]"):
        layer(torch.randn(4, 32))


def test_a_tiny_mixture_learns():
    torch.manual_seed(1)
    layer = tw.nn.MoEFeedForward(16, 8, 4, 2, residual=True, balance_loss=1e-2)
    step = torch.optim.Adam(layer.parameters(), lr=1e-2)
    x = torch.randn(64, 16)
    target = x.roll(1, -1).sign()
    losses = []
    for _ in range(60):
        y, more = layer(x)
        loss = (y - target).square().mean()
        losses.append(float(loss.detach()))
        step.zero_grad()
        (loss + more).backward()
        step.step()
    assert losses[-1] < 0.4 * losses[0]
