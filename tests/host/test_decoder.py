"""Decoder layers of transformers as a whole: which are taken for one, and what is left to their modules' own code."""

from __future__ import annotations

import pytest
import torch
import transformers
from torch import nn

from tests.transformer_models import FP32, IDS, LABELS, SIZES, build, error, step
from tilewright.integrations.huggingface import projections
from tilewright.integrations.huggingface.patching import patch
from tilewright.integrations.huggingface.projections import joined, projected


def layers(count: int, bias: bool) -> list[nn.Linear]:
    torch.manual_seed(0)
    return [nn.Linear(8, n, bias) for n in range(3, 3 + count)]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("used", [(0, 1, 2), (1,)], ids=str)
def test_layers_of_one_input(bias, used):
    """Some of the results may not be used, and some of the weights not learn."""
    made = layers(3, bias)
    made[2].weight.requires_grad_(False)
    x = torch.randn(2, 5, 8, requires_grad=True)
    leaves = [x, *(p for i in used for p in made[i].parameters() if p.requires_grad)]
    results = []
    for ys in (projected(x, *made), [layer(x) for layer in made]):
        grads = torch.autograd.grad(sum(ys[i].sin().sum() for i in used), leaves)
        results.append([*ys, *grads])
    assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(*results, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(*(r[:3] for r in results)))
    assert projected(x, *made)[0].grad_fn.name() == "ProjectedBackward"


def test_layers_that_are_more_than_a_product_are_called():
    made, x = layers(2, False), torch.randn(5, 8, requires_grad=True)
    seen = []
    with made[1].register_forward_hook(lambda *_: seen.append(1)):
        assert projected(x, *made)[1].grad_fn.name() != "ProjectedBackward" and seen == [1]
    with torch.no_grad():
        assert all(torch.equal(y, layer(x)) for y, layer in zip(projected(x, *made), made))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj = layers(2, False)

    def forward(self, x: torch.Tensor, other: torch.Tensor | None = None, fails: bool = False) -> torch.Tensor:
        assert self.q_proj.weight.shape == (3, 8)
        if fails:
            raise RuntimeError("on purpose")
        return self.q_proj(x).sum() + self.k_proj(x if other is None else other).sum()


def test_layers_are_joined_for_one_call(monkeypatch):
    attention, x, made = Attention(), torch.randn(5, 8, requires_grad=True), []
    names, original = ("q_proj", "k_proj"), projections.projected
    monkeypatch.setattr(projections, "projected", lambda *given: made.append(1) or original(*given))
    for other, count in ((None, 1), (x + 1, 2)):  # of different inputs all are made, and the right one taken
        made.clear()
        expected = attention(x, other)
        with joined(attention, names):
            assert torch.equal(attention(x, other), expected) and len(made) == count
        assert not {*names} & {*attention.__dict__}
    with pytest.raises(RuntimeError, match="on purpose"), joined(attention, names):
        attention(x, fails=True)
    assert not {*names} & {*attention.__dict__}
    with joined(attention, ("q_proj", "v_proj")):
        assert not {"q_proj", "v_proj"} & {*attention.__dict__}


def test_attention_that_projects_a_copy_under_checkpoints(monkeypatch):
    model, made = build("Llama", num_hidden_layers=1), []
    attention = model.model.layers[0].self_attn
    forward = type(attention).forward
    attention.forward = lambda hidden_states, **named: forward(attention, hidden_states.clone(), **named)
    _, grads = step(model)
    patch(model, only=["decoder"])
    model.gradient_checkpointing_enable()
    original = projections.projected
    monkeypatch.setattr(projections, "projected", lambda *given: made.append(1) or original(*given))
    for _ in range(2):
        assert error(step(model)[1], grads) < FP32
    assert len(made) == 2 * 2  # each again in the backward


def test_checkpoints_from_before_the_patch_and_of_another_class():
    """They are asked for before it, caches are left out, and a class derived after it, as FSDP derives one, keeps them."""
    model = build("Llama")
    _, grads = step(model)
    model.gradient_checkpointing_enable()
    report, told = patch(model), []
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(
            lambda _, given, named: told.append(named["past_key_values"]), with_kwargs=True
        )
    for kind in (None, "Derived"):
        for layer in model.model.layers if kind else ():
            layer.__class__ = type(kind, (type(layer),), {})
        report.counter.clear()
        told.clear()
        model.zero_grad()
        model(input_ids=IDS, labels=LABELS, use_cache=True).loss.backward()
        assert error({n: p.grad for n, p in model.named_parameters()}, grads) < FP32
        assert report.calls()["add_rms_norm"] == 2 * 2 and told == [None] * 4


def test_a_second_norm_with_a_hook_is_called():
    model = build("Llama")
    _, grads = step(model)
    report, seen = patch(model), []
    norm = model.model.layers[0].post_attention_layernorm
    with norm.register_forward_hook(lambda *_: seen.append(1)):
        assert error(step(model)[1], grads) < FP32 and seen == [1]
    assert report.calls()["rms_norm"] == 4 and report.calls()["add_rms_norm"] == 1


class Wrapper(nn.Module):
    """As adapters do it: what is wrapped shows through."""

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        self.wrapped = wrapped

    def __getattr__(self, name: str):
        return getattr(self._modules["wrapped"], name) if name != "wrapped" else super().__getattr__(name)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.wrapped(x)


def test_a_second_norm_that_was_wrapped_since_is_called():
    for wrapped, only in ((True, None), (False, None), (False, ["decoder"])):
        model = build("Llama")
        layer, (_, plain) = model.model.layers[0], step(model)
        report = patch(model, only=only)
        norm = layer.post_attention_layernorm
        if wrapped:
            layer.post_attention_layernorm = Wrapper(norm)
        else:
            inner = norm.forward
            norm.forward = lambda x: 2 * inner(x)  # noqa: B023
        _, grads = step(model)
        assert report.calls()["add_rms_norm"] == 1
        found = grads["model.layers.0.mlp.up_proj.weight"], plain["model.layers.0.mlp.up_proj.weight"]
        assert not torch.allclose(*found, rtol=0.1)


def test_a_layer_that_weighs_its_sums_stays_as_it_is():
    config = transformers.GraniteConfig(**SIZES, residual_multiplier=0.5, attention_multiplier=0.3)
    model = transformers.GraniteForCausalLM(config)
    report = patch(model)
    assert {r.role for r in report.replaced} >= {"norm", "mlp", "rotary"}
    assert [s.reason[:42] for s in report.skipped if s.role == "decoder"] == 2 * [
        "not x + mlp(norm(x + attention(norm(x)))):"
    ]


def test_projections_of_attention_are_made_together(monkeypatch):
    """Seen by their gradients: to the first product of each attention two are added, to that of each gated layer one."""
    model, added = build("Llama", mlp_bias=False), []
    original = torch.Tensor.addmm_
    monkeypatch.setattr(torch.Tensor, "addmm_", lambda *given: added.append(1) or original(*given))
    patch(model)
    step(model)
    assert len(added) == 2 * (2 + 1)
