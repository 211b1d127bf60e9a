"""Tiny models of transformers with random weights whose layers are recurrences, and what their training gives."""

from __future__ import annotations

import pytest
import torch
import transformers

from tests.transformer_models import IDS, LABELS, SIZES

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
    ids, labels, left = (t.to(model.device) for t in (IDS, LABELS, LEFT))
    for mask in (None, left.long()):
        model.zero_grad()
        out = model(input_ids=ids, labels=labels, attention_mask=mask, use_cache=False)
        out.loss.backward()
        found = {"loss": out.loss, "logits": out.logits if mask is None else out.logits[left]}
        found |= {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        made |= {f"{name}, {mask is None}": t.detach().clone() for name, t in found.items()}
    return made
