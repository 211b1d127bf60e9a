"""The fused loss of transformers' models: what stands between head and loss, outputs of every form, and what is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import transformers
from transformers import LlamaForCausalLM

from tests import transformer_models
from tests.survey.small import build
from tests.transformer_models import FP32, IDS, LABELS, error
from tilewright.integrations.huggingface.causal_loss import loss
from tilewright.integrations.huggingface.logit_curve import Curve, curve_of
from tilewright.integrations.huggingface.patching import patch, unpatch
from tilewright.integrations.huggingface.roles import Skip

# What models do with their logits: softcaps by several names, factors, quotients, both; and models whose outputs have fields of
# their own, or whose text backbone is inside a larger one.
CAPPED = {
    "recurrent_gemma": {"logits_soft_cap": 30.0}, "xlstm": {}, "gemma3n_text": {}, "muse_glimmer": {},
    "gemma4_text": {"final_logit_softcapping": 30.0},
}  # fmt: skip
SCALED = {
    "cohere": {"logit_scale": 0.0625}, "granite": {"logits_scaling": 8.0}, "falcon_h1": {"lm_head_multiplier": 0.5},
    "minicpm3": {},
}  # fmt: skip
FIELDS = ("mamba", "mamba2", "llama4_text", "nemotron_h")
IMAGES = ("qwen2_5_vl", "qwen3_vl", "gemma3", "gemma4", "llava", "mistral3")


def step(model: nn.Module) -> tuple[object, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(input_ids=IDS, labels=LABELS, use_cache=False)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def large(model: nn.Module, capped: bool) -> nn.Module:
    """With logits of hundreds, of both signs; with a softcap, they would be so without it."""
    with torch.no_grad():
        logits = model.eval()(IDS, use_cache=False).logits
        model.lm_head.weight.mul_(40 if capped else 300 / -logits.min())
    return model.train()


@pytest.mark.parametrize(
    ("kind", "more"), {**CAPPED, **SCALED, **dict.fromkeys((*FIELDS, *IMAGES), {})}.items(), ids=str
)
def test_the_loss_is_the_models_own_with_large_logits(kind, more):
    model = large(build(kind, **more), kind in CAPPED)
    before, grads = step(model)
    assert kind in CAPPED or (before.logits.max() > 100 and before.logits.min() < -100)
    report = patch(model, only="loss")
    after, again = step(model)
    assert report.calls() == {"linear_cross_entropy": 1}
    assert after.logits is None and {*after.keys()} == {*before.keys()} - {"logits"}
    torch.testing.assert_close(after.loss, before.loss, rtol=FP32, atol=0)
    assert error(again, grads) < 10 * FP32  # large logits have large errors
    unpatch(model)
    restored, last = step(model)
    assert torch.equal(restored.loss, before.loss) and all(torch.equal(last[n], grads[n]) for n in grads)


def test_curves_are_measured():
    for kind, more, expected in (
        ("recurrent_gemma", {"logits_soft_cap": 20.0}, Curve(1.0, 20.0)), ("cohere", {"logit_scale": 0.25}, Curve(0.25, None)),
        ("granite", {"logits_scaling": 8.0}, Curve(0.125, None)), ("llama", {}, Curve(1.0, None)),
    ):  # fmt: skip
        model = build(kind, **more)
        assert curve_of(model, type(model).forward) == expected


class Twisted(LlamaForCausalLM):
    """With a loss of something else than scaled and softcapped logits."""

    twist = staticmethod(lambda logits, training: logits)

    def forward(self, input_ids=None, labels=None, **named):
        hidden = self.model(input_ids=input_ids, **named).last_hidden_state
        logits = self.twist(self.lm_head(hidden), self.training)
        loss = None if labels is None else self.loss_function(logits, labels, self.config.vocab_size)
        return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)


TWISTS = {
    "clamped": lambda z, training: z.clamp(-250, 250),
    "above": lambda z, training: torch.where(z > 200, 200 + 0.1 * (z - 200), z),
    "negative": lambda z, training: torch.where(z < -100, 0.5 * z, z),
    "shifted": lambda z, training: z + 0.5 * torch.arange(z.shape[-1]),
    "masked": lambda z, training: z.index_fill(-1, torch.tensor([3, 4]), -1e9),
    "written": lambda z, training: z.masked_fill_(torch.arange(z.shape[-1]) < 5, -1e9),
    "evaluation": lambda z, training: z if training else z.clamp(-9, 9),
    "training": lambda z, training: z.clamp(-9, 9) if training else z,
    "normed": lambda z, training: z / z.norm(dim=-1, keepdim=True),
}


@pytest.mark.parametrize("twist", TWISTS)
def test_a_loss_of_other_logits_is_refused_by_name(twist, monkeypatch):
    model = transformer_models.build("Llama")
    model.__class__ = Twisted
    patch(model, only="loss").undo()
    monkeypatch.setattr(Twisted, "twist", staticmethod(TWISTS[twist]))
    with pytest.raises(ValueError, match="patch: Twisted: loss : not linear_cross_entropy: between head and loss, in"):
        patch(model, only="loss")
    before = model.train()(IDS, labels=LABELS).loss
    report = patch(model, strict=False)
    assert [s.role for s in report.skipped] == ["loss"]
    assert torch.allclose(model(IDS, labels=LABELS).loss, before, rtol=FP32)


def test_a_loss_of_the_models_own_code_is_left():
    class Own(LlamaForCausalLM):
        def forward(self, input_ids=None, labels=None, **named):
            logits = self.lm_head(self.model(input_ids=input_ids).last_hidden_state)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
            return transformers.modeling_outputs.CausalLMOutputWithPast(loss=loss, logits=logits)

    model = transformer_models.build("Llama")
    model.__class__ = Own
    for kind in ("linear_cross_entropy", "cross_entropy"):
        found = loss("", model, kind)
        assert isinstance(found, Skip) and not found.failed and "does not call its loss_function" in found.reason
    part = build("qwen2_5_vl").model.language_model  # without a head
    assert loss("", part, "linear_cross_entropy") is None


CALLS = ("llama", "gemma2", "qwen3_moe", "qwen2_5_vl", "gpt2", "mamba")
CONFIGS = ("gemma3", "mamba", "bloom")  # other models of transformers 5.22 fail with such a config


@pytest.mark.parametrize(("kind", "asked"), [*((k, "call") for k in CALLS), *((k, "config") for k in CONFIGS)])
def test_tuples_are_the_models_own(kind, asked):
    model = build(kind).train()
    if asked == "config":
        model.config.return_dict = False
    named = {"return_dict": False} if asked == "call" else {}
    if "moe" in kind:
        named["output_router_logits"] = True

    def run(**more: object) -> tuple:
        torch.manual_seed(0)
        return model(input_ids=IDS, labels=LABELS, **named, **more)

    before = run()
    report = patch(model, only="loss")
    after = run()
    assert report.calls() == {"linear_cross_entropy": 1} and type(after) is tuple and len(after) == len(before)
    at = next(i for i, part in enumerate(before) if isinstance(part, torch.Tensor) and part.dim() == 3)
    assert after[at] is None and before[at].shape[-1] == model.lm_head.out_features
    torch.testing.assert_close(after[0], before[0], rtol=FP32, atol=0)
    assert [type(a) for a in after[at + 1 :]] == [type(b) for b in before[at + 1 :]]
    asked = run(return_logits=True)
    assert torch.equal(asked[at], before[at]) and torch.equal(asked[0], before[0])
    unpatch(model)
    assert torch.equal(run()[0], before[0])


def test_softcapped_models_compile_and_copy():
    model = transformer_models.build("Gemma2")
    model.zero_grad()
    before, grads = transformer_models.step(model)
    patch(model, only="loss")
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    out = compiled(input_ids=IDS, labels=LABELS, use_cache=False)
    assert torch.allclose(out.loss, before.loss, rtol=FP32)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    after, again = transformer_models.step(other)
    assert torch.allclose(after.loss, before.loss, rtol=FP32) and error(again, grads) < FP32


def test_queries_that_are_rotated_alone():
    """By the same function as queries with keys, so that a patched model must know both calls."""
    model = build("qwen4_exp_text").train()
    before, grads = step(model)
    report = patch(model, only="rotary")
    after, again = step(model)
    assert (
        report.calls()["rope"] > 0 and torch.allclose(after.loss, before.loss, rtol=FP32) and error(again, grads) < 1e-4
    )
