"""Rivals from packages, and torch's attention by each of its backends: rows of data, and for each op of a row the small function
that turns a case's arguments into the rival's call.

A package is imported when one of its calls is asked for, never before. One that chooses its kernels by the environment when it is
imported has that in its row, and is measured in a process of its own. How packages are called was read from quack-kernels 0.6.5,
liger-kernel 0.8.5, sglang-kernel 0.4.2, flag-gems 5.0.2 and flashinfer-python 0.7.2, and of fla-core from what its documents say;
where another version takes other arguments, the rival is absent and the row says why.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..gemm.operands import DTYPES
from .directed import Absent, Call, directed, forward_only, needs, own_stream, takes
from .replaced import Replaced, Routing
from .timing import Within
from .work import Work

Make = Callable[[Work], Call]


class Rival(NamedTuple):
    """Somebody else's kernels: the module that they are in, what pip calls it, how each op is called, and what must be in the
    environment when the module is imported."""

    module: str
    pip: str
    calls: Mapping[str, Make]
    environment: Mapping[str, str] = MappingProxyType({})


def missing(name: str) -> str | None:
    """Why a rival cannot be had on this machine at all, or None."""
    rival = RIVALS[name]
    if importlib.util.find_spec(rival.module) is None:
        return f"{name}: {rival.module} is not installed (pip install {rival.pip})"
    return None


def call_of(name: str, work: Work) -> Call:
    """The rival's call over a buffer set. Raises `Absent`."""
    rival = RIVALS[name]
    make = rival.calls.get(work.case.op)
    if make is None:
        raise Absent(f"{name} has nothing for {work.case.op}")
    if is_apart(name):
        raise Absent(f"{name} is measured in a process of its own")
    return make(work)


def is_apart(name: str) -> bool:
    """Whether a rival has to be measured in another process than this one."""
    return name in RIVALS and not RIVALS[name].environment.items() <= os.environ.items()


# ---------------------------------------------------------------------------------------------------------------- liger

Load = Callable[[str, str], Any]


def liger_triton(module: str, name: str) -> Any:
    """A function of Liger's submodule: its kernel in Triton, whatever the environment says."""
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name)


def liger_cutedsl(module: str, name: str) -> Any:
    """A function as Liger exports it, which is that of its submodule unless the environment chose another."""
    found = getattr(importlib.import_module("liger_kernel.ops"), name)
    if ".cutedsl." not in found.__module__:
        raise Absent(f"liger has no {module} in CuTe")
    return found


def liger_rms_norm(load: Load, work: Work) -> Call:
    """By its mode `gemma`, which multiplies by the weight in fp32 as ours does."""
    takes(work, "x", "weight", "eps", "weight_offset")
    apply = load("rms_norm", "LigerRMSNormFunction").apply
    return directed(
        lambda x, weight, eps, weight_offset, **_: apply(x, weight, eps, weight_offset, "gemma", False), work
    )


def liger_add_rms_norm(load: Load, work: Work) -> Call:
    takes(work, "x", "residual", "weight", "eps", "weight_offset")
    needs(work, "weight")
    apply = load("fused_add_rms_norm", "LigerFusedAddRMSNormFunction").apply

    def function(x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, **_: Any) -> Any:
        return apply(x, residual, weight, eps, weight_offset, "gemma", False)

    return directed(function, work)


def liger_cross_entropy(load: Load, work: Work) -> Call:
    """Its loss computes the gradient in the forward, so that its backward alone is no rival."""
    takes(work, "logits", "labels", "ignore_index", "reduction", "label_smoothing", "softcap", "inplace_backward")
    forward_only(work)
    apply = load("cross_entropy", "LigerCrossEntropyFunction").apply

    def function(
        logits: Tensor,
        labels: Tensor,
        ignore_index: int,
        reduction: str,
        label_smoothing: float,
        softcap: Any,
        **_: Any,
    ) -> Tensor:
        return apply(logits, labels, None, ignore_index, 0.0, label_smoothing, reduction, softcap)[0]

    return directed(function, work)


