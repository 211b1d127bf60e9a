"""The role `mixer` of `patch`: models of transformers whose layers are recurrences, held to their own code in training, over
prompts and step by step."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import transformers
from transformers.models.qwen3_next import modeling_qwen3_next

from tests.transformer_models import FP32, IDS, LABELS, SIZES, error
from tilewright.integrations.huggingface.patching import patch, unpatch

LINEAR = {"layer_types": ["linear_attention", "full_attention"]}
DELTA = {"linear_conv_kernel_dim": 4, "moe_intermediate_size": 24, "num_experts": 4}
KIMI = {
    **DELTA, **LINEAR, "num_key_value_heads": 4, "linear_num_heads": 2, "linear_head_dim": 8, "kv_lora_rank": 16,
    "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "num_experts_per_token": 2,
}  # fmt: skip
MAMBA = {"chunk_size": 4, "n_groups": 2, "state_size": 8, "num_heads": 4, "head_dim": 16, "expand": 2}
# What each family has beside SIZES, how many of its layers are recurrences, and whether these are trained by ours
FAMILIES = {
    "Qwen3Next": (
        {
            **DELTA, **LINEAR, "head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 8,
            "linear_value_head_dim": 12, "num_experts_per_tok": 2, "shared_expert_intermediate_size": 24,
        },
        1, True,
    ),
    "FalconH1": (
        {
            "mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 8,
            "mamba_chunk_size": 4, "head_dim": 8,
        },
        2, True,
    ),
    "Mamba2": (MAMBA, 2, True),
    "KimiLinear": (KIMI, 1, False),
    "BailingHybrid": ({**KIMI, "head_dim": 16}, 1, False),
    "MiniMax": ({**LINEAR, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2, "block_size": 4}, 1, True),
}  # fmt: skip
LEFT = torch.arange(IDS.shape[1]) >= torch.tensor([[3], [0]])  # the first row begins after three tokens of padding


def build(family: str, **more: object) -> torch.nn.Module:
    """Weights that are neither 0 nor 1, so that nothing is the same by chance."""
    kind = getattr(transformers, f"{family}Config", None)
    if kind is None:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(kind(**{**SIZES, **FAMILIES[family][0], **more}))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.train()


def results(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Logits, the loss and every gradient, without a mask and with one."""
    made = {}
    for mask in (None, LEFT.long()):
        model.zero_grad()
        out = model(input_ids=IDS, labels=LABELS, attention_mask=mask, use_cache=False)
        out.loss.backward()
        found = {"loss": out.loss, "logits": out.logits if mask is None else out.logits[LEFT]}
        found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        made |= {f"{name}, {mask is None}": t.detach().clone() for name, t in found.items()}
    return made


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
