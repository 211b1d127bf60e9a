"""The calls behind the rows of the coverage lists: each is made here, on a device, and its result held against float64 truth.

Truth is torch's own operator or a formula written out, never the op's reference.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

from ...core.format import Format
from ...core.target import TARGETS, pretend
from ...op import force
from ...runtime import config
from ...runtime.kernel import Arguments, collect
from ...runtime.results import flatten, saved_results
from ..agreement import BF16, FP16, agrees, end_rows, forms, normal
from . import aten, context, features, products, serving, small, training
from . import movers as more

Check = Callable[[str], None]  # of a device
EPS = 1e-6


# ---- the ops ---------------------------------------------------------------------------------------------------------


def norm(
    device: str, dtype: torch.dtype = BF16, form: str = "plain", weighted: bool = True, residual: bool = False
) -> None:
    x = normal(device, 5, 200, dtype=dtype)
    weight = normal(device, 200, dtype=dtype, seed=1) if weighted else None
    out_format = forms(device)[form]
    if residual:
        total = normal(device, 5, 200, dtype=dtype, seed=2)
        exact = x.double() + total.double()
        y, h = tw.add_rms_norm(x, total, weight, EPS, out_format=out_format, out=(None, total))
        assert h is total, "the sum was not stored over the residual"
        agrees("the sum", total, exact, "A")
        x = total
    else:
        y = tw.rms_norm(x, weight, EPS, out_format=out_format)
    agrees("y", y, F.rms_norm(x.double(), (200,), None if weight is None else weight.double(), EPS))


def norm_in_place(device: str) -> None:
    """The norm, stored over what it is of."""
    x, weight = normal(device, 5, 200), normal(device, 200, seed=1)
    exact = F.rms_norm(x.double(), (200,), weight.double(), EPS)
    assert tw.rms_norm(x, weight, EPS, out=x) is x, "another tensor came back"
    agrees("x", x, exact)


def modulated_norm(
    device: str, dtype: torch.dtype = BF16, form: str = "plain", weighted: bool = True, residual: bool = False
) -> None:
    """scale, shift and the gate as they lie in one tensor; the new residual stored over the old."""
    x, style = normal(device, 5, 200, dtype=dtype), normal(device, 5, 600, dtype=dtype, seed=1)
    weight = normal(device, 200, dtype=dtype, seed=2) if weighted else None
    scale, shift, gate = style.split(200, -1)
    given = {"scale": scale, "shift": shift, "out_format": forms(device)[form]}
    if residual:
        total = normal(device, 5, 200, dtype=dtype, seed=3)
        exact = total.double() + gate.double() * x.double()
        q = given["out_format"].empty(x.shape, dtype, x.device)
        y, h = tw.add_rms_norm(x, total, weight, EPS, gate=gate, **given, out=(q, total))
        assert h is total and y is q, "other memory than was given came back"
        agrees("the sum", total, exact, "A")
        x = total
    else:
        y = tw.rms_norm(x, weight, EPS, **given)
    exact = F.rms_norm(x.double(), (200,), None if weight is None else weight.double(), EPS)
    agrees("y", y, exact * (1 + scale.double()) + shift.double())


def layer_norm(
    device: str, dtype: torch.dtype = BF16, form: str = "plain", affine: bool = True, modulated: bool = False
) -> None:
    x = normal(device, 5, 200, dtype=dtype) + 3
    weight, bias = (normal(device, 200, dtype=dtype, seed=seed) for seed in (1, 2)) if affine else (None, None)
    scale, shift = (normal(device, 200, dtype=dtype, seed=seed) for seed in (3, 4)) if modulated else (None, None)
    y = tw.layer_norm(x, weight, bias, scale=scale, shift=shift, out_format=forms(device)[form])
    wide = [None if t is None else t.double() for t in (weight, bias)]
    exact = F.layer_norm(x.double(), (200,), *wide, 1e-5)
    agrees("y", y, exact * (1 + scale.double()) + shift.double() if modulated else exact)


def gated(x: Tensor, up: Tensor | None, act: str) -> Tensor:
    gate, up = x.chunk(2, -1) if up is None else (x, up)
    return (F.silu(gate) if act == "silu" else F.gelu(gate, approximate="tanh")) * up


def glu(
    device: str, dtype: torch.dtype = BF16, form: str = "plain", act: str = "silu", split: bool = False,
    grouped: bool = False,
) -> None:  # fmt: skip
    x = normal(device, 9, 150 if split else 300, dtype=dtype)
    up = normal(device, 9, 150, dtype=dtype, seed=1) if split else None
    exact = gated(x.double(), None if up is None else up.double(), act)
    options: dict[str, Any] = {}
    ends = [4, 4, 7] if grouped else None
    if ends is not None:
        options = {"scale": normal(device, 9, dtype=torch.float32, seed=2).abs(), "offsets": end_rows(device, ends)}
        exact = exact * options["scale"].double()[:, None]
    y = tw.glu(x, up, act=act, out_format=forms(device)[form], **options)
    agrees("y", y, exact, "A", ends)


def glu_gradient(device: str, grouped: bool = False) -> None:
    """The gradient that a layer in FP8 goes on with, quantised both ways as it is stored."""
    op = tw.glu.op
    x, dy = normal(device, 9, 256), normal(device, 9, 128, seed=1)
    ends = [4, 4, 7] if grouped else None
    probability = normal(device, 9, dtype=torch.float32, seed=2).abs() if grouped else None
    offsets = None if ends is None else end_rows(device, ends)
    values = op.signature.bind((x,), {"scale": probability, "offsets": offsets})
    needs = frozenset({"x", "scale"} if grouped else {"x"})
    results = saved_results(op, flatten(op.run(values)))
    made = op.run_backward(values, results, [dy], needs, grad_format=forms(device)["blocks"])
    dx, _, dscale = made
    wide = x.double().requires_grad_()
    p = torch.ones(9, dtype=torch.float64, device=device) if probability is None else probability.double()
    p.requires_grad_()
    y = gated(wide, None, "silu") * p[:, None]
    truth = torch.autograd.grad(y, (wide, p), dy.double())
    agrees("dx", dx, truth[0], "H", ends)
    if ends is not None:
        agrees("dscale", dscale, truth[1], "H", ends)


def loss(device: str, inplace: bool = False) -> None:
    leaf = normal(device, 7, 1003, scale=3.0).requires_grad_()
    logits = leaf * 1.0  # not a leaf, so that its memory may be taken
    labels = torch.arange(7, device=device) * 100
    labels[2] = -100
    value = tw.cross_entropy(logits, labels, inplace_backward=inplace)
    value.backward()
    wide = leaf.detach().double().requires_grad_()
    truth = F.cross_entropy(wide, labels)
    truth.backward()
    agrees("the loss", value.detach()[None], truth.detach()[None], "D")
    agrees("its gradient", leaf.grad, wide.grad, "H")


def quantised(device: str, *formats: Format | str, dtype: torch.dtype = BF16, grouped: bool = False) -> None:
    x = normal(device, 9, 200, dtype=dtype, scale=3.0)
    ends = [4, 4, 7] if grouped else None
    offsets = None if ends is None else end_rows(device, ends)
    for one in formats:
        q = tw.quantize(x, forms(device)[one] if isinstance(one, str) else one, offsets=offsets)
        agrees(str(one), q, x.double(), "G", ends)


# ---- what is not an op -----------------------------------------------------------------------------------------------


def replays(device: str) -> None:
    """A second call of the same kind makes no second plan and gives its own result."""
    op, weight = tw.rms_norm.op, normal(device, 72, seed=9)
    kernels = op.implementation(op.signature.bind((weight,), {})) is not None
    made = []
    for seed in range(3):
        x = normal(device, 3, 72, seed=seed)
        y = tw.rms_norm(x, weight)
        agrees("y", y, F.rms_norm(x.double(), (72,), weight.double(), EPS))
        made.append(len(op.plans))
    assert made[0] == made[2] and (made[0] > 0 or not kernels), f"plans after each call: {made}"


def launched_by_triton(device: str) -> None:
    """A call launches through what Triton has compiled, and there is nothing else to build."""
    features.launched_without_a_build(device)
    replays(device)


def tuned_row_is_taken(device: str) -> None:
    """A row in the user's folder is what a call is launched with."""
    from ...ops.activation.glu import glu_forward as kernel

    a = Arguments(N=2048)
    config.table.cache_clear()
    now = dict(config.config_for(kernel, a, TARGETS["sm_90"]))
    other = next(dict(c) for c in kernel.candidates(a) if dict(c) != now)
    row = {"kernel": kernel.name, "key": {"N": 2048}, "config": other}
    try:
        with tempfile.TemporaryDirectory() as base, mock.patch.dict(os.environ, {"TILEWRIGHT_CACHE": base}):
            folder = Path(base) / "tilewright"
            folder.mkdir(mode=0o700)
            (folder / "sm_90.jsonl").write_text(json.dumps(row) + "\n")
            (folder / "sm_90.jsonl").chmod(0o600)
            config.table.cache_clear()
            assert dict(config.config_for(kernel, a, TARGETS["sm_90"])) == other
    finally:
        config.table.cache_clear()


