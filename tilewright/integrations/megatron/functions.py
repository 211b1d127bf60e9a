"""What stands in for functions of Megatron-Core: the same arguments, the same results, by our ops.

Each has the parameters it understands, by the names that Megatron gives them; where versions differ there is one for each. A call
that it cannot answer as Megatron would gets `Declined`, and goes to Megatron's own function.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ...ops.activation.glu import glu
from ...ops.loss.cross_entropy import cross_entropy
from ...ops.loss.parallel_cross_entropy import parallel_cross_entropy
from ...ops.moe.moe_permute import moe_permute, moe_unpermute
from ...ops.moe.moe_router import routing_map as dense_routing
from ...ops.moe.moe_router import topk_routing
from ...ops.moe.router_linear import router_linear
from ...ops.moe.router_loss import router_z_loss
from ...ops.moe.sort_chunks import sort_chunks
from ...ops.optimiser.clip_grad import global_norm, global_zeros
from ...ops.optimiser.multi_tensor import multi_tensor_scale
from ...ops.optimiser.shards import local
from ...ops.rotary.rope import rope_one

IGNORED = -100
TOPK = "_tilewright_topk"  # of a routing map: how many experts a token has in it at most, and the version of which that is true


class Declined(str):
    """The reason why a call goes to Megatron's own function."""


class Function(NamedTuple):
    """One function of Megatron. `exact` says that its parameters must be these alone, for its results depend on them."""

    role: str
    module: str
    name: str
    op: str
    ours: Callable
    exact: bool = False


# ---- activations -----------------------------------------------------------------------------------------------------------


def bias_swiglu(
    input: Tensor, bias: Tensor | None, fp8_input_store: bool = False, cpu_offload_input: bool = False
) -> Tensor | Declined:
    if fp8_input_store or cpu_offload_input:
        return Declined("its input is to be kept in FP8, or offloaded")
    return glu.function(input if bias is None else input + bias)


def weighted_swiglu(
    input: Tensor, bias: Tensor | None, weights: Tensor, fp8_input_store: bool = False
) -> Tensor | Declined:
    if bias is not None or fp8_input_store:
        return Declined("there is a bias, or its input is to be kept in FP8")
    rows = input.reshape(-1, input.shape[-1])
    return glu.function(rows, scale=weights.reshape(-1)).reshape(*input.shape[:-1], -1)


# ---- rotary embedding ------------------------------------------------------------------------------------------------------


def rotary_0_16(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, cp_group: Any = None
) -> Tensor | Declined:
    return rotary(t, freqs, config, cu_seqlens, mscale, cp_group, config.multi_latent_attention)


def rotary(
    t: Tensor, freqs: Tensor, config: Any, cu_seqlens: Tensor | None = None, mscale: float = 1.0, cp_group: Any = None,
    mla_rotary_interleaved: bool | None = False,
) -> Tensor | Declined:  # fmt: skip
    """t [length, batch, heads, head_dim], or [tokens, heads, head_dim] with `cu_seqlens`; freqs [positions, batch or 1, 1, n]."""
    if mla_rotary_interleaved or (mla_rotary_interleaved is None and config.multi_latent_attention):
        return Declined("latent attention takes neighbouring pairs and returns halves")
    if freqs.dim() != 4 or freqs.shape[2] != 1 or freqs.dtype != torch.float32:
        return Declined("freqs are not fp32 [positions, batch or 1, 1, n]")
    options = {
        "freqs": freqs[:, :, 0].transpose(0, 1), "layout": "sbhd", "rotary_dim": freqs.shape[-1], "mscale": mscale,
        "pairing": "interleaved" if config.rotary_interleaved else "half",
    }  # fmt: skip
    if cu_seqlens is None:
        if freqs.shape[0] < t.shape[0]:
            return Declined("there are fewer positions in freqs than tokens")
        return rope_one.function(t, **options)
    cp_group = cp_group if cp_group is not None else parallel_state().get_context_parallel_group()
    if config.apply_rope_fusion:
        if config.rotary_interleaved:
            return Declined("what fused interleaved pairs of packed sequences are differs between versions")
    elif freqs.shape[0] == t.shape[0] * cp_group.size():
        return Declined("freqs may be those of each token, not of positions in a sequence")
    ranks = {"cu_seqlens": cu_seqlens, "cp_size": cp_group.size(), "cp_rank": cp_group.rank()}
    return rope_one.function(t.unsqueeze(1), **options, **ranks).squeeze(1)


