"""The role `mixer` of `patch`: models of transformers whose layers are recurrences, held to their own code in training, over
prompts and step by step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.mixer_models import FAMILIES, LEFT, build, results
from tests.transformer_models import FP32, IDS, error
from tilewright.integrations.huggingface.mixer import FUNCTIONS, PACKED
from tilewright.integrations.huggingface.patching import patch, unpatch
from tilewright.integrations.huggingface.probe import Source

# The op that each function is by, and the one that autograd can record, if there is one
OPS = {
    "causal_conv1d_fn": ("causal_conv1d", "causal_conv1d"), "causal_conv1d_update": ("causal_conv1d_step", None),
    "torch_chunk_gated_delta_rule": ("linear_attention", "linear_attention"),
    "torch_recurrent_gated_delta_rule": ("linear_attention_step", "linear_attention"),
    "chunk_kimi_delta_attention": ("linear_attention", None), "recurrent_kimi_delta_attention": ("linear_attention_step", None),
    "mamba2_chunk_scan": ("linear_attention", "linear_attention"),
    "mamba2_selective_state_update": ("linear_attention_step", None),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_training_is_the_same(family):
    model, (_, layers, trained) = build(family), FAMILIES[family]
    before = results(model)
    report = patch(model, only="mixer")
    assert [(r.role, r.op) for r in report.replaced] == [("mixer", "linear_attention")] * layers
    assert len(report.skipped) == (0 if trained else layers)
    assert error(results(model), before) < 10 * FP32
    assert report.calls().get("linear_attention", 0) == (2 * layers if trained else 0)
    unpatch(model)
    assert error(results(model), before) == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_generated_tokens_are_the_same(family):
    """A prompt, with padding on the left and without, and steps from the states that it leaves."""
    model, layers = build(family).eval(), FAMILIES[family][1]
    given = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "output_logits": True}
    given |= {"return_dict_in_generate": True}
    masks = (LEFT.long(), torch.ones_like(IDS))
    expected = [model.generate(IDS, attention_mask=m, **given) for m in masks]
    report = patch(model, only="mixer")
    made = [model.generate(IDS, attention_mask=m, **given) for m in masks]
    for ours, theirs in zip(made, expected, strict=True):
        assert torch.equal(ours.sequences, theirs.sequences)
        assert error(dict(enumerate(ours.logits)), dict(enumerate(theirs.logits))) < 10 * FP32
    calls = report.calls()
    assert calls["linear_attention"] == 2 * layers and calls["linear_attention_step"] == 2 * layers * 5
    if family != "MiniMax":
        assert calls["causal_conv1d"] == 2 * layers and calls["causal_conv1d_step"] == 2 * layers * 5


@pytest.mark.parametrize("name", OPS)
def test_calls_that_are_left_to_the_models_own_code(name):
    """Packed sequences, and what autograd would record of an op without a gradient."""
    counted = []
    (given, named), (plain, recorded) = FUNCTIONS[name].draw(Source(torch.device("cpu"))), OPS[name]
    call = FUNCTIONS[name].make(lambda *_, **__: "its own", counted.append)
    for word in PACKED:
        assert call(*given, **named, **{word: torch.tensor([0, 1])}) == "its own" and not counted
    call(*given, **named)
    assert counted == [plain]
    call(given[0].requires_grad_(), *given[1:], **named)
    assert counted == [plain] if recorded is None else counted == [plain, recorded]
    with torch.no_grad():
        call(*given, **named)
    assert counted[1 if recorded is None else 2 :] == [plain]


def test_a_prompt_may_come_in_parts():
    """Prefill goes on from a cache: convolutions from the inputs before, recurrences from the state."""
    model = build("Qwen3Next").eval()
    with torch.no_grad():
        whole = model(IDS).logits
        patch(model, only="mixer")
        first = model(IDS[:, :4], use_cache=True)
        rest = model(IDS[:, 4:], past_key_values=first.past_key_values, use_cache=True)
    made = torch.cat([first.logits, rest.logits], 1)
    assert error({"logits": made}, {"logits": whole}) < 10 * FP32


def test_a_recurrence_that_is_another_is_refused(monkeypatch):
    theirs = modeling_qwen3_next.torch_chunk_gated_delta_rule
    model = build("Qwen3Next")
    monkeypatch.setattr(
        modeling_qwen3_next,
        "torch_chunk_gated_delta_rule",
        lambda *a, **n: (2 * theirs(*a, **n)[0], theirs(*a, **n)[1]),
    )
    with pytest.raises(ValueError, match="torch_chunk_gated_delta_rule is not what it was taken for"):
        patch(model, only="mixer")
    report = patch(model, strict=False)
    assert "mixer" not in {r.role for r in report.replaced}