def liger_linear_cross_entropy(load: Load, work: Work) -> Call:
    takes(work, "hidden", "weight", "labels", "ignore_index", "reduction")
    apply = load("fused_linear_cross_entropy", "LigerFusedLinearCrossEntropyFunction").apply

    def function(hidden: Tensor, weight: Tensor, labels: Tensor, ignore_index: int, reduction: str, **_: Any) -> Tensor:
        return apply(hidden, weight, labels, None, None, ignore_index, 0.0, 0.0, reduction)[0]

    return directed(function, work)


def liger_glu(load: Load, work: Work) -> Call:
    """It takes gate and up as tensors of their own; of one merged tensor it would copy both first."""
    takes(work, "x")
    if work.steps:
        raise Absent("its halves are cut before it is timed, and their gradients would have to be put together")
    apply = load("swiglu", "LigerSiLUMulFunction").apply
    gate, up = (half.contiguous() for half in work.values["x"].chunk(2, -1))
    if work.case.direction == "forward":
        return lambda: apply(gate, up)
    leaves = [gate.requires_grad_(), up.requires_grad_()]
    with own_stream():
        result = apply(*leaves)
    return lambda: torch.autograd.grad([result], leaves, list(work.grads), retain_graph=True)


def liger_calls(load: Load) -> dict[str, Make]:
    return {
        "rms_norm": partial(liger_rms_norm, load),
        "add_rms_norm": partial(liger_add_rms_norm, load),
        "cross_entropy": partial(liger_cross_entropy, load),
        "linear_cross_entropy": partial(liger_linear_cross_entropy, load),
        "glu": partial(liger_glu, load),
    }


# ---------------------------------------------------------------------------------------------------------------- quack


def quack_rms_norm(work: Work) -> Call:
    takes(work, "x", "weight", "eps", "weight_offset")
    norm = importlib.import_module("quack").rmsnorm
    return directed(
        lambda x, weight, eps, weight_offset, **_: norm(x, weight, eps=eps, weight_offset=weight_offset), work
    )


def quack_add_rms_norm(work: Work) -> Call:
    """Its `prenorm` is that the sum is given beside the norm."""
    takes(work, "x", "residual", "weight", "eps", "weight_offset")
    norm = importlib.import_module("quack").rmsnorm

    def function(x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, **_: Any) -> Any:
        return norm(x, weight, residual=residual, eps=eps, prenorm=True, weight_offset=weight_offset)

    return directed(function, work)


def quack_cross_entropy(work: Work) -> Call:
    """Its backward writes to memory of its own: one that wrote over its logits could not be called twice by autograd."""
    takes(work, "logits", "labels", "ignore_index", "reduction", "weight", "inplace_backward")
    loss = importlib.import_module("quack").cross_entropy

    def function(logits: Tensor, labels: Tensor, ignore_index: int, reduction: str, weight: Any, **_: Any) -> Tensor:
        return loss(logits, labels, weight=weight, ignore_index=ignore_index, reduction=reduction)

    return directed(function, work)


# ----------------------------------------------------------------------------------------------------------- sgl_kernel


def sgl_rms_norm(work: Work) -> Call:
    takes(work, "x", "weight", "eps")
    needs(work, "weight")
    forward_only(work)
    norm = importlib.import_module("sgl_kernel").rmsnorm
    return directed(lambda x, weight, eps, **_: norm(x, weight, eps), work)


def sgl_add_rms_norm(work: Work) -> Call:
    """It writes the norm over x and the sum over the residual: both are copies, made before."""
    takes(work, "x", "residual", "weight", "eps")
    needs(work, "weight")
    forward_only(work)
    norm = importlib.import_module("sgl_kernel").fused_add_rmsnorm
    x, residual = (work.values[name].clone() for name in ("x", "residual"))
    weight, eps = work.values["weight"], work.values["eps"]

    def call() -> tuple[Tensor, Tensor]:
        norm(x, residual, weight, eps)
        return x, residual

    return call