def parallel_state() -> Any:
    from megatron.core import parallel_state

    return parallel_state


# ---- cross entropy ---------------------------------------------------------------------------------------------------------


def fused_loss(vocab_parallel_logits: Tensor, target: Tensor, tp_group: Any) -> Tensor:
    """Megatron gives a label outside the vocabulary a loss without meaning, for a mask to take away: here it is 0."""
    ranks = tp_group.size()
    outside = (target < 0) | (target >= ranks * vocab_parallel_logits.shape[-1])
    labels = target.masked_fill(outside, IGNORED)
    if ranks == 1:
        return cross_entropy.function(vocab_parallel_logits, labels, ignore_index=IGNORED, reduction="none")
    return parallel_cross_entropy(vocab_parallel_logits, labels, group=tp_group, ignore_index=IGNORED)


def loss(
    vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0, tp_group: Any = None
) -> Tensor | Declined:
    if label_smoothing:
        return Declined("Megatron smooths over the labels that are wrong, and those of a rank")
    group = tp_group if tp_group is not None else parallel_state().get_tensor_model_parallel_group()
    return fused_loss(vocab_parallel_logits, target, group)


def loss_0_16(vocab_parallel_logits: Tensor, target: Tensor, label_smoothing: float = 0.0) -> Tensor | Declined:
    return loss(vocab_parallel_logits, target, label_smoothing)


# ---- router ----------------------------------------------------------------------------------------------------------------


def gating(inp: Tensor, weight: Tensor, bias: Tensor | None, router_dtype: torch.dtype) -> Tensor | Declined:
    if router_dtype == torch.float64:
        return Declined("logits are to be float64")
    return router_linear.function(inp, weight, bias).to(router_dtype)


def z_loss(logits: Tensor, z_loss_coeff: float, padding_mask: Tensor | None = None) -> Tensor | Declined:
    return router_z_loss.function(logits, z_loss_coeff) if padding_mask is None else Declined("there is a padding mask")


def routing_0_16(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None, score_function: str = "softmax",
    expert_bias: Tensor | None = None, fused: bool = False, router_replay: Any = None,
) -> tuple[Tensor, Tensor] | Declined:  # fmt: skip
    chosen = choose(
        logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, router_replay
    )  # fmt: skip
    return chosen if isinstance(chosen, Declined) else dense(*chosen, logits.shape[-1])


def routing(
    logits: Tensor, topk: int, use_pre_softmax: bool = False, num_groups: int | None = None,
    group_topk: int | None = None, scaling_factor: float | None = None, score_function: str = "softmax",
    expert_bias: Tensor | None = None, fused: bool = False, router_replay: Any = None, dense_output: bool = False,
    precomputed_indices: Tensor | None = None,
) -> tuple[Tensor, Tensor] | Declined:  # fmt: skip
    chosen = choose(
        logits, topk, use_pre_softmax, num_groups, group_topk, scaling_factor, score_function, expert_bias, router_replay,
        precomputed_indices,
    )  # fmt: skip
    if isinstance(chosen, Declined) or (dense_output and not fused):  # the fused function knows no such output
        return chosen
    return dense(*chosen, logits.shape[-1])


def choose(
    logits: Tensor, topk: int, pre_softmax: bool, groups: int | None, group_topk: int | None, scaling: float | None,
    score: str, bias: Tensor | None, replay: Any, indices: Tensor | None = None,
) -> tuple[Tensor, Tensor] | Declined:  # fmt: skip
    """(weights [tokens, topk] in the dtype of the logits, experts [tokens, topk])."""
    if replay is not None:
        return Declined("there is a router replay")
    if score not in ("softmax", "sigmoid") or logits.dtype == torch.float64:
        return Declined("scores are neither softmax nor sigmoid, or logits are float64")
    if group_topk and (topk % group_topk or not groups):
        return Declined("topk is not a multiple of group_topk")
    softmax = score == "softmax"
    probs, chosen, _ = topk_routing.function(
        logits, topk, score=score, bias=None if softmax else bias, groups=groups if group_topk else 1,
        group_topk=group_topk or 1, normalize=not softmax and topk > 1, scaling=scaling or 1.0,
        order="topk_first" if softmax and not pre_softmax else "score_first", indices=indices,
    )  # fmt: skip
    return probs.to(logits.dtype), chosen


