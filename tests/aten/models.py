"""Tiny models of transformers with random weights, whose operators are replaced: what a step of each gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import transformers
from torch import Tensor, nn

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 48,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
TEXT = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "bos_token_id": 1, "eos_token_id": 2}
IMAGE, PATCHES = 47, 4  # the token in whose place a patch stands, and how many there are of an image


def ids(device: str) -> Tensor:
    return torch.randint(3, 40, (2, 9), generator=torch.Generator().manual_seed(1)).to(device)


def texts(device: str) -> dict[str, Tensor]:
    """Tokens, some of which have no label."""
    tokens = ids(device)
    return {"input_ids": tokens, "labels": tokens.masked_fill(torch.arange(9, device=device) < 3, -100)}


def pictures(device: str) -> dict[str, Tensor]:
    """Tokens, the patches of an image among them."""
    given = texts(device)
    given["input_ids"] = given["input_ids"].index_fill(1, torch.arange(1, 1 + PATCHES, device=device), IMAGE)
    pixels = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(2))
    return {**given, "pixel_values": pixels.to(device)}


def bert(attention: str) -> nn.Module:
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}  # a processor's masks are not a GPU's
    config = transformers.BertConfig(**SIZES, **none, attn_implementation=attention)
    return transformers.BertForMaskedLM(config)


def llama(attention: str) -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT, attn_implementation=attention))


def qwen3(attention: str) -> nn.Module:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**TEXT, attn_implementation=attention))


def llava(attention: str) -> nn.Module:
    seen = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**seen, image_size=8, patch_size=4, projection_dim=16),
        text_config=transformers.LlamaConfig(**TEXT), image_token_index=IMAGE, attn_implementation=attention,
    )  # fmt: skip
    return transformers.LlavaForConditionalGeneration(config)


class Kind(NamedTuple):
    """A model, what it is given, and overloads that a step of it cannot do without."""

    build: Callable[[str], nn.Module]
    given: Callable[[str], dict[str, Tensor]]
    calls: frozenset[str]


BOTH = {
    "mm",
    "bmm",
    "_softmax",
    "_softmax_backward_data",
    "_log_softmax",
    "nll_loss_forward",
    "nll_loss_backward",
    "embedding",
}
BOTH |= {"embedding_dense_backward", "add.Tensor", "mul.Tensor", "sum.dim_IntList"}
NORM = {"native_layer_norm", "native_layer_norm_backward", "gelu", "gelu_backward", "addmm"}
GATED = {"silu", "silu_backward", "rsqrt", "mean.dim", "pow.Tensor_Scalar", "cat", "neg"}
KINDS = {
    "BERT": Kind(bert, texts, frozenset({*BOTH, *NORM})),
    "Llama": Kind(llama, texts, frozenset({*BOTH, *GATED})),
    "Qwen3": Kind(qwen3, texts, frozenset({*BOTH, *GATED})),
    "Llava": Kind(llava, pictures, frozenset({*BOTH, *GATED, "native_layer_norm", "native_layer_norm_backward"})),
}


def built(name: str, device: str, dtype: torch.dtype = torch.float32, attention: str = "eager") -> nn.Module:
    """Weights that are neither 0 nor 1, so that nothing is the same by chance."""
    torch.manual_seed(0)
    with torch.device("cpu"):  # the same on every device
        model = KINDS[name].build(attention)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p), alpha=0.1)
    return model.to(device, dtype).train()


def step(model: nn.Module, given: dict[str, Tensor]) -> dict[str, Tensor]:
    """Logits, the loss and every gradient. What is given is drawn before: in a block that replaces operators a processor's draws
    are others."""
    model.zero_grad()
    dtype = next(model.parameters()).dtype
    out = model(**{n: t.to(dtype) if t.is_floating_point() else t for n, t in given.items()})
    out.loss.backward()
    made = {"logits": out.logits.detach(), "loss": out.loss.detach()}
    return {**made, **{n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}}


def error(found: dict[str, Tensor], truth: dict[str, Tensor]) -> dict[str, float]:
    """Of each tensor the largest difference, measured by its largest value. What is 0 but for rounding, such as the gradient of a
    bias before a softmax, is measured by the largest gradient."""
    assert found.keys() == truth.keys()
    largest = max(float(t.double().abs().max()) for n, t in truth.items() if n not in ("logits", "loss"))
    return {
        n: float((found[n].double() - truth[n].double()).abs().max())
        / max(float(truth[n].double().abs().max()), 1e-3 * largest)
        for n in truth
    }