def sgl_glu(work: Work) -> Call:
    takes(work, "x")
    forward_only(work)
    glu = importlib.import_module("sgl_kernel").silu_and_mul
    return directed(lambda x, **_: glu(x), work)


def sgl_scaled_mm(work: Work) -> Call:
    """Of rows by rows of FP8 or INT8, and of 1x128 by 128x128 blocks of FP8: the second factor lies column by column, and so do the
    scales of blocks."""
    takes(work, "a", "b", "scale_a", "scale_b", "recipe_a", "recipe_b", "bias", "out_dtype", "accumulate", "backend")
    module, given = importlib.import_module("sgl_kernel"), work.values
    a, b, scale_a, scale_b, bias = (given[name] for name in ("a", "b", "scale_a", "scale_b", "bias"))
    kinds, dtype = (a.dtype, b.dtype, given["recipe_a"], given["recipe_b"]), DTYPES[given["out_dtype"]]
    if dtype == torch.float32:
        raise Absent("it has no results in fp32")
    rows = {torch.float8_e4m3fn: "fp8_scaled_mm", torch.int8: "int8_scaled_mm"}
    if kinds == (torch.float8_e4m3fn, torch.float8_e4m3fn, "BlockWise1x128", "BlockWise128x128"):
        if bias is not None:
            raise Absent("it adds no bias to products of blocks")
        if b.shape[1] % 128:
            raise Absent("its columns come in blocks of 128")
        by_block = scale_a.t().contiguous().t(), scale_b.contiguous().t()
        return lambda: module.fp8_blockwise_scaled_mm(a, b, *by_block, dtype)
    if kinds[0] == kinds[1] and kinds[0] in rows and kinds[2:] == ("RowWise", "RowWise"):
        product, scales = getattr(module, rows[kinds[0]]), (scale_a.reshape(-1), scale_b.reshape(-1))
        return lambda: product(a, b, *scales, dtype, bias)
    raise Absent(f"sgl_kernel has nothing for {work.case.family}")


# ------------------------------------------------------------------------------------------------------------ attention


def sdpa(backend: str, work: Work) -> Call:
    """torch's attention by one of its backends. Its tensors have heads before the length, which is a view of ours."""
    takes(work, "q", "k", "v", "scale", "causal", "mask", "backend")
    attention, given = importlib.import_module("torch.nn.attention"), work.values
    if given["causal"] and given["q"].shape[1] != given["k"].shape[1]:
        raise Absent("its causal mask begins at the upper left")
    if given["causal"] and given["mask"] is not None:
        raise Absent("it takes a mask or a causal one, not both")
    chosen = getattr(attention.SDPBackend, backend)

    def function(
        q: Tensor, k: Tensor, v: Tensor, scale: float | None, causal: bool, mask: Tensor | None, **_: Any
    ) -> Tensor:
        views = (t.transpose(1, 2) for t in (q, k, v))
        shared = q.shape[2] != k.shape[2]
        with attention.sdpa_kernel(chosen):
            o = torch.nn.functional.scaled_dot_product_attention(
                *views, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=shared
            )
        return o.transpose(1, 2)

    return directed(function, work)


