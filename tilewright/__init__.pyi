"""Signatures of the public names. Generated: edit a declaration or `names.py`, then run `tilewright docs`."""

from typing import Literal, overload

import torch
from torch import Tensor

from . import aten as aten
from . import nn as nn
from .attention.quantised import attention as attention
from .attention.quantised import attention_lse as attention_lse
from .core.declaration import Triton as Triton
from .core.draw import Draw as Draw
from .core.format import Format as Format
from .core.format import Quantized as Quantized
from .core.target import Target as Target
from .formats.fp8 import fp8 as fp8
from .formats.integers import int4 as int4
from .formats.integers import int8 as int8
from .formats.mx import mx as mx
from .formats.nvfp4 import nvfp4 as nvfp4
from .formats.swizzle import swizzle_scale as swizzle_scale
from .formats.swizzle import unswizzle_scale as unswizzle_scale
from .formats.weights import from_awq as from_awq
from .formats.weights import from_gptq as from_gptq
from .gemm.scaled_mm import scaled_mm as scaled_mm
from .integrations.huggingface.patching import patch as patch
from .integrations.huggingface.patching import unpatch as unpatch
from .nn.linear_fp8 import linear_fp8_main_grad as linear_fp8_main_grad
from .op import Op as Op
from .op import warmup as warmup
from .ops.embedding.embedding import embedding_main_grad as embedding_main_grad
from .ops.loss.parallel_cross_entropy import parallel_cross_entropy as parallel_cross_entropy
from .ops.moe.grouped_mm import grouped_mm as grouped_mm
from .ops.norm.instance_norm import instance_norm as instance_norm
from .ops.optimiser.clip_grad import clip_grad_norm_ as clip_grad_norm_
from .ops.optimiser.clip_grad import global_norm as global_norm
from .ops.quantise.quantize import dequantize as dequantize
from .ops.quantise.smooth_quantize import smooth_scale as smooth_scale
from .runtime.choose import force as force
from .runtime.kernel import kernel as kernel

__version__: str

def declaration(name: str) -> Op:
    """The declaration of one op, from its module alone."""

def catalogue() -> dict[str, Op]:
    """Every declared op by name."""

@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    out_format: None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(h), h) with h = residual + gate * x, the new residual; `gate` broadcasts as `scale` and `shift` do, and without"""

@overload
def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    out_format: Format,
    out: tuple[Quantized | None, Tensor | None] | None = None,
) -> tuple[Quantized, Tensor]:
    """(layer_norm(h), h) with h = residual + gate * x, the new residual; `gate` broadcasts as `scale` and `shift` do, and without"""

@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    out_format: None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = residual + gate * x, the new residual; `gate` broadcasts as `scale` and `shift` do, and without"""

@overload
def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    weight_offset: float = 0.0,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    gate: Tensor | None = None,
    out_format: Format,
    out: tuple[Quantized | None, Tensor | None] | None = None,
) -> tuple[Quantized, Tensor]:
    """(rms_norm(h), h) with h = residual + gate * x, the new residual; `gate` broadcasts as `scale` and `shift` do, and without"""

def attention_blocks(
    x: Tensor,
    length: int,
    mean: Tensor | None = None,
    *,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes, scales [batch, keys, kv_heads]) as `attention_rows` makes them, in e4m3, but with one scale for each 128 keys of a"""

def attention_codes(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    q_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_mean: Tensor | None = None,
    *,
    out_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    scale: float | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scaled: Literal["key", "block"] = "key",
    backend: Literal["auto", "triton", "hopper", "portable"] = "auto",
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of `attention_lse` over `k` in codes, int8 or e4m3, with a `k_scale` [batch, keys, kv_heads]."""

