"""The core of Megatron's attention, between its projections, by `attention`: dense or packed, on one rank or on several that share
sequences (`context.py`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from ...attention.attention import attention
from .context import WAYS, by_parts, gathered_first

CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal, AttnMaskType.causal_bottom_right)
# What a config must have for it, by name
USUAL = {
    "attention_dropout": 0.0, "qk_clip": False, "log_max_attention_logit": False, "fp8_dot_product_attention": False,
    "fp8_multi_head_attention": False,
}  # fmt: skip


class CoreAttention(MegatronModule):
    """softmax(scale * query @ key.T) @ value of heads [length, batch, heads, head_dim], or packed [tokens, heads, head_dim].

    Heads of keys are not repeated, and values may be narrower than keys. `attention_mask` is bool, True for what is *not* seen;
    beside a causal type it is heeded too, so whoever wants no tensor of that size gives none. A config that asks for more is
    refused by name.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        k_channels: int | None = None,
        v_channels: int | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,
    ) -> None:
        super().__init__(config=config)
        for name, value in USUAL.items():
            given = attention_dropout if name == "attention_dropout" and attention_dropout is not None else None
            given = getattr(config, name, value) if given is None else given
            if given != value:
                raise ValueError(f"CoreAttention: {name} must be {value}, is {given}")
        self.attn_mask_type = attn_mask_type
        groups = pg_collection or ProcessGroupCollection.use_mpu_process_groups(required_pgs=["tp", "cp"])
        self.tp_group = groups.tp
        self.cp_group = groups.cp if config.context_parallel_size > 1 else None
        self.way = cp_comm_type or WAYS[0]
        if self.cp_group is not None and self.way not in WAYS:
            raise ValueError(f"CoreAttention: cp_comm_type must be {' or '.join(WAYS)}, is {self.way}")
        self.scale = softmax_scale if softmax_scale is not None else 1.0 / math.sqrt(k_channels or config.kv_channels)
        windowed = is_layer_window_attention(
            config.window_size, getattr(config, "window_attn_skip_freq", None), layer_number
        )
        # -1 is no end
        self.window = tuple(None if n < 0 else n for n in config.window_size) if windowed else (None, None)
        self.softmax_offset = self.made_offset()

    def made_offset(self) -> Tensor | None:
        """One more logit a head, which Megatron adds to the softmax's denominator."""
        kind, config = self.config.softmax_type, self.config
        if kind == "vanilla":
            return None
        if kind not in ("off-by-one", "learnable"):
            raise ValueError(f"CoreAttention: softmax_type must be vanilla, off-by-one or learnable, is {kind}")
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        heads = config.num_attention_heads // self.tp_group.size()
        made = torch.zeros(heads, dtype=config.params_dtype, device=device)
        if kind == "off-by-one":
            return made
        made = nn.Parameter(made)
        return config.init_method(made) if config.perform_initialization else made

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> Any:
        return DotProductAttention.sharded_state_dict(self, prefix, sharded_offsets, metadata)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """[length, batch, heads * value_dim], or packed [tokens, heads * value_dim]."""
        if attention_bias is not None:
            raise ValueError("CoreAttention: there is no attention_bias")
        kind = attn_mask_type or self.attn_mask_type
        causal = kind in CAUSAL
        left, right = self.window
        given = {"scale": self.scale, "left": left, "sink": self.softmax_offset}
        given |= {"causal": True} if causal else {"right": right}
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        # Packed tokens are one row of a batch, and other tensors have the length first
        q, k, v = (t.unsqueeze(0) if packed else t.transpose(0, 1) for t in (query, key, value))
        if attention_mask is not None and kind is not AttnMaskType.no_mask and not packed:
            given["mask"] = ~attention_mask
        if self.cp_group is not None:
            o = self.over_ranks(q, k, v, causal, packed_seq_params if packed else None, given)
        elif packed:
            o = attention.function(q, k, v, **given, **marks_of(packed_seq_params, causal))
        else:
            if kind is AttnMaskType.causal and 1 < q.shape[1] != k.shape[1]:
                raise ValueError(
                    f"CoreAttention: causal is for as many keys as queries, got {q.shape[1]} queries and {k.shape[1]} keys"
                )
            o = attention.function(q, k, v, **given)
        return o[0].flatten(1) if packed else o.transpose(0, 1).flatten(2)

    def over_ranks(self, q: Tensor, k: Tensor, v: Tensor, causal: bool, packed: Any, given: dict[str, Any]) -> Tensor:
        """The queries of this rank over the keys of all."""
        ranks = self.cp_group.size()
        if "mask" in given:
            raise ValueError("CoreAttention: there is no attention_mask with context parallelism")
        windowed = self.window != (None, None)
        if not causal and (packed is not None or windowed):
            raise ValueError("CoreAttention: with context parallelism, windows and packed sequences must be causal")
        if getattr(packed, "local_cp_size", None) not in (None, ranks):
            raise ValueError(f"CoreAttention: local_cp_size must be {ranks}, the group's, is {packed.local_cp_size}")
        marks = None if packed is None else marks_of(packed, True)["cu_seqlens_k"]
        shared = q, k, v, self.cp_group, causal, marks
        if self.way == "p2p" and not windowed:
            return by_parts(*shared, self.scale, self.softmax_offset)
        return gathered_first(*shared, scale=self.scale, left=self.window[0], sink=self.softmax_offset)


def marks_of(packed: Any, causal: bool) -> dict[str, Tensor]:
    """Where sequences begin. Padding behind a sequence counts as its own: nothing before sees it, if it is causal."""
    padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    if any(t is not None for t in padded) and not causal:
        raise ValueError("CoreAttention: packed sequences with padding between them must be causal")
    marks = (own if pad is None else pad for own, pad in zip((packed.cu_seqlens_q, packed.cu_seqlens_kv), padded))
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), marks))
