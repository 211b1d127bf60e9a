"""The core of Megatron's attention, between its projections, by `attention`: dense or packed, on one rank or on several that share
sequences.

Context parallelism cuts each sequence into 2 * ranks chunks, of which rank r has chunks r and 2 * ranks - 1 - r: a chunk of the
first half, which sees few keys, and one of the second, which sees many. Keys and values of all ranks are gathered, and each of the
two chunks of queries sees those before its own end. In the backward their gradients are summed where they belong.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor, nn

from ...attention.attention import attention

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
        ranks, rank = self.cp_group.size(), self.cp_group.rank()
        if "mask" in given:
            raise ValueError("CoreAttention: there is no attention_mask with context parallelism")
        if not causal and (packed is not None or self.window != (None, None)):
            raise ValueError("CoreAttention: with context parallelism, windows and packed sequences must be causal")
        k, v = (gathered(t, self.cp_group) for t in (k, v))  # [ranks, batch, length, heads, head_dim]
        if packed is not None:
            return self.packed_over_ranks(q, k, v, packed, given)
        k, v = (in_order(t) for t in (k, v))
        if not causal:
            return attention.function(q, k, v, **given)
        size = q.shape[1] // 2
        made = []
        for queries, chunk in zip(q.split(size, 1), (rank, 2 * ranks - 1 - rank), strict=True):
            end = (chunk + 1) * size
            made.append(attention.function(queries, k[:, :end], v[:, :end], **given))
        return torch.cat(made, 1)

    def packed_over_ranks(self, q: Tensor, k: Tensor, v: Tensor, packed: Any, given: dict[str, Any]) -> Tensor:
        """Each sequence is cut into chunks by itself; marks are those of whole sequences."""
        ranks, rank, tokens = self.cp_group.size(), self.cp_group.rank(), q.shape[1]
        if getattr(packed, "local_cp_size", None) not in (None, ranks):
            raise ValueError(f"CoreAttention: local_cp_size must be {ranks}, the group's, is {packed.local_cp_size}")
        marks = marks_of(packed, True)["cu_seqlens_k"]
        source, half = chunks_of(marks, tokens, ranks)
        k, v = (t.flatten(0, 2)[source].unsqueeze(0) for t in (k, v))
        o = None
        for part, chunk in enumerate((rank, 2 * ranks - 1 - rank)):
            own = half[part]
            made = attention.function(
                q[:, own], k, v, **given, cu_seqlens_q=marks // (2 * ranks), cu_seqlens_k=marks,
                kv_len=marks.diff() // (2 * ranks) * (chunk + 1),
            )  # fmt: skip
            o = made.new_zeros(1, tokens, *made.shape[2:]) if o is None else o
            o = o.index_copy(1, own, made)
        return o


def marks_of(packed: Any, causal: bool) -> dict[str, Tensor]:
    """Where sequences begin. Padding behind a sequence counts as its own: nothing before sees it, if it is causal."""
    padded = packed.cu_seqlens_q_padded, packed.cu_seqlens_kv_padded
    if any(t is not None for t in padded) and not causal:
        raise ValueError("CoreAttention: packed sequences with padding between them must be causal")
    marks = (own if pad is None else pad for own, pad in zip((packed.cu_seqlens_q, packed.cu_seqlens_kv), padded))
    return dict(zip(("cu_seqlens_q", "cu_seqlens_k"), marks))


def in_order(t: Tensor) -> Tensor:
    """Chunks of all ranks [ranks, batch, 2 * size, ...] as they are in the sequence."""
    first, second = t.chunk(2, 2)
    return torch.cat([*first, *second.flip(0)], 1)


def chunks_of(marks: Tensor, tokens: int, ranks: int) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """(for each token of the whole batch its row in what `ranks` of `tokens` gathered, the rows of the first and of the second
    chunks of this rank's sequences), all made on the device."""
    marks = marks.long()

    def places(count: int, share: int) -> tuple[Tensor, Tensor, Tensor]:
        """Of tokens, where sequences have one `share`-th of their length: the sequence, the index there, the size of a chunk."""
        own = torch.arange(count, device=marks.device)
        ends = marks[1:] // share
        sequence = torch.searchsorted(ends, own, right=True).clamp(max=ends.shape[0] - 1)
        return sequence, own - marks[sequence] // share, marks.diff()[sequence] // (2 * ranks)

    sequence, index, size = places(ranks * tokens, 1)
    chunk = index // size.clamp(min=1)
    late = chunk >= ranks
    owner = torch.where(late, 2 * ranks - 1 - chunk, chunk).clamp(0, ranks - 1)
    source = owner * tokens + marks[sequence] // ranks + late * size + index - chunk * size
    sequence, index, size = places(tokens // 2, 2 * ranks)
    first = marks[sequence] // ranks + index
    return source.clamp(0, ranks * tokens - 1), (first, first + size)


class Gathered(torch.autograd.Function):
    """What all ranks have, [ranks, ...]; the gradient is the sum of theirs for what this one has."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, group: Any) -> Tensor:
        ctx.group = group
        made = t.new_empty(group.size(), *t.shape)
        dist.all_gather_into_tensor(made, t.contiguous().unsqueeze(0), group=group)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        made = grad.new_empty(1, *grad.shape[1:])
        dist.reduce_scatter_tensor(made, grad.contiguous(), group=ctx.group)
        return made[0], None


def gathered(t: Tensor, group: Any) -> Tensor:
    return Gathered.apply(t, group)
