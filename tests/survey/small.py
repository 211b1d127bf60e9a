"""Small models of every type, from the defaults of their configs with small sizes in place of large ones."""

from __future__ import annotations

import inspect
from dataclasses import fields, is_dataclass
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto import modeling_auto

HIDDEN, FFN, LAYERS, HEADS, KEYS, HEAD, VOCAB, EXPERTS = 64, 96, 4, 4, 2, 16, 128, 4


def named(value: Any, *names: str) -> dict[str, Any]:
    return dict.fromkeys(names, value)


# By the names that configs have for them; a config takes those that it has.
SIZES = {
    **named(
        HIDDEN, "hidden_size", "d_model", "n_embd", "embed_dim", "out_hidden_size", "text_hidden_size", "word_embed_proj_dim",
        "encoder_hidden_size", "projection_dim", "embedding_size", "emb_dim", "attention_hidden_size", "output_dim",
        "vision_output_dim", "dim", "mamba_d_ssm", "image_text_hidden_size", "hidden_size_global", "resampler_hidden_size",
        "projection_output_dim", "projector_hidden_size", "audio_hidden_size", "projector_output_dim", "lru_width",
        "patch_embed_hidden_size",
    ),
    **named(
        FFN, "intermediate_size", "n_inner", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "ffn_hidden_size", "dff", "d_ff",
        "dim_ff", "mlp_dim", "shared_intermediate_size", "dense_intermediate_size", "intermediate_size_mlp",
        "alignment_intermediate_size", "projection_intermediate_size", "projection_hidden_size",
    ),
    **named(
        32, "moe_intermediate_size", "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size",
        "expert_ffn_hidden_size", "moe_hidden_size", "moe_shared_intermediate_size",
    ),
    **named(
        LAYERS, "num_hidden_layers", "n_layer", "n_layers", "num_layers", "encoder_layers", "decoder_layers",
        "num_decoder_layers", "layers", "depth", "num_blocks", "num_global_layers", "num_layers_per_stack",
    ),
    **named(
        HEADS, "num_attention_heads", "num_heads", "n_head", "n_heads", "encoder_attention_heads", "decoder_attention_heads",
        "attention_heads", "linear_num_heads", "linear_num_value_heads", "mamba_n_heads", "mamba_num_heads",
        "swa_num_attention_heads", "index_n_heads", "n_mamba_heads", "resampler_n_heads", "resampler_heads",
    ),
    **named(
        KEYS, "num_key_value_heads", "num_kv_heads", "kv_n_heads", "linear_num_key_heads", "swa_num_key_value_heads",
        "num_global_key_value_heads", "mamba_n_groups", "n_groups",
    ),
    **named(
        HEAD, "head_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "linear_key_head_dim", "linear_value_head_dim",
        "swa_head_dim", "index_head_dim", "d_kv", "dim_head", "kv_channels", "linear_head_dim", "mamba_d_head",
        "mamba_head_dim", "global_head_dim", "attention_head_dim", "rotary_dim", "resampler_head_dim", "resampler_dim_head",
        "query_pre_attn_scalar", "swa_v_head_dim",
    ),
    "qk_head_dim": 2 * HEAD,
    **named(VOCAB, "vocab_size", "vocab_size_per_layer_input", "audio_vocab_size", "decoder_vocab_size"),
    **named(
        256, "max_position_embeddings", "n_positions", "max_seq_len", "n_ctx", "model_max_length", "max_source_positions",
        "max_target_positions", "original_max_position_embeddings",
    ),
    **named(
        EXPERTS, "num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", "num_routed_experts",
    ),
    **named(2, "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "moe_top_k", "top_k_experts"),
    **named(1, "n_group", "topk_group", "n_shared_experts", "num_shared_experts", "moe_num_shared_experts", "num_expert_group"),
    **named(32, "q_lora_rank", "kv_lora_rank", "o_lora_rank", "laurel_rank"),
    **named(8, "sliding_window", "index_topk", "state_size", "mamba_d_state", "ssm_state_size", "sliding_window_size"),
    **named(16, "mamba_chunk_size", "chunk_size", "attention_chunk_size"),
    **named(4, "time_step_rank", "mamba_dt_rank"),
    **named(32, "image_size", "hidden_size_per_layer_input"),
    "patch_size": 8, "num_position_embeddings": 16, "num_query_tokens": 4, "first_k_dense_replace": 1, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 2, "num_nextn_predict_layers": 0, "num_kv_shared_layers": 0, "max_window_layers": 2,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
# Ids of what is no text, one each; the text of the survey has none of them.
FIRST_ID = 100


def turned(*sections: int) -> dict[str, Any]:
    """A text config whose pairs of columns are turned by time, height and width, so many each."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections]}
    return {"text_config": {"rope_parameters": rope}}


BY_LAYER = {k: {"rope_type": "default", "rope_theta": 1e4} for k in ("full_attention", "sliding_attention")}
INDEXED = {
    "indexer_n_heads": KEYS, "indexer_kv_heads": 1, "indexer_head_dim": HEAD, "indexer_budget": 8, "indexer_compress_ratio": 2
}  # fmt: skip
# What single types need beside: by type, and below it by sub-config.
MORE: dict[str, dict[str, Any]] = {
    **named(
        turned(4, 2, 2), "glm46v", "glm4v", "glm_ocr", "glmga", "paddleocr_vl", "qwen2_5_omni_thinker", "qwen2_5_vl", "qwen2_vl"
    ),
    **named({"mamba_d_head": 2 * HEAD}, "bamba", "granitemoehybrid"),  # heads of twice the hidden size
    "blt": {"encoder_hash_byte_group_vocab": 50},
    "chameleon": {
        "vocabulary_map": {"<image>": 100, "IMGIMGBZ": 101, "IMGIMGCZ": 102}, "vq_config": {"base_channels": 32},
    },
    "cohere_compass": {"text_config": {"rope_parameters": BY_LAYER}},
    "cohere_compass_text": {"rope_parameters": BY_LAYER},
    "dbrx": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8.0}},
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", *["sparse"] * (LAYERS - 1)]}},
    "emu3": {
        "vocabulary_map": {"<image>": 100, "<|extra_200|>": 101, "<|visual token 000000|>": 102},
        "vq_config": {"base_channels": 32},
    },
    "ernie4_5_vl_moe": turned(3, 3, 2),
    "glm4v_moe": turned(2, 1, 1),
    "glm5_next": {"text_config": {"num_key_value_heads": HEADS, "index_topk": 16, "qk_rope_head_dim": 0}},
    "gpt_neo": {"attention_types": [[["global", "local"], LAYERS // 2]]},
    "granite4_vision": {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "2/4", "spatial_target_layers": [1]},
    "janus": {"vq_config": {"base_channels": 32}},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * (LAYERS // 2)},
    "mamba2": {"num_heads": 2 * HEADS},
    "molmo2": {"vit_config": {"image_size": [32, 32]}},
    "muse_spark": {"audio_config": {"hidden_sizes": [16, 16, 32, 32]}},
    "nemotron_h_omni": {"vision_config": {"video_temporal_patch_size": 2}},
    "qwen4_exp": {"text_config": INDEXED},
    "qwen4_exp_text": INDEXED,
    "reformer": {"is_decoder": True, "axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32]},
    "xlstm": {"qk_dim_factor": 1.0},
    "zamba": {"num_hidden_layers": 6, "attn_layer_period": 2, "attn_layer_offset": 1},
    "zamba2": {"layer_types": ["linear_attention", "hybrid"] * (LAYERS // 2)},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def known(config: type[PreTrainedConfig]) -> set[str]:
    names = {f.name for f in fields(config)} if is_dataclass(config) else set()
    return names | {*inspect.signature(config.__init__).parameters}


def small(config: type[PreTrainedConfig], more: dict[str, Any] | None = None) -> PreTrainedConfig:
    """A config of small sizes; `more` has precedence, and has a dict for a sub-config."""
    default, more, names, ids = config(), dict(more or {}), known(config), iter(range(FIRST_ID, VOCAB))
    given = {name: like(vars(default).get(name), value) for name, value in SIZES.items() if name in names}
    given |= {name: next(ids) for name in sorted(names - {*given}) if name.endswith(("token_id", "token_index"))}
    if "kv_lora_rank" in names:  # whose keys are made of one vector for all heads
        given["num_key_value_heads"] = HEADS
    rope = getattr(default, "rope_parameters", None) or {}
    if "mrope_section" in rope:
        pairs = int(HEAD * rope.get("partial_rotary_factor", 1.0)) // 2
        given["rope_parameters"] = {**rope, "mrope_section": [pairs - 2 * (pairs // 4), pairs // 4, pairs // 4]}
    for name in getattr(config, "sub_configs", {}):
        part = getattr(default, name, None)
        if name in names and isinstance(part, PreTrainedConfig):
            given[name] = small(type(part), more.pop(name, None))
    return config(**{**given, **more})


def like(default: Any, value: Any) -> Any:
    """A size as the config has it: some have one for each side or stage, or for each layer."""
    if not isinstance(default, list | tuple):
        return value
    return type(default)([value] * (len(default) if len(default) <= LAYERS else LAYERS))


def types() -> dict[str, str]:
    """The class of each causal language model and image-text model, by type."""
    found = {}
    for table in (
        modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    ):
        found |= {kind: name if isinstance(name, str) else name[0] for kind, name in table.items()}
    return dict(sorted(found.items()))


def build(kind: str, name: str | None = None, **more: Any) -> nn.Module:
    """A model with weights that are neither 0 nor 1, so that nothing is the same by chance."""
    torch.manual_seed(0)
    config = small(CONFIG_MAPPING[kind], {**MORE.get(kind, {}), **more})
    model = getattr(transformers, name or types()[kind])(config)
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.add_(torch.randn_like(p), alpha=0.1)
    return model