def flash_attention(work: Work) -> Call:
    """FlashAttention 2 as torch has it: of batches by `scaled_dot_product_attention`, of packed sequences by `varlen_attn`."""
    if work.values["cu_seqlens_q"] is None:
        return sdpa("FLASH_ATTENTION", work)
    takes(work, "q", "k", "v", "scale", "causal", "left", "right", "cu_seqlens_q", "cu_seqlens_k", "backend")
    varlen_attn, given = importlib.import_module("torch.nn.attention.varlen").varlen_attn, work.values
    ends = [
        given[name] if given[name] is not None else given["cu_seqlens_q"] for name in ("cu_seqlens_q", "cu_seqlens_k")
    ]
    ends = [one.to(torch.int32) for one in ends]
    longest = [int(one.diff().max()) for one in ends]
    left, right = window(given)
    sides = tuple(-1 if side is None else side for side in (left, right))
    # A newer torch wants to be told that heads are shared; an older one took them so
    told = "enable_gqa" in inspect.signature(varlen_attn).parameters and given["q"].shape[2] != given["k"].shape[2]
    shared = {"enable_gqa": True} if told else {}

    def function(q: Tensor, k: Tensor, v: Tensor, scale: float | None, **_: Any) -> Tensor:
        flat = (t.squeeze(0) for t in (q, k, v))
        return varlen_attn(*flat, *ends, *longest, scale=scale, window_size=sides, **shared).unsqueeze(0)

    return directed(function, work)


def flex_attention(work: Work, compile: Callable[..., Any] = torch.compile) -> Call:
    """torch's attention of a mask and a score that are code, compiled; blocks that the mask hides are left out."""
    takes(work, "q", "k", "v", "scale", "causal", "left", "right", "softcap", "backend")
    flex, given = importlib.import_module("torch.nn.attention.flex_attention"), work.values
    q, k, cap = given["q"], given["k"], given["softcap"]
    (left, right), ahead = window(given), k.shape[1] - q.shape[1]  # positions are aligned to the lower right

    def visible(batch: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i = i + ahead
        seen = j >= 0 if left is None else j >= i - left
        return seen if right is None else seen & (j <= i + right)

    def capped(score: Tensor, *_: Tensor) -> Tensor:
        return cap * torch.tanh(score / cap)

    torch._dynamo.reset()
    bounded = left is not None or right is not None
    block = flex.create_block_mask(visible, None, None, q.shape[1], k.shape[1], device=q.device) if bounded else None
    program = compile(flex.flex_attention, dynamic=False)

    def function(q: Tensor, k: Tensor, v: Tensor, scale: float | None, **_: Any) -> Tensor:
        views = (t.transpose(1, 2) for t in (q, k, v))
        shared = q.shape[2] != k.shape[2]
        score = capped if cap else None
        return program(*views, score_mod=score, block_mask=block, scale=scale, enable_gqa=shared).transpose(1, 2)

    return directed(function, work)


def flash_attention_3(work: Work) -> Call:
    """FlashAttention 3 as sglang-kernel has it, forward alone: of packed sequences by one function, of batches by the one that
    takes them as a cache which is full."""
    takes(work, "q", "k", "v", "scale", "causal", "left", "right", "softcap", "cu_seqlens_q", "cu_seqlens_k", "backend")
    forward_only(work)
    module, given = importlib.import_module("sgl_kernel.flash_attn"), work.values
    left, right = window(given)
    # A causal mask has kernels of its own; sides are for windows
    causal = given["causal"] and left is None
    sides = (-1, -1) if causal else tuple(-1 if side is None else side for side in (left, right))
    about = {"causal": causal, "window_size": sides, "softcap": given["softcap"], "num_splits": 1}
    if given["cu_seqlens_q"] is None:

        def whole(q: Tensor, k: Tensor, v: Tensor, scale: float | None, **_: Any) -> Tensor:
            return module.flash_attn_with_kvcache(q, k, v, softmax_scale=scale, **about)

        return directed(whole, work)
    marks = [given[name].to(torch.int32) for name in ("cu_seqlens_q", "cu_seqlens_k")]
    longest = [int(one.diff().max()) for one in marks]

    def packed(q: Tensor, k: Tensor, v: Tensor, scale: float | None, **_: Any) -> Tensor:
        flat = (t.squeeze(0) for t in (q, k, v))
        return module.flash_attn_varlen_func(*flat, *marks, *longest, softmax_scale=scale, **about).unsqueeze(0)

    return directed(packed, work)


def cached_flash_attention_3(work: Work) -> Call:
    """FlashAttention 3 over a cache. Latent keys it takes as two: the columns that are values too, and those that are not."""
    takes(
        work, "q", "k_cache", "v_cache", "block_table", "kv_len", "value_dim", "scale", "causal", "left", "softcap", "split",
        "backend",
    )  # fmt: skip
    needs(work, "kv_len")
    attend, given = importlib.import_module("sgl_kernel.flash_attn").flash_attn_with_kvcache, work.values
    q, k, v, table = (given[name] for name in ("q", "k_cache", "v_cache", "block_table"))
    if k.dtype != q.dtype:
        raise Absent("over codes its queries would have to be codes too")
    about = {"causal": given["causal"], "softcap": given["softcap"], "softmax_scale": given["scale"]}
    if given["left"] is not None:
        about |= {"causal": False, "window_size": (given["left"], 0 if given["causal"] else -1)}
    about |= {"cache_seqlens": given["kv_len"].to(torch.int32), "page_table": table if table is None else table.int()}
    if v is None:
        n = given["value_dim"]
        return lambda: attend(q[..., n:], k[..., n:], k[..., :n], qv=q[..., :n], **about)
    return lambda: attend(q, k, v, **about)


def flash_mla(work: Work) -> Call:
    """FlashMLA, over pages of 64. What it plans from the lengths is made before: a server makes it once a step for all layers."""
    takes(work, "q", "k_cache", "v_cache", "block_table", "kv_len", "value_dim", "scale", "causal", "split", "backend")
    needs(work, "block_table", "value_dim")
    module, given = importlib.import_module("sgl_kernel.flash_mla"), work.values
    q, cache, n = given["q"], given["k_cache"], given["value_dim"]
    if cache.shape[1] != 64 or cache.dtype != q.dtype or (q.shape[3], n) != (576, 512):
        raise Absent("it takes keys of 576 columns, 512 of them values, in pages of 64")
    lengths, table = given["kv_len"].to(torch.int32), given["block_table"].to(torch.int32)
    planned = module.get_mla_metadata(lengths, q.shape[1] * q.shape[2] // cache.shape[2], cache.shape[2])
    about = {"softmax_scale": given["scale"], "causal": given["causal"]}
    return lambda: module.flash_mla_with_kvcache(q, cache, table, lengths, n, *planned, **about)[0]


def flashinfer(work: Work) -> Call:
    """FlashInfer, forward alone, of packed sequences; batches are such ones of equal lengths. What it plans from lengths is made
    before: a server makes it once a step for all layers."""
    takes(work, "q", "k", "v", "scale", "causal", "left", "softcap", "cu_seqlens_q", "cu_seqlens_k", "backend")
    forward_only(work)
    module, given = importlib.import_module("flashinfer"), work.values
    (batch, length, heads, width), keys = given["q"].shape, given["k"].shape[1]
    marks = [given["cu_seqlens_q"], given["cu_seqlens_k"]]
    if marks[0] is None:
        marks = [torch.arange(batch + 1, device=given["q"].device) * n for n in (length, keys)]
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(flashinfer_room(given["q"]), "NHD")
    ends = (one.to(torch.int32) for one in marks)
    wrapper.plan(*ends, heads, given["k"].shape[2], width, given["v"].shape[3], **flashinfer_plan(given))
    return directed(
        lambda q, k, v, **_: wrapper.run(*(t.flatten(0, 1) for t in (q, k, v))).unflatten(0, (batch, length)), work
    )


def cached_flashinfer(work: Work) -> Call:
    """FlashInfer over pages, of which a cache without a table has one to a sequence: a token by its kernels for decoding, more by
    those for prompts."""
    takes(
        work, "q", "k_cache", "v_cache", "block_table", "kv_len", "scale", "causal", "left", "softcap", "split", "backend"
    )  # fmt: skip
    needs(work, "kv_len", "v_cache")
    module, given = importlib.import_module("flashinfer"), work.values
    q, k, v, table = (given[name] for name in ("q", "k_cache", "v_cache", "block_table"))
    if k.dtype != q.dtype:
        raise Absent("over codes it takes a scale for the whole cache alone")
    (batch, length, heads, width), (_, page, kv_heads, _) = q.shape, k.shape
    table = torch.arange(batch, device=q.device)[:, None] if table is None else table
    lengths = given["kv_len"].to(torch.int32)
    pages = -(-lengths // page)
    ends = torch.nn.functional.pad(pages.cumsum(0), (1, 0)).to(torch.int32)
    used = table[torch.arange(table.shape[1], device=table.device) < pages[:, None]].to(torch.int32)
    about, room, sizes = flashinfer_plan(given), flashinfer_room(q), (heads, kv_heads, width, page)
    last = lengths - (pages - 1) * page
    if length == 1:
        about.pop("causal")
        wrapper = module.BatchDecodeWithPagedKVCacheWrapper(room, "NHD", use_tensor_cores=heads > kv_heads)
        wrapper.plan(ends, used, last, *sizes, **about)
    else:
        wrapper = module.BatchPrefillWithPagedKVCacheWrapper(room, "NHD")
        tokens = torch.arange(batch + 1, device=q.device, dtype=torch.int32) * length
        wrapper.plan(tokens, ends, used, last, *sizes, **about)
    flat = q.flatten(0, 1)
    return lambda: wrapper.run(flat, (k, v)).unflatten(0, (batch, length))


def flashinfer_room(q: Tensor) -> Tensor:
    """The memory that it wants to be given, as much as it advises."""
    return torch.empty(128 << 20, dtype=torch.uint8, device=q.device)


def flashinfer_plan(given: Mapping[str, Any]) -> dict[str, Any]:
    left = -1 if given["left"] is None else given["left"]
    kinds = dict.fromkeys(("q_data_type", "kv_data_type"), given["q"].dtype)
    about = {"causal": given["causal"], "window_left": left}
    about |= {"logits_soft_cap": given["softcap"], "sm_scale": given["scale"]}
    return {**about, **kinds}


def linear_attention(work: Work) -> Call:
    """flash-linear-attention, by chunks: its gated delta rule, or its linear attention with a decay of each head or token. The
    decay of a head has no gradient: there each token has one. Its delta rule is given copies of key heads, untimed."""
    takes(work, "q", "k", "v", "log_decay", "beta", "state", "scale", "normalize")
    given = work.values
    if given["beta"] is None:
        if given["normalize"] or given["q"].shape[2] != given["v"].shape[2]:
            raise Absent("its linear attention neither normalises rows nor shares key heads")
        chunked = importlib.import_module("fla.ops.simple_gla").chunk_simple_gla

        def plain(
            q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, state: Tensor | None, scale: Any, **_: Any
        ) -> Any:
            by_head = log_decay is not None and log_decay.dim() == 1
            if by_head and log_decay.requires_grad:
                log_decay, by_head = log_decay.expand(*v.shape[:3]), False
            decay = {"g_gamma" if by_head else "g": log_decay}
            return chunked(q, k, v, scale=scale, initial_state=state, output_final_state=True, **decay)

        return directed(plain, work)
    if given["log_decay"] is None or given["log_decay"].dim() != 3:
        raise Absent("its delta rule has a decay of each token")
    delta = importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule
    group = given["v"].shape[2] // given["k"].shape[2]
    if group > 1:
        forward_only(work)
    copies = [given[name].repeat_interleave(group, 2) for name in ("q", "k")] if group > 1 else None

    def ruled(
        q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor, state: Tensor | None, scale: Any, normalize: bool,
        **_: Any,
    ) -> Any:  # fmt: skip
        q, k = copies or (q, k)
        about = {"scale": scale, "initial_state": state, "use_qk_l2norm_in_kernel": normalize}
        return delta(q, k, v, log_decay, beta, output_final_state=True, **about)

    return directed(ruled, work)


def window(given: Mapping[str, Any]) -> tuple[int | None, int | None]:
    """How many keys before and after its own a query sees; None for all of them. A causal one sees none after."""
    return given["left"], 0 if given["causal"] else given["right"]


# ------------------------------------------------------------------------------------------------------------- FlagGems


def flaggems(work: Replaced) -> Call:
    """torch's operators with all of FlagGems' in their places. Absent where a call reaches none of them: it would be aten's."""
    gems = importlib.import_module("flag_gems")
    with gems.use_gems(), Routing({}) as calls:
        served = {*gems.all_registered_keys()}
        work.plain()
    if not calls.seen & served:
        raise Absent(f"flaggems has none of {', '.join(sorted(calls.seen))}")
    return Within(work.plain, gems.use_gems)


def flaggems_rwkv_keys(work: Work) -> Call:
    takes(work, "k", "kk", "a", "ka", "heads")
    forward_only(work)
    keys = importlib.import_module("flag_gems").rwkv_ka_fusion
    return directed(lambda k, kk, a, ka, heads: keys(k, kk, a, ka, heads, k.shape[-1] // heads), work)


def flaggems_sparse_mm(work: Work) -> Call:
    a, b = work.values["a"], work.values["b"]
    if a.numel() != a.shape[-1]:
        raise Absent("it takes one token")
    product, weights = importlib.import_module("flag_gems").rwkv_mm_sparsity, a.reshape(-1)
    return lambda: product(weights, b).reshape(*a.shape[:-1], -1)


# ------------------------------------------------------------------------------------------------------------- the rows

CUTEDSL = MappingProxyType({"LIGER_KERNEL_IMPL": "cutedsl"})
QUACK = {"rms_norm": quack_rms_norm, "add_rms_norm": quack_add_rms_norm, "cross_entropy": quack_cross_entropy}
SGL = {"rms_norm": sgl_rms_norm, "add_rms_norm": sgl_add_rms_norm, "glu": sgl_glu, "scaled_mm": sgl_scaled_mm}
GEMS = {"aten": flaggems, "rwkv_keys": flaggems_rwkv_keys, "sparse_mm": flaggems_sparse_mm}
FA3 = {"attention": flash_attention_3, "cached_attention": cached_flash_attention_3}
INFER = {"attention": flashinfer, "cached_attention": cached_flashinfer}
RIVALS: dict[str, Rival] = {
    "liger": Rival("liger_kernel", "liger-kernel", liger_calls(liger_triton)),
    "liger_cutedsl": Rival("liger_kernel", "'liger-kernel[cutedsl]'", liger_calls(liger_cutedsl), CUTEDSL),
    "quack": Rival("quack", "quack-kernels", QUACK),
    "flaggems": Rival("flag_gems", "flag-gems", GEMS),
    "sgl_kernel": Rival("sgl_kernel", "sglang-kernel", SGL),
    "cudnn": Rival("torch.nn.attention", "torch", {"attention": partial(sdpa, "CUDNN_ATTENTION")}),
    "fa2": Rival("torch.nn.attention", "torch", {"attention": flash_attention}),
    "fa3": Rival("sgl_kernel", "sglang-kernel", FA3),
    "flashinfer": Rival("flashinfer", "flashinfer-python", INFER),
    "fla": Rival("fla", "fla-core", {"linear_attention": linear_attention}),
    "flashmla": Rival("sgl_kernel", "sglang-kernel", {"cached_attention": flash_mla}),
    "flex": Rival("torch.nn.attention.flex_attention", "torch", {"attention": flex_attention}),
}