def dense(probs: Tensor, chosen: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    made, flags = dense_routing.function(chosen, probs, experts=experts)
    if not torch.compiler.is_compiling() and not flags.is_inference():
        setattr(flags, TOPK, (chosen.shape[-1], flags._version))
    return made, flags


# ---- rows of experts -------------------------------------------------------------------------------------------------------


def permute_0_16(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int | None = None,
    fused: bool = False, drop_and_pad: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor] | Declined:  # fmt: skip
    return permuted(tokens, routing_map, probs, num_out_tokens, drop_and_pad)


def permute(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None = None, num_out_tokens: int | None = None,
    fused: bool = False, drop_and_pad: bool = False, tokens_per_expert: Tensor | None = None, align_size: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor, None, Tensor | None] | Declined:  # fmt: skip
    if fused and align_size and tokens_per_expert is not None:
        return Declined("rows of experts are to be padded")
    made = permuted(tokens, routing_map, probs, num_out_tokens, drop_and_pad)
    return made if isinstance(made, Declined) else (*made, None, tokens_per_expert)


def permuted(
    tokens: Tensor, routing_map: Tensor, probs: Tensor | None, count: int | None, drop_and_pad: bool
) -> tuple[Tensor, Tensor | None, Tensor] | Declined:
    """(rows, their probabilities, the row map): nobody but `unpermute` reads the last, which is ours if it has 3 dimensions."""
    if drop_and_pad:
        return Declined("every expert has the same capacity")
    if probs is not None and probs.dtype == torch.float64:
        return Declined("probs are float64")
    rows = int(routing_map.count_nonzero() if count is None else count)
    if not rows:
        return Declined("there are no rows")
    topk, version = getattr(routing_map, TOPK, (None, None))
    if topk is not None and version != routing_map._version:  # padding may have been written into it
        topk = None
    made, row_probs, row_map, *_ = moe_permute.function(tokens, routing_map, probs, topk=topk, align=1, capacity=rows)
    return made, None if probs is None else row_probs, row_map.unsqueeze(-1)


def unpermute(
    permuted_tokens: Tensor, sorted_indices: Tensor, restore_shape: torch.Size, probs: Tensor | None = None,
    routing_map: Tensor | None = None, fused: bool = False, drop_and_pad: bool = False,
) -> Tensor | Declined:  # fmt: skip
    if sorted_indices.dim() != 3:
        return Declined("the rows were not permuted by us")
    row_probs = None
    if probs is not None:
        if routing_map is None:
            raise ValueError("unpermute: routing_map must be given with probs")
        row_probs = probs.t().masked_select(routing_map.bool().t())
    return moe_unpermute.function(permuted_tokens, sorted_indices.squeeze(-1), row_probs).reshape(restore_shape)


def chunks(
    input: Tensor, split_sizes: Tensor, sorted_idxs: Tensor, probs: Tensor | None = None, fused: bool = False
) -> tuple[Tensor, Tensor | None] | Declined:
    if input.dim() != 2 or (probs is not None and (probs.dim() != 1 or probs.dtype == torch.float64)):
        return Declined("input has not 2 dimensions, or probs are not one number a row of at most 32 bits")
    sizes, order = (t.reshape(-1).to(input.device, non_blocking=True) for t in (split_sizes, sorted_idxs))
    rows, row_probs = sort_chunks.function(input, sizes, order, probs)
    return rows, None if probs is None else row_probs


# ---- gradients -------------------------------------------------------------------------------------------------------------


def grad_norm(
    grads_for_norm: list[Tensor] | Tensor, norm_type: float = 2, grad_stats_parallel_group: Any = None
) -> float | Declined:
    if float(norm_type) not in (1.0, 2.0, math.inf):
        return Declined("the norm is neither 1, 2 nor inf")
    grads = [grads_for_norm] if isinstance(grads_for_norm, Tensor) else list(grads_for_norm)
    return global_norm(grads or [nothing()], float(norm_type), group=group_or_world(grad_stats_parallel_group)).item()


def nothing() -> Tensor:
    """An empty gradient, for a rank that has none: the other ranks wait for its norm all the same."""
    return torch.empty(0, device="cuda" if torch.cuda.is_available() else "cpu")


def group_or_world(group: Any) -> Any:
    return dist.group.WORLD if group is None and dist.is_initialized() else group


def clip(parameters: Iterable[Tensor], max_norm: float, total_norm: float, use_decoupled_grad: bool = False) -> None:
    name, factor = "decoupled_grad" if use_decoupled_grad else "grad", max_norm / (total_norm + 1e-6)
    grads = [local(g).detach() for g in (getattr(p, name, None) for p in parameters) if g is not None]
    if grads and factor < 1.0:
        with torch.no_grad():
            multi_tensor_scale(grads, factor, out=grads)


def zeros_0_16(
    parameters: list[Tensor] | Tensor, grad_stats_parallel_group: Any, use_decoupled_grad: bool = False,
    tp_group: Any = None,
) -> float | Declined:  # fmt: skip
    return count_zeros(parameters, grad_stats_parallel_group, use_decoupled_grad, {"tp_group": tp_group})


def zeros(
    parameters: list[Tensor] | Tensor, grad_stats_parallel_group: Any, use_decoupled_grad: bool = False,
    tp_group: Any = None, expert_tp_group: Any = None,
) -> float | Declined:  # fmt: skip
    groups = {"tp_group": tp_group, "expert_tp_group": expert_tp_group}
    return count_zeros(parameters, grad_stats_parallel_group, use_decoupled_grad, groups)


def count_zeros(
    parameters: list[Tensor] | Tensor, group: Any, decoupled: bool, groups: dict[str, Any]
) -> float | Declined:
    from megatron.core.optimizer import clip_grads

    once = [clip_grads.param_is_not_shared, getattr(clip_grads, "param_is_not_gtp_duplicate", None)]
    grads = []
    for p in [parameters] if isinstance(parameters, Tensor) else parameters:
        if getattr(p, "__fsdp_param__", False):
            return Declined("parameters are Megatron FSDP's")
        grad = getattr(p, "decoupled_grad" if decoupled else "grad", None)
        alone = clip_grads.param_is_not_tensor_parallel_duplicate(p, **groups)
        if grad is not None and alone and all(is_alone(p) for is_alone in once if is_alone is not None):
            grads.append(grad)
    total = global_zeros(grads or [nothing()])
    if (group := group_or_world(group)) is not None:
        dist.all_reduce(total, group=group)
    return float(total)


MOE, ROPE = "megatron.core.transformer.moe.moe_utils", "megatron.core.models.common.embeddings.rope_utils"
SWIGLU, CLIP = "megatron.core.fusions.fused_bias_swiglu", "megatron.core.optimizer.clip_grads"
LOSS, FUSED_LOSS = "megatron.core.tensor_parallel.cross_entropy", "megatron.core.fusions.fused_cross_entropy"
# Of several rows for one function the first fits whose parameters it has: newer versions come first.
FUNCTIONS = (
    Function("swiglu", SWIGLU, "bias_swiglu_impl", "glu", bias_swiglu),
    Function("swiglu", SWIGLU, "weighted_bias_swiglu_impl", "glu", weighted_swiglu),
    Function("rope", ROPE, "apply_rotary_pos_emb", "rope_one", rotary),
    Function("rope", ROPE, "apply_rotary_pos_emb", "rope_one", rotary_0_16),
    Function("cross_entropy", LOSS, "vocab_parallel_cross_entropy", "cross_entropy", loss),
    Function("cross_entropy", LOSS, "vocab_parallel_cross_entropy", "cross_entropy", loss_0_16),
    Function("cross_entropy", FUSED_LOSS, "fused_vocab_parallel_cross_entropy", "cross_entropy", fused_loss),
    Function("router", MOE, "router_gating_linear", "router_linear", gating),
    Function("router", MOE, "topk_routing_with_score_function", "topk_routing", routing),
    Function("router", MOE, "topk_routing_with_score_function", "topk_routing", routing_0_16),
    Function("router", MOE, "z_loss_func", "router_z_loss", z_loss),
    Function("permute", MOE, "permute", "moe_permute", permute, exact=True),
    Function("permute", MOE, "permute", "moe_permute", permute_0_16, exact=True),
    Function("permute", MOE, "unpermute", "moe_unpermute", unpermute),
    Function("sort_chunks", MOE, "sort_chunks_by_idxs", "sort_chunks", chunks),
    Function("gradients", CLIP, "get_grad_norm_fp32", "multi_tensor_norm", grad_norm),
    Function("gradients", CLIP, "clip_grad_by_total_norm_fp32", "multi_tensor_scale", clip),
    Function("gradients", CLIP, "count_zeros_fp32", "multi_tensor_count_zeros", zeros),
    Function("gradients", CLIP, "count_zeros_fp32", "multi_tensor_count_zeros", zeros_0_16),
)