def attention_codes_pv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor,
    q_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    k_mean: Tensor | None = None,
    *,
    out_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    scale: float | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    scaled: Literal["key", "block"] = "key",
    backend: Literal["auto", "triton", "hopper", "portable"] = "auto",
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of `attention_lse` over `k` in codes, int8 or e4m3, with a `k_scale` [batch, keys, kv_heads]."""

def attention_mean(
    x: Tensor,
    there: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The mean [batch, kv_heads, columns] of `x` [batch, keys, kv_heads, columns] over its keys; what is not finite counts as 0."""

def attention_merge(
    o: Tensor,
    lse: Tensor,
    *,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of all keys, of parts `o` [parts, batch, length, heads, value_dim] and `lse` [parts, batch, heads, length]."""

def attention_rows(
    x: Tensor,
    mean: Tensor | None = None,
    *,
    kind: Literal["int8", "fp8"] = "int8",
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(codes, scales [batch, keys, kv_heads]) of `x` [batch, keys, kv_heads, columns], less `mean` [batch, kv_heads, columns] if"""

def cache_move(
    k_cache: Tensor,
    v_cache: Tensor | None,
    source: Tensor,
    target: Tensor,
) -> None:
    """Copy what caches [pages, page, kv_heads, columns] hold in slots `source` [moves] into slots `target`."""

def cache_write(
    k: Tensor,
    v: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor | None,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Write `k` [..., kv_heads, head_dim] and `v` of tokens into the `slots` [...] of caches [pages, page, kv_heads, columns]."""

def cached_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor | None = None,
    block_table: Tensor | None = None,
    kv_len: Tensor | None = None,
    *,
    value_dim: int | None = None,
    k_rope: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    scale: float | None = None,
    causal: bool = True,
    left: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    tree: Tensor | None = None,
    split: int | None = None,
    backend: Literal[
        "auto", "hopper_chunks", "hopper_decode", "hopper_latent", "hopper_latent_few", "portable"
    ] = "auto",
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse): attention of `q` [batch, length, heads, head_dim] over caches [pages, page, kv_heads, head_dim], forward only."""

def causal_conv1d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    act: Literal["silu"] | None = None,
    state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve each column of `x` [batch, length, hidden] with the last `width` inputs by `weight` [hidden, width]; (y, new state)."""

def causal_conv1d_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor | None = None,
    *,
    act: Literal["silu"] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Convolve a token `x` [tokens, hidden] with what `state` [pool, hidden, columns] holds at its slot, and write the token there."""

def column_amax(
    x: Tensor,
    *,
    offsets: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """max |x| of each column in fp32, [1, hidden] or, with `offsets` (end rows of groups), [experts, hidden]; 0 of no rows."""

def cross_entropy(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weight: Tensor | None = None,
    inplace_backward: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """The fp32 loss that `torch.nn.functional.cross_entropy` gives for fp32 logits, classes in the last dimension."""

def cross_entropy_join(
    parts: Tensor,
    gathered: Tensor,
    labels: Tensor,
    *,
    classes: int,
    rank: int = 0,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """The loss of every row from the parts that `cross_entropy_parts` gave, each for some columns of it."""

def cross_entropy_lse(
    logits: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    weight: Tensor | None = None,
    inplace_backward: bool = False,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(`cross_entropy`, the fp32 logsumexp of every row of softcap(logits) whatever its label). Both have gradients."""

def cross_entropy_parts(
    logits: Tensor,
    labels: Tensor,
    *,
    start: int = 0,
    classes: int | None = None,
    ignore_index: int = -100,
    slant: bool = False,
    softcap: float | None = None,
    inplace_backward: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """What `cross_entropy_join` needs of a row's columns `start` to `start + logits.shape[-1]`: fp32 `[..., 5]`."""

def dequantize_codes(
    codes: Tensor,
    scale: Tensor,
    format: str,
    way: Literal["row", "col"] = "row",
    dtype: Literal["bfloat16", "float16", "float32", "float64"] = "bfloat16",
    *,
    offsets: Tensor | None = None,
    shared: Tensor | None = None,
    zero: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """(code - zero) * scale * shared in fp32, rounded to `dtype`: the matrix whose row-wise operand, or twin, these are."""

def embedding(
    ids: Tensor,
    weight: Tensor,
    *,
    padding_idx: int | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The rows of `weight` [vocab, hidden] that `ids` name: [..., hidden]."""

def embedding_accumulate(
    ids: Tensor,
    dy: Tensor,
    main_grad: Tensor,
    *,
    padding_idx: int | None = None,
) -> None:
    """Add the gradient of an embedding to `main_grad` [vocab, hidden]: each row of `dy` to the row that its id names."""

@overload
def epilogue(
    x: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    out_format: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`residual + alpha * gate * act(x + bias + add)`, in fp32 and rounded once; what is None is left out."""

@overload
def epilogue(
    x: Tensor,
    *,
    bias: Tensor | None = None,
    add: Tensor | None = None,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    alpha: float = 1.0,
    out_dtype: torch.dtype | None = None,
    out_format: Format,
    out: Quantized | None = None,
) -> Quantized:
    """`residual + alpha * gate * act(x + bias + add)`, in fp32 and rounded once; what is None is left out."""

@overload
def gated_group_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    groups: int = 1,
    transposed: bool = True,
    act: Literal["sigmoid", "silu"] = "sigmoid",
    out_format: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scale each of `groups` equal parts of every row of `x` to unit root-mean-square, then by `weight` and `act(gate)`;"""

@overload
def gated_group_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    groups: int = 1,
    transposed: bool = True,
    act: Literal["sigmoid", "silu"] = "sigmoid",
    out_format: Format,
    out: Quantized | None = None,
) -> Quantized:
    """Scale each of `groups` equal parts of every row of `x` to unit root-mean-square, then by `weight` and `act(gate)`;"""

@overload
def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    scale: Tensor | None = None,
    offsets: Tensor | None = None,
    out_format: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`act(gate) * up`, in fp32 and rounded once: gate and up are the first and second half of `x`, or `x` and `up`."""

@overload
def glu(
    x: Tensor,
    up: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    scale: Tensor | None = None,
    offsets: Tensor | None = None,
    out_format: Format,
    out: Quantized | None = None,
) -> Quantized:
    """`act(gate) * up`, in fp32 and rounded once: gate and up are the first and second half of `x`, or `x` and `up`."""

def glu_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    up: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`glu(x, up) @ weight.T + bias`, for whose backward x and up are kept, but not the unit's value; see `glu` for the options."""

def glu_linear_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    up: Tensor | None = None,
    weight_codes: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_codes_t: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    alpha: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """`linear_fp8(glu(x, up), weight, bias)`, for whose backward x and up are kept, but nothing of the unit's value."""

def grouped_mm_inner(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    c: Tensor | None = None,
    beta: float = 0.0,
    out_dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The product of `a` [rows, tokens] and `b` [tokens, columns] over the tokens of each group, plus `beta * c`."""

def grouped_mm_inner_fp8(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    *,
    recipe: Literal["BlockWise1x128", "RowWise"] = "BlockWise1x128",
    c: Tensor | None = None,
    beta: float = 0.0,
    out_dtype: Literal["bfloat16", "float16", "float32"] = "float32",
    out: Tensor | None = None,
) -> Tensor:
    """The same of FP8 codes: `scale_a` [tokens / 128, rows] and `scale_b` [tokens / 128, columns], as `fp8(\"1x128\")` has them"""

def grouped_mm_masked(
    a: Tensor,
    b: Tensor,
    counts: Tensor,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    *,
    out_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    out: Tensor | None = None,
) -> Tensor:
    """The first `counts[e]` rows of `a[e]` [experts, rows, inner] times `b[e]` [experts, inner, columns], summed in fp32 and"""

def grouped_mm_rows(
    a: Tensor,
    b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu"] | None = None,
    glu: Literal["silu", "gelu_tanh", "gelu_erf", "relu"] | None = None,
    out_dtype: Literal["bfloat16", "float16", "float32"] | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """The rows of `a` [rows, inner], each times the matrix of its group in `b` [experts, inner, columns]; `offsets` [experts] are"""

def grouped_mm_rows_fp8(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    *,
    bias: Tensor | None = None,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu"] | None = None,
    glu: Literal["silu", "gelu_tanh", "gelu_erf", "relu"] | None = None,
    out_dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16",
    out: Tensor | None = None,
) -> Tensor:
    """The same of FP8 codes: `scale_a` [inner / 128, rows] for `a`, `scale_b` [experts, columns / 128, inner / 128] for `b`, as"""

@overload
def hadamard(
    x: Tensor,
    *,
    block: Literal[16, 32, 64, 128, 256] = 64,
    dim: Literal[-1, 0] = -1,
    out_format: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`x` rotated by Hadamard matrices of size `block`, which must divide the size along `dim`; in fp32, rounded once."""

@overload
def hadamard(
    x: Tensor,
    *,
    block: Literal[16, 32, 64, 128, 256] = 64,
    dim: Literal[-1, 0] = -1,
    out_format: Format,
    out: Quantized | None = None,
) -> Quantized:
    """`x` rotated by Hadamard matrices of size `block`, which must divide the size along `dim`; in fp32, rounded once."""

def hadamard_quantize(
    x: Tensor,
    out_format: Format,
    *,
    block: Literal[16, 32, 64, 128] = 64,
    out: Quantized | None = None,
) -> Quantized:
    """The matrix `x` for a product that sums over features and one that sums over tokens, in one pass."""

@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    out_format: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Bring each row of `x` to mean 0 and variance 1, then `* weight + bias`, then `* (1 + scale) + shift`; all in fp32, rounded"""

@overload
def layer_norm(
    x: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-05,
    *,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    out_format: Format,
    out: Quantized | None = None,
) -> Quantized:
    """Bring each row of `x` to mean 0 and variance 1, then `* weight + bias`, then `* (1 + scale) + shift`; all in fp32, rounded"""

def linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention of `q`, `k` [batch, length, key_heads, key_dim] and `v` [batch, length, heads, value_dim]; (o, last state)."""

def linear_attention_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_attention` with a `log_decay` of each column, [batch, length, heads, key_dim], which has no gradient."""

def linear_attention_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    slots: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """Take a token `q`, `k` [tokens, key_heads, key_dim], `v` [tokens, heads, value_dim] into the state of its slot, and read it."""

def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
    out: Tensor | None = None,
) -> Tensor:
    """`cross_entropy(hidden @ weight.T + bias, labels)` without the memory of the logits; see there for the options."""

def linear_fp8(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_codes: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_codes_t: Tensor | None = None,
    *,
    keep: Literal["codes", "input"] = "codes",
    out: Tensor | None = None,
) -> Tensor:
    """`x @ weight.T + bias` for `x` [..., in] and `weight` [out, in], as `torch.nn.functional.linear` has them; all products,"""

def linear_fp8_accumulate(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    main_grad: Tensor,
    weight_codes: Tensor | None = None,
    weight_scale: Tensor | None = None,
    weight_codes_t: Tensor | None = None,
    *,
    data: bool = True,
    add: bool = True,
    out: Tensor | None = None,
) -> Tensor:
    """The backward of `linear_fp8`: gives `dy @ weight`, or nothing without `data`, and adds `dy.T @ x` to `main_grad` if `add`."""

def load_balancing_loss(
    logits: Tensor,
    counts: Tensor,
    coef: float,
    *,
    score: Literal["softmax", "sigmoid", "given"] = "softmax",
    out: Tensor | None = None,
) -> Tensor:
    """`coef * experts * sum_e f_e * P_e`, fp32: `f_e` is the share of the choices that expert e has, `P_e` its mean score."""

@overload
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu"] | None = None,
    c: Tensor | None = None,
    beta: float = 0.0,
    acc_dtype: Literal["float32", "float16", "int32"] | None = None,
    out_dtype: Literal["bfloat16", "float16", "float32", "int32"] | None = None,
    out_format: None = None,
    backend: Literal["auto", "triton", "cublaslt", "few", "portable"] = "auto",
    out: Tensor | None = None,
) -> Tensor:
    """`act(a @ b + bias + beta * c)` of `a` [..., K] and `b` [K, N], both of one dtype or both FP8: summed in `acc_dtype`, all else"""

@overload
def matmul(
    a: Tensor,
    b: Tensor,
    *,
    bias: Tensor | None = None,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu"] | None = None,
    c: Tensor | None = None,
    beta: float = 0.0,
    acc_dtype: Literal["float32", "float16", "int32"] | None = None,
    out_dtype: Literal["bfloat16", "float16", "float32", "int32"] | None = None,
    out_format: Format,
    backend: Literal["auto", "triton", "cublaslt", "few", "portable"] = "auto",
    out: Quantized | None = None,
) -> Quantized:
    """`act(a @ b + bias + beta * c)` of `a` [..., K] and `b` [K, N], both of one dtype or both FP8: summed in `acc_dtype`, all else"""

def mla_rope(
    q: Tensor,
    kv: Tensor,
    k_pos: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs: Tensor | None = None,
    *,
    layout: Literal["sbhd", "bshd"] = "sbhd",
    pairing: Literal["interleaved", "half"] = "interleaved",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v) for attention from `q` [.., heads, nope + n], `kv` [.., heads, nope + v] and `k_pos` [.., 1, n] of all heads."""

def moe_feed_forward(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Tensor | None = None,
    probs: Tensor | None = None,
    gate_up_codes: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    gate_up_codes_t: Tensor | None = None,
    down_codes: Tensor | None = None,
    down_scale: Tensor | None = None,
    down_codes_t: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    capacity: int | None = None,
    precision: Literal["input", "fp8"] = "input",
    keep: Literal["all", "product", "input"] = "all",
    out: Tensor | None = None,
) -> Tensor:
    """Each token's sum over its experts of `down[e] @ glu(gate_up[e] @ x)`, times the router's `probs`: [tokens, hidden]."""

@overload
def moe_permute(
    x: Tensor,
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    experts: int | None = None,
    topk: int | None = None,
    align: int = 16,
    capacity: int | None = None,
    out_format: None = None,
    out: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows [capacity, hidden], row_probs [capacity], row_map, source, offsets, overflow): rows of `x` grouped by expert."""

@overload
def moe_permute(
    x: Tensor,
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    experts: int | None = None,
    topk: int | None = None,
    align: int = 16,
    capacity: int | None = None,
    out_format: Format,
    out: tuple[Quantized | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    | None = None,
) -> tuple[Quantized, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows [capacity, hidden], row_probs [capacity], row_map, source, offsets, overflow): rows of `x` grouped by expert."""

def moe_permute_codes(
    codes: Tensor,
    scale: Tensor,
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    experts: int | None = None,
    topk: int | None = None,
    align: int = 16,
    capacity: int | None = None,
    out: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None, Tensor | None]
    | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, row_scale [capacity, blocks], row_probs, row_map, source, offsets, overflow): as `moe_permute`, of bytes `codes`"""

def moe_row_map(
    routing: Tensor,
    *,
    experts: int | None = None,
    topk: int | None = None,
    align: int = 16,
    capacity: int | None = None,
    out: tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(row_map [tokens, slots], source [capacity], offsets [experts], overflow []), int32: rows grouped by expert."""

def moe_unpermute(
    rows: Tensor,
    row_map: Tensor,
    probs: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """Each token's sum of its rows, in fp32 and in the order of `row_map`, [tokens, hidden]."""

def multi_tensor_count_zeros(
    tensors: list[Tensor],
    *,
    out: Tensor | None = None,
) -> Tensor:
    """How many elements of all tensors are zero, of either sign, an int64 scalar. DTensors give the count of the whole."""

def multi_tensor_norm(
    tensors: list[Tensor],
    ord: float = 2.0,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The 1-, 2- or inf-norm of all elements of all tensors together, an fp32 scalar (float64 if a tensor is)."""

def multi_tensor_scale(
    tensors: list[Tensor],
    scale: float = 1.0,
    *,
    by: Tensor | None = None,
    limit: float | None = None,
    out: list[Tensor] | None = None,
) -> list[Tensor]:
    """Every tensor times `scale`, and times the scalar `by` if it is given, which stays on the device."""

def outer(
    x: Tensor,
    y: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`x[:, None] * y[None, :]` of two vectors of one dtype, in fp32 and rounded once; torch's `outer`. Either may be a slice or"""

def qkv_split(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    freqs: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    eps: float = 1e-06,
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    packing: Literal["grouped", "plain"] = "grouped",
    transposed: bool = False,
    silu: bool = False,
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(q, k, v), each [batch, length, heads, head_dim], of `qkv` [batch, length, width] or, `transposed`, [length, batch, width]."""

def qkv_split_cache(
    qkv: Tensor,
    heads: int,
    kv_heads: int,
    head_dim: int,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    freqs: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    *,
    positions: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    eps: float = 1e-06,
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    packing: Literal["grouped", "plain"] = "grouped",
    silu: bool = False,
    mscale: float = 1.0,
    out: Tensor | None = None,
) -> Tensor:
    """q [batch, length, heads, head_dim] of `qkv` [batch, length, width]; keys and values are written into `slots` of caches."""

def quantize(
    x: Tensor,
    out_format: Format,
    *,
    offsets: Tensor | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """`x` in `out_format`, rounded to fp32 first if it is float64; the gradient passes unchanged."""

@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    weight_offset: float = 0.0,
    rstd: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    out_format: None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Scale each row of `x` to unit root-mean-square, then by `weight + weight_offset`, then `* (1 + scale) + shift`; all in fp32,"""

@overload
def rms_norm(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    weight_offset: float = 0.0,
    rstd: Tensor | None = None,
    scale: Tensor | None = None,
    shift: Tensor | None = None,
    out_format: Format,
    out: Quantized | None = None,
) -> Quantized:
    """Scale each row of `x` to unit root-mean-square, then by `weight + weight_offset`, then `* (1 + scale) + shift`; all in fp32,"""

@overload
def rms_norm_router(
    x: Tensor,
    weight: Tensor | None,
    router: Tensor,
    eps: float = 1e-06,
    *,
    out_format: None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(y, logits): `rms_norm(x, weight, eps)`, and the fp32 logits `y @ router.T` from exact products of `y` in x's dtype."""

@overload
def rms_norm_router(
    x: Tensor,
    weight: Tensor | None,
    router: Tensor,
    eps: float = 1e-06,
    *,
    out_format: Format,
    out: tuple[Quantized | None, Tensor | None] | None = None,
) -> tuple[Quantized, Tensor]:
    """(y, logits): `rms_norm(x, weight, eps)`, and the fp32 logits `y @ router.T` from exact products of `y` in x's dtype."""

@overload
def rms_norm_rstd(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    weight_offset: float = 0.0,
    out_format: None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """`rms_norm`, and the fp32 reciprocal root-mean-square of each row that it used."""

@overload
def rms_norm_rstd(
    x: Tensor,
    weight: Tensor | None = None,
    eps: float = 1e-06,
    *,
    weight_offset: float = 0.0,
    out_format: Format,
    out: tuple[Quantized | None, Tensor | None] | None = None,
) -> tuple[Quantized, Tensor]:
    """`rms_norm`, and the fp32 reciprocal root-mean-square of each row that it used."""

def rope(
    q: Tensor,
    k: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs: Tensor | None = None,
    *,
    layout: Literal["bhsd", "bshd", "sbhd"] = "bhsd",
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Rotate the first `rotary_dim` columns (default: all) of every head of `q` and of `k`, in fp32 and rounded once."""

def rope_one(
    x: Tensor,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    freqs: Tensor | None = None,
    *,
    layout: Literal["bhsd", "bshd", "sbhd"] = "bhsd",
    rotary_dim: int | None = None,
    pairing: Literal["half", "interleaved"] = "half",
    mscale: float = 1.0,
    cu_seqlens: Tensor | None = None,
    cp_size: int = 1,
    cp_rank: int = 0,
    positions: Tensor | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """`rope` of one tensor."""

def router_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    precision: Literal["high", "ieee"] = "high",
    out: Tensor | None = None,
) -> Tensor:
    """fp32 logits `x @ weight.T + bias`, from exact products of bf16 or fp16 `x` and `weight`."""

def router_z_loss(
    logits: Tensor,
    coef: float,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`coef` times the mean over tokens of the squared logsumexp of their logits [..., experts]; fp32."""

def routing_map(
    indices: Tensor,
    probs: Tensor,
    *,
    experts: int,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(dense probs [..., experts], map bool [..., experts]) of a choice of experts and its weights, both [..., k]."""

def rwkv_keys(
    k: Tensor,
    kk: Tensor,
    a: Tensor,
    ka: Tensor,
    *,
    heads: int,
    out: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """RWKV-7's (keys, removal, removal_a): `k * (1 + (a - 1) * ka)`, `k * kk` of each head brought to length 1, that times `a`."""

def sample(
    logits: Tensor,
    seed: Tensor,
    temperature: Tensor,
    top_k: Tensor | None = None,
    top_p: Tensor | None = None,
    min_p: Tensor | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """int64 ids [...], one drawn from each row of `logits` [..., vocab]; all that it goes by is read on the device."""

def smooth_quantize(
    x: Tensor,
    smooth: Tensor,
    out_format: Format,
    *,
    reverse: bool = False,
    offsets: Tensor | None = None,
    out: Quantized | None = None,
) -> Quantized:
    """`x / smooth` per column in `out_format`, or `x * smooth` if `reverse`: in fp32, one rounding, then the format's."""

def softmax(
    x: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """The softmax of each row of `x`, in fp32 and rounded once; a row that is all -inf gives 0. It may be stored over `x`."""

def sort_chunks(
    x: Tensor,
    sizes: Tensor,
    order: Tensor,
    probs: Tensor | None = None,
    *,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(rows [rows, hidden], row_probs [rows]): the chunks of `x`, of `sizes` rows each, in the order `order`."""

def sparse_mm(
    a: Tensor,
    b: Tensor,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """`a @ b`, of weights `a` [..., inner], most of which are 0, and rows `b` [inner, columns]: summed in fp32, rounded once."""

def topk_routing(
    logits: Tensor,
    k: int,
    *,
    score: Literal["softmax", "sigmoid"] = "softmax",
    bias: Tensor | None = None,
    groups: int = 1,
    group_topk: int = 1,
    normalize: bool = True,
    scaling: float = 1.0,
    order: Literal["score_first", "topk_first"] = "score_first",
    indices: Tensor | None = None,
    out: tuple[Tensor | None, Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(probs fp32 [..., k], chosen [..., k], counts int32 [experts]): the `k` experts of each token and their weights."""

def transpose_pad(
    x: Tensor,
    *,
    multiple: int = 1,
    out: Tensor | None = None,
) -> Tensor:
    """x [..., length, hidden] as [..., hidden, length rounded up to a `multiple`], zeros after the last column."""

def tree_accept(
    draft: Tensor,
    target: Tensor,
    parents: Tensor,
    *,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(count int32 [...], path int64 [..., nodes]): the longest path of drafted tokens that a model itself would have taken."""

def tree_bits(
    parents: Tensor,
    *,
    out: tuple[Tensor | None, Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """(bits int64, depth int32), [..., nodes] both, of trees of up to 64 nodes: `bits` is what `cached_attention(tree=)` takes."""