def chosen_by_chip(device: str) -> None:
    """One declaration for every chip; those that convert to FP8 by themselves are asked to, the others are not."""
    x, fast = normal(device, 16, 128), {}
    for arch, target in TARGETS.items():
        with pretend(target), force("triton"), collect() as launches:
            tw.quantize(x, forms(device)["blocks"])
        words = [
            word for one in launches for value in one.ordered if isinstance(value, str) for word in value.split(":")
        ]
        assert launches, f"{arch}: nothing would be launched"
        fast[arch] = "fast" in words
    assert fast["sm_90"] and not fast["sm_80"] and not fast["gfx942"], fast


def speed_of_light(device: str) -> None:
    """Every rate is measured where there is a GPU; elsewhere the command says in a line that there is none."""
    hidden = {"CUDA_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    words = [sys.executable, "-m", "tilewright", "sol", "--json"]
    done = subprocess.run(words, env={**os.environ, **hidden}, capture_output=True, text=True, timeout=600)
    if device == "cpu":
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and "GPU" in done.stderr, done.stderr
        return
    assert done.returncode == 0, done.stderr
    rates = {row["what"]: row["burst"] for row in json.loads(done.stdout)["rows"] if not row["note"]}
    assert rates and all(rate > 0 for rate in rates.values()), rates


# ---- the rows --------------------------------------------------------------------------------------------------------

CHECKS: dict[str, dict[str, Check]] = {
    "aten": aten.CHECKS,
    "training": {
        "rms_norm_quant_fwd": partial(norm, form="blocks"),
        "qk_norm_rope_fwd": training.qkv,
        "qk_norm_rope_bwd": partial(training.qkv, gradient=True),
        "router_gemm_fwd": training.router_linear,
        "router_gemm_bwd": partial(training.router_linear, gradient=True),
        "permute_pad": training.permute,
        "unpermute_pad": training.unpermute,
        "silu_quant_fwd": partial(glu, form="blocks"),
        "silu_quant_bwd": glu_gradient,
        "batch_silu_quant_fwd": partial(glu, form="blocks", grouped=True),
        "batch_silu_quant_bwd": partial(glu_gradient, grouped=True),
        "linear_gate_fwd": training.gated_norm,
        "linear_gate_bwd": partial(training.gated_norm, gradient=True),
        "cross_entropy_fwd": loss,
        "cross_entropy_bwd": partial(loss, inplace=True),
        "grad_norm": lambda device: training.norms(device, 2.0),
        "count_zeros": training.zeros,
    },
    "training_more": {
        "quantize blockwise 1x128, 128x1, 128x128, grouped by expert": lambda device: quantised(
            device, "blocks", tw.fp8("128x128", ways="both"), grouped=True
        ),
        "quantize rowwise (channelwise), tensorwise": lambda device: quantised(
            device, tw.fp8("row", ways="both"), tw.fp8("tensor", ways="both")
        ),
        "hadamard quantize": more.rotated,
        "smooth quantize": more.smoothed,
        "rms_norm + router gemm + quantize": more.normed_router,
        "top-k routing, group-limited (DeepSeek-V3) routing score": training.routing,
        "moe z-loss, load-balancing loss": training.router_losses,
        "moe permute with quantised output": partial(training.permute, quantised=True),
        "sort chunks by index (all-to-all reorder)": more.sorted_chunks,
        "embedding with gradient accumulated into main_grad": more.embedding,
        "mla rope (q, kv)": training.mla_rope,
        "rope varlen + context parallel": training.rope_packed,
        "mla attention": training.latent_attention,
        "lightning (linear) attention": training.lightning_attention,
        "vocab-parallel cross entropy": more.split_loss,
        "fused linear cross entropy": training.linear_loss,
        "multi-tensor scale, clip, norm L1/L2/inf, count zeros": training.many,
        "batched transpose and pad": more.transposed,
    },
    "flashrt": {
        "ada_rms_norm_style": modulated_norm,
        "ada_rms_norm_style_fp8": partial(modulated_norm, form="static"),
        "adarms_fp16": partial(modulated_norm, dtype=FP16, weighted=False),
        "gate_res_adarms_fp8_static_fp16": partial(
            modulated_norm, dtype=FP16, form="static", weighted=False, residual=True
        ),
        "gate_residual_ada_norm_fp8": partial(modulated_norm, form="static", residual=True),
        "fused_adarms_fp8_static_fp16": partial(modulated_norm, dtype=FP16, form="static", weighted=False),
        "layer_norm": layer_norm,
        "layer_norm_fp16": partial(layer_norm, dtype=FP16),
        "layer_norm_fp8": partial(layer_norm, dtype=FP16, form="unit"),
        "layer_norm_no_affine_fp16": partial(layer_norm, dtype=FP16, affine=False),
        "ada_layer_norm_fp16": partial(layer_norm, dtype=FP16, affine=False, modulated=True),
        "rms_norm": norm,
        "rms_norm_fp16": partial(norm, dtype=FP16),
        "rms_norm_fp8": partial(norm, form="static"),
        "rms_norm_fp8_fp16": partial(norm, dtype=FP16, form="static"),
        "rms_norm_fp8_noweight_bf16": partial(norm, form="static", weighted=False),
        "rms_norm_fp8_noweight_fp16": partial(norm, dtype=FP16, form="static", weighted=False),
        "rms_norm_inplace": norm_in_place,
        "plain_rms_fp8_fp16": partial(norm, dtype=FP16, form="unit", weighted=False),
        "residual_add_rms_norm": partial(norm, residual=True),
        "residual_add_rms_norm_fp8": partial(norm, form="static", residual=True),
        "residual_add_rms_norm_fp8_fp16": partial(norm, dtype=FP16, form="static", residual=True),
        "residual_add_rms_norm_fp8_noweight_bf16": partial(norm, form="static", weighted=False, residual=True),
        "residual_add_rms_norm_fp8_noweight_fp16": partial(
            norm, dtype=FP16, form="static", weighted=False, residual=True
        ),
        "plain_res_rms_fp8_fp16": partial(norm, dtype=FP16, form="unit", weighted=False, residual=True),
        "gate_geglu": partial(glu, act="gelu_tanh", split=True),
        "gate_geglu_fp16": partial(glu, dtype=FP16, act="gelu_tanh", split=True),
        "gate_geglu_merged": partial(glu, act="gelu_tanh"),
        "gate_geglu_merged_fp16": partial(glu, dtype=FP16, act="gelu_tanh"),
        "gate_geglu_merged_fp8": partial(glu, form="static", act="gelu_tanh"),
        "gate_geglu_merged_fp8_fp16": partial(glu, dtype=FP16, form="static", act="gelu_tanh"),
        "geglu_fp8_static_fp16": partial(glu, dtype=FP16, form="static", act="gelu_tanh"),
        "silu_mul_split_fp8_fp16": partial(glu, dtype=FP16, form="static", split=True),
        "gelu_inplace": partial(small.activation, act="gelu_tanh", dtype=BF16),
        "gelu_inplace_fp16": partial(small.activation, act="gelu_tanh"),
        "silu_inplace_fp16": partial(small.activation, act="silu"),
        "relu_inplace_fp16": partial(small.activation, act="relu"),
        "fused_add_silu_bf16": partial(small.activation, act="silu", dtype=BF16, added=True),
        "fused_add_silu_fp16": partial(small.activation, act="silu", added=True),
        "gate_mul_residual": partial(small.residual, gated=True),
        "gate_res_fp16": partial(small.residual, dtype=FP16, gated=True),
        "residual_add": small.residual,
        "residual_add_fp16": partial(small.residual, dtype=FP16),
        "bias_residual": partial(small.residual, biased=True),
        "bias_residual_fp16": partial(small.residual, dtype=FP16, biased=True),
        "patch_im2col": small.patches,
        "patch_embed_bias_pos": small.position_embedding,
        "add_bias_fp16": small.added_bias,
        "gpu_cast_fp32_to_fp16": small.cast,
        "gpu_copy": small.copied,
        "gpu_strided_copy_fp16": small.columns,
        "gpu_fill_neginf_fp16": small.filled,
        "gpu_repeat_interleave_heads": small.repeated_heads,
        "gpu_euler_step": small.euler_step,
        "quantize_fp8": lambda device: quantised(device, "dynamic"),
        "quantize_fp8_device": lambda device: quantised(device, "dynamic"),
        "quantize_fp8_device_fp16": lambda device: quantised(device, "dynamic", dtype=FP16),
        "quantize_fp8_static": lambda device: quantised(device, "static"),
        "quantize_fp8_static_fp16": lambda device: quantised(device, "static", dtype=FP16),
        "cast_fp16_fp8": lambda device: quantised(device, "unit", dtype=FP16),
        "quantize_bf16_to_nvfp4": products.nvfp4_codes,
        "quantize_bf16_to_nvfp4_swizzled": partial(products.nvfp4_codes, swizzled=True),
        "GemmRunner": products.runner,
        "gmm_fp16": products.added_to,
        "fp8_gemm_descale_fp16": partial(products.whole_scales, out_dtype=FP16),
        "fp8_gemm_descale_bf16out": partial(products.whole_scales, out_dtype=BF16),
        "fp8_gemm_descale_f32out": partial(products.whole_scales, out_dtype=torch.float32),
        "attention_qkv_fp16": serving.attention,
        "attention_qkv_fp16_padded": partial(serving.attention, keys=41),
        "attention_qkv_fp16_state_masked": serving.first_row_sees_less,
        "attention_mha_fp16": partial(serving.attention, kv_heads=4),
        "fmha_strided_full": serving.attention_of_columns,
        "fmha_forward": partial(serving.attention, kv_heads=2),
        "fmha_strided_forward": serving.attention_of_columns,
        "load_fmha_library": serving.attention_by_name,
        "load_fmha_strided_library": serving.attention_by_name,
        "softmax_fp16": small.softmax,
        "fa2.fwd_fp16": partial(serving.attention_with_lse, dtype=FP16),
        "fa2.fwd_bf16": partial(serving.attention_with_lse, dtype=BF16),
        "qkv_split": serving.split,
        "qkv_split_fp16": partial(serving.split, dtype=FP16),
        "qkv_split_rope": partial(serving.split, rotated=True),
        "qkv_split_rope_kvcache_fp16": serving.split_into_cache,
        "rope_apply": serving.rotated_pairs,
        "rope_rotate_half_fp16": serving.rotated_halves,
        "FvkContext": context.ready_to_capture,
        "get_sm_version": context.number,
        "has_cutlass_fmha": context.fused_attention,
        "has_cutlass_sm100": context.fp8_products,
        "has_nvfp4": context.fp4,
        "flashvla::quantize_fp8_static": context.jax_codes,
        "flashvla::fp8_gemm_bf16_out": context.jax_product,
    },
    "gn_kernels": {
        "matmul, configurable input and accumulate dtype (fp16/bf16/fp32/fp8/int8; fp16 accumulate)": products.plain,
        "rowwise-scaled matmul INT8": lambda device: products.scaled_integers(device, tw.int8("row")),
        "rowwise-scaled matmul FP8": lambda device: products.scaled(device, tw.fp8("row")),
        "tile-scaled matmul FP8 (1x128 x 128x128, DeepSeek style)": lambda device: products.scaled(
            device, tw.fp8("1x128"), tw.fp8("128x128")
        ),
        "tile-scaled matmul INT8": lambda device: products.scaled_integers(
            device, tw.int8("1x128"), tw.int8("128x128")
        ),
        "INT4 matmul, and rowwise-scaled INT4": lambda device: products.scaled_integers(
            device, tw.int4("row"), largest=7
        ),
        "MXFP8 matmul": lambda device: products.scaled(device, tw.mx("e4m3")),
        "MXFP4 matmul": lambda device: products.scaled(device, tw.mx("e2m1")),
        "NVFP4 matmul": lambda device: products.scaled(device, tw.nvfp4()),
        "grouped matmul, FP8 blockwise: contiguous (fwd, dgrad), masked (decode), K-grouped (wgrad)": products.grouped,
        "INT8 attention, QK only": serving.attention_int8,
        "INT8 attention, QK + PV": partial(serving.attention_int8, weights=True),
        "MXFP8 attention, QK only": serving.attention_mxfp8,
        "persistent matmul": products.persistent,
        "realistic speed-of-light sweep per dtype": speed_of_light,
    },
    "flaggems_features": {
        "enable / context manager": partial(aten.replaced, name="add.Tensor"),
        "pointwise generator": partial(aten.replaced, name="add.Tensor"),
        "fast dispatch": replays,
        "tuned configs persisted": tuned_row_is_taken,
        "multi-backend": chosen_by_chip,
        "eager mode": norm,
        "C++ runtime": launched_by_triton,
        "models": features.models,
        "fused operators": features.fused,
    },
    "linghe_more": {
        "smooth quantisation of a sub-range of rows": more.smoothed_rows,
        "clamping over many tensors": training.clamped,
    },
}
