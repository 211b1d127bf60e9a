"""Tiny models of transformers with random weights, of each family that is tested, and steps of their training."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import transformers
from torch import nn

FP32 = 5e-6  # of the largest value: a few sums in another order
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8}
OTHER = {"norm": 5, "mlp": 2, "rotary": 2, "loss": 1}  # layers with more norms, or dropout
DENSE = {**OTHER, "decoder": 2}
# Config, what it has beside SIZES, and how many modules of each role are replaced.
FAMILIES = {
    "Llama": ("LlamaConfig", {"mlp_bias": True}, DENSE),
    "Mistral": ("MistralConfig", {}, DENSE),
    "Qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, DENSE),
    "Qwen3": ("Qwen3Config", {"head_dim": 8}, {**DENSE, "norm": 9}),
    "Qwen3Moe": (
        "Qwen3MoeConfig", {**ROUTED, "num_experts": 4, "output_router_logits": True},
        {"norm": 9, "decoder": 2, "rotary": 2, "router": 2, "experts": 2, "loss": 1},
    ),
    "Mixtral": (
        "MixtralConfig", {"num_local_experts": 4}, {"norm": 5, "decoder": 2, "rotary": 2, "router": 2, "experts": 2, "loss": 1}
    ),
    "Gemma2": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 3.0}, {**OTHER, "norm": 9}),
    "Gemma3": ("Gemma3TextConfig", {"head_dim": 8}, {**OTHER, "norm": 13}),
    "Phi3": ("Phi3Config", {}, OTHER),
    "DeepseekV3": (
        "DeepseekV3Config",
        {
            **ROUTED, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        {"norm": 9, "decoder": 2, "mlp": 2, "rotary": 2, "router": 1, "experts": 1, "loss": 1},
    ),
    "Glm": ("GlmConfig", {"head_dim": 8, "partial_rotary_factor": 0.5}, DENSE),
    "Glm4Moe": ("Glm4MoeConfig", {**ROUTED, "n_routed_experts": 4}, {**DENSE, "router": 1, "experts": 1}),
    "GptOss": (
        "GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"norm": 5, "decoder": 2, "rotary": 2, "router": 2, "experts": 2, "loss": 1},
    ),
}  # fmt: skip
OPS = {
    "norm": "rms_norm", "decoder": "add_rms_norm", "mlp": "glu_linear", "rotary": "rope", "router": "topk_routing",
    "experts": "moe_feed_forward", "loss": "linear_cross_entropy",
}  # fmt: skip
OWN_GATE = {"GptOss"}  # whose experts are products of groups with their own gate between them
# Some of whose routers return something else than logits, weights and indices, and whose experts may know no new names
OLD = tuple(int(n) for n in transformers.__version__.split(".")[:2]) < (5, 16)
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(9) < 3, -100)


def roles_of(family: str) -> dict[str, tuple[str, int]]:
    """The op that stands for each role in a model of a family, and how often."""
    made = {role: (OPS[role], count) for role, count in FAMILIES[family][2].items()}
    if family in OWN_GATE:
        made["experts"] = ("grouped_mm", made["experts"][1])
    if OLD:
        made.pop("router", None)
    return made


def build(family: str, dtype: torch.dtype = torch.float32, **more: object) -> nn.Module:
    """Weights that are neither 0 nor 1, so that nothing is the same by chance."""
    config, given, _ = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SIZES, **given, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(made)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.to(dtype).train()


def step(model: nn.Module, **named: object) -> tuple[SimpleNamespace, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(input_ids=IDS, labels=LABELS, **named)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """The largest difference, each tensor measured by its own largest value."""
    assert found.keys() == truth.keys()
    return max(((found[n] - truth[n]).abs().max() / truth[n].abs().max().clamp(min=1e-12)).item() for n in truth)


def train(model: nn.Module, steps: int) -> list[float]:
    optimiser, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model(input_ids=IDS, labels=LABELS).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses
