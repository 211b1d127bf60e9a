"""Rivals of packages that are not installed here: stand-ins with the packages' own signatures show what each is called with, and
that what comes back is taken for what it is."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import threading
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import torch
import triton
from triton.runtime import _async_compile
from triton.runtime.autotuner import Autotuner
from triton.runtime.jit import KernelInterface

import tilewright as tw
from tests.attention_library import Watched
from tilewright.attention import library
from tilewright.bench import check, packaged, rivals
from tilewright.bench.ahead import compiled_ahead
from tilewright.bench.cases import CASES, Case, rival_of
from tilewright.bench.directed import Absent
from tilewright.bench.work import REPLACED, Work

F = torch.nn.functional
TOKENS, HIDDEN = 24, 64
VOCAB = {"tokens": TOKENS, "vocab": 50}


def built(op: str, direction: str = "forward", **about) -> Work:
    dims = about.pop("dims", {"tokens": TOKENS, "hidden": HIDDEN})
    return Work.build(Case("a/1", "a", "", op, direction, dims, **about), device="cpu")


def agreed(work: Work, name: str) -> object:
    """A rival's result, which must be near ours."""
    theirs = rivals.finished(rivals.call_of(name, work))
    assert rivals.agrees(work.call(), theirs), name
    return theirs


def norm(x, weight, eps, offset=0.0):
    y = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps)
    return (y if weight is None else y * (weight.float() + offset)).to(x.dtype)


def module(monkeypatch, name: str, **members) -> ModuleType:
    made = ModuleType(name)
    made.__spec__ = importlib.util.spec_from_loader(name, None)
    made.__dict__.update(members)
    monkeypatch.setitem(sys.modules, name, made)
    return made


# ---------------------------------------------------------------------------------------------------------------- liger


def applied(function, where: str) -> type:
    """What stands for an autograd function of a module."""
    return type("Function", (), {"apply": staticmethod(function), "__module__": where})


@pytest.fixture
def liger(monkeypatch):
    """Liger's functions with the arguments of 0.8.5; those of `liger_kernel.ops` are in CuTe, but for the residual's."""
    seen: list[tuple[str, tuple]] = []

    def rms_norm(X, W, eps, offset=0.0, casting_mode="llama", in_place=True, row_mode=None):
        seen.append(("rms_norm", (offset, casting_mode, in_place)))
        return norm(X, W, eps, offset)

    def add(X, R, W, eps, offset=0.0, casting_mode="llama", in_place=False):
        return norm(X + R, W, eps, offset), X + R

    def loss(
        _input,
        target,
        weight,
        ignore_index=-100,
        lse_square_scale=0.0,
        label_smoothing=0.0,
        reduction="mean",
        softcap=None,
    ):
        assert weight is None and lse_square_scale == 0.0 and softcap is None
        about = {"ignore_index": ignore_index, "label_smoothing": label_smoothing, "reduction": reduction}
        return F.cross_entropy(_input.float(), target, **about), None, None, None

    def fused(
        _input, weight, target, bias=None, ce_weight=None, ignore_index=-100, lse_square_scale=0.0, label_smoothing=0.0,
        reduction="mean",
    ):  # fmt: skip
        assert bias is None and ce_weight is None and lse_square_scale == label_smoothing == 0.0
        return F.cross_entropy(
            _input.float() @ weight.float().t(), target, ignore_index=ignore_index, reduction=reduction
        ), None

    def silu(a, b, gate_multiplier=1.0, down_multiplier=1.0):
        assert a.is_contiguous() and b.is_contiguous()
        return F.silu(a.float()).mul(b.float()).to(a.dtype)

    functions = {
        "rms_norm": ("LigerRMSNormFunction", rms_norm),
        "fused_add_rms_norm": ("LigerFusedAddRMSNormFunction", add),
        "cross_entropy": ("LigerCrossEntropyFunction", loss),
        "fused_linear_cross_entropy": ("LigerFusedLinearCrossEntropyFunction", fused),
        "swiglu": ("LigerSiLUMulFunction", silu),
    }
    module(monkeypatch, "liger_kernel")
    ops = module(monkeypatch, "liger_kernel.ops")
    for name, (public, function) in functions.items():
        in_triton = applied(function, f"liger_kernel.ops.{name}")
        in_cute = applied(function, f"liger_kernel.ops.cutedsl.ops.{name}")
        module(monkeypatch, f"liger_kernel.ops.{name}", **{public: in_triton})
        setattr(ops, public, in_triton if name == "fused_add_rms_norm" else in_cute)
    return seen


def test_liger_is_called_as_it_wants_to_be(liger):
    agreed(built("rms_norm", options={"weight": True}, arguments={"weight_offset": 1.0}), "liger")
    assert liger == [("rms_norm", (1.0, "gemma", False))]  # in fp32, as ours, and not over what is kept
    agreed(built("rms_norm", "backward", options={"weight": True}), "liger")
    assert len(agreed(built("add_rms_norm", options={"weight": True}), "liger")) == 2
    agreed(built("add_rms_norm", "backward", options={"weight": True}), "liger")
    agreed(built("glu"), "liger")
    assert len(agreed(built("glu", "backward"), "liger")) == 2  # in halves
    for reduction in ("none", "mean"):
        agreed(built("cross_entropy", dims=VOCAB, arguments={"reduction": reduction}), "liger")
    smooth = {"reduction": "mean", "label_smoothing": 0.1}
    agreed(built("cross_entropy", dims=VOCAB, options={"ignored": 0.5}, arguments=smooth), "liger")
    dims = {"tokens": TOKENS, "hidden": HIDDEN, "vocab": 50}
    agreed(built("linear_cross_entropy", dims=dims, arguments={"reduction": "sum"}), "liger")


@pytest.mark.parametrize(
    ("op", "direction", "about", "words"),
    [
        ("rms_norm", "forward", {"arguments": {"out_format": "int8:row:row"}}, "it has no out_format"),
        ("glu", "forward", {"arguments": {"act": "gelu_tanh"}}, "it has no act"),
        ("glu", "backward", {"grad_format": "fp8:e4m3:1x128:both:pow2:te"}, "its gradient is not quantised"),
        ("cross_entropy", "backward", {"dims": VOCAB}, "it has no backward"),
        ("cross_entropy", "forward", {"dims": VOCAB, "arguments": {"z_loss": 0.1}}, "it has no z_loss"),
        ("quantize", "forward", {"arguments": {"out_format": "int8:row:row"}}, "liger has nothing for quantize"),
    ],
)
def test_what_liger_has_not_is_absent_and_not_something_else(liger, op, direction, about, words):
    with pytest.raises(Absent, match=words):
        rivals.call_of("liger", built(op, direction, **about))


def test_liger_in_cute_is_what_the_environment_chose(liger, monkeypatch):
    work = built("rms_norm", options={"weight": True})
    with pytest.raises(Absent, match="a process of its own"):
        rivals.call_of("liger_cutedsl", work)
    monkeypatch.setenv("LIGER_KERNEL_IMPL", "cutedsl")
    agreed(work, "liger_cutedsl")
    with pytest.raises(Absent, match="no fused_add_rms_norm in CuTe"):  # Liger would take Triton's and say nothing
        rivals.call_of("liger_cutedsl", built("add_rms_norm", options={"weight": True}))


# ---------------------------------------------------------------------------------------------------- quack and sglang


@pytest.fixture
def quack(monkeypatch):
    """quack's functions with the arguments of 0.6.5."""

    def rmsnorm(
        x, weight=None, bias=None, residual=None, out_dtype=None, residual_dtype=None, eps=1e-6, prenorm=False,
        weight_offset=0.0,
    ):  # fmt: skip
        h = x if residual is None else x + residual
        return (norm(h, weight, eps, weight_offset), h) if prenorm else norm(h, weight, eps, weight_offset)

    def cross_entropy(
        x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False
    ):
        assert not inplace_backward and lse_partial is None
        return F.cross_entropy(x.float(), target, weight, ignore_index=ignore_index, reduction=reduction)

    module(monkeypatch, "quack", rmsnorm=rmsnorm, cross_entropy=cross_entropy)


def test_quack_is_called_as_it_wants_to_be(quack):
    for direction in ("forward", "backward"):
        agreed(built("rms_norm", direction, options={"weight": True}, arguments={"weight_offset": 1.0}), "quack")
        assert len(agreed(built("add_rms_norm", direction, options={"weight": True}), "quack")) == (
            2 if direction == "forward" else 3
        )
        for given in ({"reduction": "none", "inplace_backward": True}, {"reduction": "mean"}):
            agreed(built("cross_entropy", direction, dims=VOCAB, arguments=given, options={"ignored": 0.25}), "quack")
    with pytest.raises(Absent, match="it has no out_format"):
        rivals.call_of("quack", built("rms_norm", arguments={"out_format": "int8:row:row"}))
    with pytest.raises(Absent, match="quack has nothing for glu"):
        rivals.call_of("quack", built("glu"))
    work = Work.build(replace(CASES["rms_norm_vs_quack/8192x8192"], dims={"tokens": 8, "hidden": 64}), device="cpu")
    agreed(work, "quack")


@pytest.fixture
def sgl_kernel(monkeypatch):
    """sglang-kernel's functions with the arguments of 0.4.2, on a CPU."""

    def rmsnorm(input, weight, eps=1e-6, out=None, enable_pdl=None):
        return norm(input, weight, eps)

    def fused_add_rmsnorm(input, residual, weight, eps=1e-6, enable_pdl=None):
        residual.add_(input)
        input.copy_(norm(residual, weight, eps))

    def silu_and_mul(input, out=None):
        gate, up = input.float().chunk(2, -1)
        return F.silu(gate).mul(up).to(input.dtype)

    def by_rows(mat_a, mat_b, scales_a, scales_b, out_dtype, bias=None):
        assert mat_a.stride(1) == mat_b.stride(0) == 1 and scales_a.dim() == scales_b.dim() == 1
        y = mat_a.float() @ mat_b.float() * scales_a[:, None] * scales_b
        return (y if bias is None else y + bias.float()).to(out_dtype)

    def by_blocks(mat_a, mat_b, scales_a, scales_b, out_dtype):
        (M, K), N = mat_a.shape, mat_b.shape[1]
        assert mat_a.stride(1) == mat_b.stride(0) == 1
        assert scales_a.shape == (M, K // 128) and scales_a.stride() == (1, M)
        assert scales_b.shape == (K // 128, N // 128) and scales_b.stride() == (1, K // 128)
        a = mat_a.float() * scales_a.repeat_interleave(128, 1)
        b = mat_b.float() * scales_b.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (a @ b).to(out_dtype)

    products = {"fp8_scaled_mm": by_rows, "int8_scaled_mm": by_rows, "fp8_blockwise_scaled_mm": by_blocks}
    norms = {"rmsnorm": rmsnorm, "fused_add_rmsnorm": fused_add_rmsnorm, "silu_and_mul": silu_and_mul}
    module(monkeypatch, "sgl_kernel", **norms, **products)


def test_sglang_is_called_as_it_wants_to_be(sgl_kernel):
    agreed(built("rms_norm", options={"weight": True}), "sgl_kernel")
    work = built("add_rms_norm", options={"weight": True})
    before = work.values["x"].clone(), work.values["residual"].clone()
    agreed(work, "sgl_kernel")
    assert torch.equal(work.values["x"], before[0]) and torch.equal(work.values["residual"], before[1])
    agreed(built("glu"), "sgl_kernel")
    dims = {"tokens": 20, "columns": 256, "hidden": 384}
    for pair in ("fp8_block", "fp8_row", "int8_row"):
        for bias in (False, True) if "row" in pair else (False,):
            options = {"pair": pair, "columns": 256, "bias": bias, "out_dtype": "bfloat16", "beta": 0.0, "act": None}
            agreed(built("scaled_mm", dims=dims, options=options), "sgl_kernel")
    for work, words in (
        (built("rms_norm", "backward", options={"weight": True}), "it has no backward"),
        (built("rms_norm", options={"weight": False}), "cannot do without weight"),
        (built("rms_norm", options={"weight": True}, arguments={"weight_offset": 1.0}), "no weight_offset"),
        (built("scaled_mm", dims=dims, options={"pair": "fp8_block", "out_dtype": "float32"}), "no results in fp32"),
        (built("scaled_mm", dims={**dims, "columns": 192}, options={"pair": "fp8_block"}), "blocks of 128"),
        (built("scaled_mm", dims=dims, options={"pair": "fp8_block_both"}), "nothing for"),
    ):
        with pytest.raises(Absent, match=words):
            rivals.call_of("sgl_kernel", work)


# ------------------------------------------------------------------------------------------------------------ attention

ARGUMENTS = {
    "scale": None, "causal": False, "left": None, "right": None, "softcap": 0.0, "sink": None, "slopes": None, "mask": None,
    "kv_len": None, "cu_seqlens_q": None, "cu_seqlens_k": None, "backend": "auto",
}  # fmt: skip


def attending(direction: str = "forward", heads=(4, 2), lengths=(32, 32), batch: int = 2, **given) -> SimpleNamespace:
    """The work of a case of `attention`, of which there need be no op."""
    source = torch.Generator().manual_seed(0)

    def drawn(n: int, length: int) -> torch.Tensor:
        return torch.randn(batch, length, n, 16, generator=source)

    q, k, v = drawn(heads[0], lengths[0]), drawn(heads[1], lengths[1]), drawn(heads[1], lengths[1])
    defaults = {**dict.fromkeys("qkv"), **ARGUMENTS}
    op = SimpleNamespace(
        signature=SimpleNamespace(defaults=defaults), differentiable=("q", "k", "v"), graded_results=(0,)
    )
    case = SimpleNamespace(op="attention", family="attention_prefill", direction=direction, grad_format=None)
    grads = (torch.randn(q.shape, generator=source),)
    return SimpleNamespace(
        op=op, case=case, steps=False, grads=grads, values={**defaults, "q": q, "k": k, "v": v, **given}
    )


def truth(work: SimpleNamespace) -> list[torch.Tensor]:
    """The formula in float64, causal and windows aligned to the lower right; the result, or its gradients."""
    given = work.values
    q, k, v = leaves = [given[n].double().requires_grad_() for n in "qkv"]
    shared = q.shape[2] // k.shape[2]
    wide = [t.repeat_interleave(shared, 2) for t in (k, v)]
    scores = torch.einsum("bihd,bjhd->bhij", q, wide[0]) * (given["scale"] or q.shape[-1] ** -0.5)
    if given["softcap"]:
        scores = given["softcap"] * torch.tanh(scores / given["softcap"])
    i, j = torch.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1], torch.arange(k.shape[1])
    seen = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool)
    if given["causal"]:
        seen &= j <= i
    if given["left"] is not None:
        seen &= j >= i - given["left"]
    if given["right"] is not None:
        seen &= j <= i + given["right"]
    if given["mask"] is not None:
        seen = seen & given["mask"]
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
    o = torch.einsum("bhij,bjhd->bihd", weights, wide[1])
    if work.case.direction == "forward":
        return [o.detach()]
    return list(torch.autograd.grad([o], leaves, [g.double() for g in work.grads]))


@pytest.mark.parametrize("direction", ["forward", "backward"])
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"causal": True},
        {"causal": True, "scale": 0.3},
        {"heads": (4, 4), "lengths": (24, 40)},
        {"mask": torch.rand(2, 1, 32, 32, generator=torch.Generator().manual_seed(1)) < 0.8},
    ],
    ids=str,
)
def test_torchs_attention_by_a_backend(given, direction):
    """By the one that a CPU has of each; which is taken is in the row."""
    work = attending(direction, **given)
    assert rivals.agrees(truth(work), packaged.sdpa("MATH", work)(), 1e-5)


def test_each_row_of_attention_takes_its_backend(monkeypatch):
    from torch.nn import attention

    asked, kernel = [], attention.sdpa_kernel
    monkeypatch.setattr(
        attention, "sdpa_kernel", lambda one: asked.append(one.name) or kernel(attention.SDPBackend.MATH)
    )
    for name in ("cudnn", "fa2"):
        work = attending(causal=True)
        assert rivals.agrees(truth(work), rivals.call_of(name, work)(), 1e-5)
    assert asked == ["CUDNN_ATTENTION", "FLASH_ATTENTION"]
    for given, words in (
        ({"softcap": 5.0}, "no softcap"),
        ({"left": 3}, "no left"),
        ({"sink": torch.zeros(4)}, "no sink"),
        ({"causal": True, "lengths": (8, 32)}, "upper left"),
        ({"causal": True, "mask": torch.ones(32, 32, dtype=torch.bool)}, "not both"),
    ):
        with pytest.raises(Absent, match=words):
            rivals.call_of("cudnn", attending(**given))
    with pytest.raises(Absent, match="no cu_seqlens_q"):
        rivals.call_of("cudnn", attending(batch=1, cu_seqlens_q=torch.tensor([0, 32])))


@pytest.mark.filterwarnings("ignore::UserWarning")  # that it is not compiled
@pytest.mark.parametrize(
    "given",
    [
        {"causal": True},
        {"causal": True, "left": 5},
        {"left": 3, "right": 2},
        {"softcap": 2.0},
        {"causal": True, "left": 7, "lengths": (16, 32)},
        {},
    ],
    ids=str,
)
def test_flex_attention_sees_what_it_should(given):
    """As it runs uncompiled: the mask and the score are the same code."""
    work = attending(**given)
    call = packaged.flex_attention(work, compile=lambda function, dynamic: function)
    assert rivals.agrees(truth(work), call(), 1e-5)


def test_packed_sequences_go_to_varlen_attn(monkeypatch):
    """Flat, with the longest of each, causal as a window; sequence by sequence it is the same."""
    from torch.nn.attention import varlen

    seen = []

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1), enable_gqa=False
    ):
        seen.append((cu_seq_q.dtype, max_q, max_k, window_size, enable_gqa))
        parts = []
        for a, b, c, d in zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:]):
            one = attending(causal=True, batch=1)
            one.values |= {"q": query[None, a:b], "k": key[None, c:d], "v": value[None, c:d]}
            parts.append(truth(one)[0][0])
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    ends = torch.tensor([0, 5, 5, 20, 32])
    work = attending(causal=True, batch=1, cu_seqlens_q=ends, cu_seqlens_k=ends)
    o = rivals.call_of("fa2", work)()
    assert seen == [(torch.int32, 15, 15, (-1, 0), True)] and o.shape == work.values["q"].shape
    one = attending(causal=True, batch=1)
    one.values |= {n: work.values[n][:, 5:20] for n in "qkv"}
    assert rivals.agrees(truth(one), o[:, 5:20], 1e-6)
    rivals.call_of("fa2", attending(batch=1, heads=(4, 4), left=9, cu_seqlens_q=ends))()
    assert seen[-1] == (torch.int32, 15, 15, (9, -1), False)


@pytest.fixture
def flash_3(monkeypatch):
    """FlashAttention 3 with the arguments of sglang-kernel 0.4.2, on a CPU; gives what it was told."""
    told = []

    def attend(q, k, v, scale, causal, sides):
        one = attending(batch=1)
        left, right = (None if side < 0 else side for side in sides)
        one.values |= {"q": q, "k": k, "v": v, "scale": scale, "causal": causal, "left": left, "right": right}
        return truth(one)[0]

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0, num_splits=0,
    ):  # fmt: skip
        told.append(("whole", causal, window_size, num_splits))
        return attend(q, k_cache, v_cache, softmax_scale, causal, window_size)

    def flash_attn_varlen_func(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q=None, max_seqlen_k=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, num_splits=1,
    ):  # fmt: skip
        told.append(("packed", causal, window_size, max_seqlen_q, max_seqlen_k))
        assert q.dim() == 3 and cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        marks = zip(cu_seqlens_q, cu_seqlens_q[1:], cu_seqlens_k, cu_seqlens_k[1:])
        cut = [(q[None, a:b], k[None, c:d], v[None, c:d]) for a, b, c, d in marks]
        return torch.cat([attend(*one, softmax_scale, causal, window_size)[0] for one in cut])

    module(monkeypatch, "sgl_kernel")
    module(
        monkeypatch, "sgl_kernel.flash_attn",
        flash_attn_with_kvcache=flash_attn_with_kvcache, flash_attn_varlen_func=flash_attn_varlen_func,
    )  # fmt: skip
    return told


def test_flash_attention_3_is_called_as_it_wants_to_be(flash_3):
    for given, words in (
        ({"causal": True}, (True, (-1, -1))),
        ({}, (False, (-1, -1))),
        ({"causal": True, "left": 5, "scale": 0.3}, (False, (5, 0))),
        ({"left": 5, "lengths": (16, 32)}, (False, (5, -1))),
    ):
        work = attending(**given)
        assert rivals.agrees(truth(work), rivals.call_of("fa3", work)(), 1e-5)
        assert flash_3[-1] == ("whole", *words, 1)
    ends = torch.tensor([0, 5, 20, 32])
    work = attending(causal=True, batch=1, cu_seqlens_q=ends, cu_seqlens_k=ends)
    o = rivals.call_of("fa3", work)()
    one = attending(causal=True, batch=1)
    one.values |= {n: work.values[n][:, 5:20] for n in "qkv"}
    assert rivals.agrees(truth(one), o[:, 5:20], 1e-6) and flash_3[-1] == ("packed", True, (-1, -1), 15, 15)
    for work, words in (
        (attending("backward"), "no backward"),
        (attending(sink=torch.zeros(4)), "no sink"),
        (attending(mask=torch.ones(32, 32, dtype=torch.bool)), "no mask"),
    ):
        with pytest.raises(Absent, match=words):
            rivals.call_of("fa3", work)


@pytest.fixture
def infer(monkeypatch):
    """FlashInfer with the arguments of flashinfer-python 0.7.2, on a CPU; gives what it was told."""
    told = []

    class Wrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", **more):
            assert float_workspace_buffer.dtype == torch.uint8 and kv_layout == "NHD"
            told.append((type(self).__name__, more))

        def planned(self, q_data_type, kv_data_type, causal=True, window_left=-1, logits_soft_cap=None, sm_scale=None):
            assert q_data_type == kv_data_type
            self.about = {
                "causal": causal,
                "left": None if window_left < 0 else window_left,
                "softcap": logits_soft_cap,
            }
            self.about["scale"] = sm_scale

    class BatchPrefillWithRaggedKVCacheWrapper(Wrapper):
        def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None, **about):
            assert qo_indptr.dtype == kv_indptr.dtype == torch.int32
            self.sizes, self.marks = (num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo), (qo_indptr, kv_indptr)
            self.planned(**about)

        def run(self, q, k, v):
            assert self.sizes == (q.shape[1], k.shape[1], q.shape[2], v.shape[2])
            given = dict(zip(("cu_seqlens_q", "cu_seqlens_k"), self.marks))
            return tw.attention(q[None], k[None], v[None], **given, **self.about)[0]

    class Paged(Wrapper):
        def paged(self, indptr, indices, last, heads, kv_heads, width, page, **about):
            assert indptr.dtype == indices.dtype == last.dtype == torch.int32 and len(indices) == indptr[-1]
            self.sizes, self.pages, self.last = (heads, kv_heads, width, page), indptr.diff(), last
            self.table = torch.nn.utils.rnn.pad_sequence(indices.split(self.pages.tolist()), batch_first=True)
            self.planned(**about)

        def run(self, q, paged_kv_cache):
            k, v = paged_kv_cache
            assert self.sizes == (q.shape[1], k.shape[2], q.shape[2], k.shape[1])
            lengths = (self.pages - 1) * k.shape[1] + self.last
            rows = q.unflatten(0, (len(self.table), -1))
            return tw.cached_attention(rows, k, v, self.table, lengths, **self.about)[0].flatten(0, 1)

    class BatchDecodeWithPagedKVCacheWrapper(Paged):
        def plan(self, indptr, indices, last_page_len, *sizes, **about):
            self.paged(indptr, indices, last_page_len, *sizes, **about)

    class BatchPrefillWithPagedKVCacheWrapper(Paged):
        def plan(self, qo_indptr, paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, **about):
            assert (qo_indptr.diff() == qo_indptr[1]).all()
            self.paged(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, *sizes, **about)

    kinds = (
        BatchPrefillWithRaggedKVCacheWrapper,
        BatchDecodeWithPagedKVCacheWrapper,
        BatchPrefillWithPagedKVCacheWrapper,
    )
    module(monkeypatch, "flashinfer", **{kind.__name__: kind for kind in kinds})
    return told


def test_flashinfer_is_called_as_it_wants_to_be(infer):
    for given in (
        {"causal": True},
        {},
        {"causal": True, "left": 5, "scale": 0.3},
        {"causal": True, "lengths": (16, 32)},
    ):
        work = attending(**given)
        assert rivals.agrees(truth(work), rivals.call_of("flashinfer", work)(), 1e-5)
    for work, words in (
        (attending("backward"), "no backward"),
        (attending(right=3), "no right"),
        (attending(sink=torch.zeros(4)), "no sink"),
    ):
        with pytest.raises(Absent, match=words):
            rivals.call_of("flashinfer", work)


ATTENTION = [case for case in CASES.values() if case.op == "attention"]
OURS = {"portable", "cudnn_lse"}  # by another backend, which a CPU has not


@pytest.mark.filterwarnings("ignore::UserWarning")  # that flex_attention is not compiled
@pytest.mark.parametrize("case", ATTENTION, ids=lambda case: case.name)
def test_every_case_of_attention_has_its_rivals(case, flash_3, infer, monkeypatch):
    """Each of those that are timed beside it agrees with it, at small sizes and by what a CPU has in the place of kernels."""
    from torch.nn import attention
    from torch.nn.attention import varlen

    kernel = attention.sdpa_kernel
    monkeypatch.setattr(attention, "sdpa_kernel", lambda one: kernel(attention.SDPBackend.MATH))
    plain = partial(packaged.flex_attention, compile=lambda function, dynamic: function)
    monkeypatch.setitem(packaged.RIVALS["flex"].calls, "attention", plain)

    def varlen_attn(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)):
        cut = zip(cu_seq_q, cu_seq_q[1:], cu_seq_k, cu_seq_k[1:])
        parts = [(query[None, a:b], key[None, c:d], value[None, c:d]) for a, b, c, d in cut]
        given = {"causal": window_size[1] == 0}
        return torch.cat([tw.attention(*part, scale=scale, **given)[0] for part in parts])

    monkeypatch.setattr(varlen, "varlen_attn", varlen_attn)
    few = {"batch": 2, "length": 48, "head_dim": 16, "value_dim": 8, "sequences": 3, "shortest": 6, "longest": 30}
    heads = {"heads": 4, "kv_heads": 2} if "kv_heads" in case.dims else {"heads": 2}
    given = {**case.arguments, "backend": "auto", **({"left": 9} if "left" in case.arguments else {})}
    dims = {name: {**few, **heads}[name] for name in case.dims}
    work = Work.build(replace(case, dims=dims, arguments=given, dtype="float32"), device="cpu")
    named = [*case.beside, *filter(None, [rival_of(case.metric)])]
    for name in {*named} - OURS:
        near = check.COARSE.low if work.coarse else 1e-4  # by codes, what quantising costs
        assert rivals.agrees(work.call(), rivals.call_of(name, work)(), near), name
    assert {*named} - OURS or case.family == "attention_bwd_window"


def test_our_own_call_by_cudnn_is_a_rival_where_torch_has_it(monkeypatch):
    """What `auto` would take, with lse. A run says why it has none."""
    stand_in = Watched()
    few = {"batch": 2, "length": 24, "heads": 2, "head_dim": 16}
    case = replace(CASES["attention_prefill_full/4x4096x32x128"], dims=few, arguments={"causal": False})
    work = Work.build(case, device="cpu")
    with pytest.raises(Absent, match="no attention of cuDNN"):
        rivals.call_of("cudnn_lse", work)
    monkeypatch.setattr(library, "entry_point", lambda: stand_in)
    with pytest.raises(Absent, match="torch does not offer it"):
        rivals.call_of("cudnn_lse", work)
    monkeypatch.setattr(library, "offered", lambda a: True)
    asked = []
    monkeypatch.setattr(type(work), "by", lambda self, **given: asked.append(given) or self)
    assert rivals.agrees(work.call(), rivals.call_of("cudnn_lse", work)()) and asked == [{"backend": "cudnn"}]
    for other, words in (
        (replace(case, arguments={"left": 3}), "left is not taken"),
        (replace(case, dtype="float32"), "must be bfloat16"),
        (replace(case, direction="backward"), "no forward for attention_prefill_full"),
    ):
        with pytest.raises(Absent, match=words):
            rivals.call_of("cudnn_lse", Work.build(other, device="cpu"))


@pytest.fixture
def over_caches(monkeypatch):
    """What sglang-kernel 0.4.2 has for caches, on a CPU; gives what it was told."""
    told = []

    def flash_attn_with_kvcache(
        q, k_cache, v_cache, k=None, v=None, qv=None, cache_seqlens=None, page_table=None, softmax_scale=None, causal=False,
        window_size=(-1, -1), softcap=0.0, num_splits=0,
    ):  # fmt: skip
        assert cache_seqlens.dtype == torch.int32 and (page_table is None or page_table.dtype == torch.int32)
        told.append((causal, window_size))
        if qv is not None:  # scores of both parts are added
            q, k_cache = torch.cat([qv, q], -1), torch.cat([v_cache, k_cache], -1)
        left = None if window_size[0] < 0 else window_size[0]
        return tw.cached_attention(
            q, k_cache, v_cache, page_table, cache_seqlens, scale=softmax_scale, causal=causal or window_size[1] == 0, left=left
        )[0]  # fmt: skip

    def get_mla_metadata(cache_seqlens, num_q_tokens_per_head_k, num_heads_k, num_heads_q=None):
        return "planned", (cache_seqlens.dtype, num_q_tokens_per_head_k, num_heads_k)

    def flash_mla_with_kvcache(
        q, k_cache, block_table, cache_seqlens, head_dim_v, tile_scheduler_metadata, num_splits, softmax_scale=None, causal=False
    ):  # fmt: skip
        told.append((tile_scheduler_metadata, *num_splits))
        o, lse = tw.cached_attention(
            q, k_cache, None, block_table, cache_seqlens, value_dim=head_dim_v, scale=softmax_scale, causal=causal
        )
        return o, lse * 1.5  # in another base

    module(monkeypatch, "sgl_kernel")
    module(monkeypatch, "sgl_kernel.flash_attn", flash_attn_with_kvcache=flash_attn_with_kvcache)
    module(
        monkeypatch, "sgl_kernel.flash_mla",
        get_mla_metadata=get_mla_metadata, flash_mla_with_kvcache=flash_mla_with_kvcache,
    )  # fmt: skip
    return told


CACHED = [case for case in CASES.values() if case.op == "cached_attention"]


@pytest.mark.parametrize("case", CACHED, ids=lambda case: case.name)
def test_every_case_over_caches_has_its_rivals(case, over_caches, infer):
    few = {"batch": 3, "length": min(case.dims["length"], 5), "context": 70, "shortest": 20, "longest": 150}
    heads = {"heads": 4, "kv_heads": min(case.dims["kv_heads"], 2)}
    dims = {n: {**few, **heads}.get(n, size) for n, size in case.dims.items()}
    given = {n: v for n, v in case.arguments.items() if n != "backend"}  # a CPU has the reference alone
    work = Work.build(replace(case, dims=dims, arguments=given), device="cpu")
    others = {*case.beside, *filter(None, [rival_of(case.metric)])} - {*rivals.BACKENDS}
    for name in others:
        agreed(work, name)
    assert over_caches or not others


def test_rivals_over_caches_are_called_as_they_want_to_be(over_caches, infer):
    def made(options=None, arguments=None, **dims):
        dims = {"batch": 3, "length": 4, "heads": 4, "kv_heads": 2, "head_dim": 32, "context": 70, **dims}
        return built("cached_attention", dims=dims, options=options or {}, arguments=arguments or {})

    latent = {"heads": 4, "kv_heads": 1, "head_dim": 576, "value_dim": 512}
    agreed(made({"latent": True}, page=64, **latent), "flashmla")
    assert over_caches[-1] == ("planned", torch.int32, 16, 1)
    agreed(made(page=16, arguments={"left": 20}), "fa3")
    assert over_caches[-1] == (False, (20, 0))
    agreed(made(arguments={"causal": False, "scale": 0.2}), "fa3")
    assert over_caches[-1] == (False, (-1, -1))
    agreed(made(page=16, length=1, arguments={"left": 20}), "flashinfer")
    assert infer[-1] == ("BatchDecodeWithPagedKVCacheWrapper", {"use_tensor_cores": True})
    agreed(made(length=1), "flashinfer")
    agreed(made(page=16, arguments={"scale": 0.2}), "flashinfer")
    assert infer[-1] == ("BatchPrefillWithPagedKVCacheWrapper", {})
    for name, work, words in (
        ("flashinfer", made({"latent": True}, page=64, **latent), "it has no value_dim"),
        ("fa3", made({"fp8": True}), "it has no k_scale"),
        ("fa3", made({"tree": True}), "it has no tree"),
        ("flashmla", made({"latent": True}, page=16, **latent), "in pages of 64"),
        ("flashmla", made({"latent": True}, **latent), "without block_table"),
        ("flashmla", made(page=64), "without value_dim"),
    ):
        with pytest.raises(Absent, match=words):
            rivals.call_of(name, work)


# ----------------------------------------------------------------------------------------------------------- all of them


def test_nothing_is_imported_before_it_is_asked_for():
    names = sorted({rival.module.partition(".")[0] for rival in packaged.RIVALS.values()} - {"torch"})
    script = f"import sys, tilewright.bench.rivals as r; r.known(); print([n for n in {names} if n in sys.modules])"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "[]", done.stderr


def test_a_package_that_is_not_there_is_named_with_what_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    wanted = {
        "liger": "pip install liger-kernel", "liger_cutedsl": "pip install 'liger-kernel[cutedsl]'",
        "quack": "pip install quack-kernels", "flaggems": "pip install flag-gems", "sgl_kernel": "pip install sglang-kernel",
    }  # fmt: skip
    for name, words in wanted.items():
        with pytest.raises(Absent) as error:
            rivals.call_of(name, built("rms_norm"))
        assert "is not installed" in str(error.value) and words in str(error.value)


def test_every_row_is_for_an_op_or_for_attention():
    """A name that no op has would never be called."""
    named = {op for rival in packaged.RIVALS.values() for op in rival.calls}
    assert named - set(tw.catalogue()) <= {"attention", REPLACED}
    attention = {"cudnn", "fa2", "fa3", "flashinfer", "flashmla", "flex"}
    assert {*packaged.RIVALS} == {"liger", "liger_cutedsl", "quack", "flaggems", "sgl_kernel", "fla", *attention}


# ------------------------------------------------------------------------------------------------------------- FlagGems


def test_flaggems_operators_of_rwkv(monkeypatch):
    """Its functions with the arguments of 5.0.2: heads and their width, and a vector of weights."""

    def rwkv_ka_fusion(k, kk, a, ka, H, N):
        assert k.shape[-1] == H * N
        unit = F.normalize((k * kk).float().view(-1, H, N), dim=-1).view(k.shape)
        return k * (1 + (a - 1) * ka), unit.to(k.dtype), (unit * a).to(k.dtype)

    def rwkv_mm_sparsity(k, v):
        assert k.dim() == 1
        return torch.mv(v.t(), k)

    module(monkeypatch, "flag_gems", rwkv_ka_fusion=rwkv_ka_fusion, rwkv_mm_sparsity=rwkv_mm_sparsity)
    agreed(built("rwkv_keys", options={"heads": 4}), "flaggems")
    with pytest.raises(Absent, match="no backward"):
        rivals.call_of("flaggems", built("rwkv_keys", "backward", options={"heads": 4}))
    sizes = {"tokens": 1, "hidden": 300, "columns": 40}
    one = built("sparse_mm", dims=sizes, options={"share": 0.1})
    agreed(one, "flaggems")
    agreed(one, "cublas")
    with pytest.raises(Absent, match="one token"):
        rivals.call_of("flaggems", built("sparse_mm", dims={**sizes, "tokens": 2}))


# ---------------------------------------------------------------------------------------------------------------- torch


def test_torch_keeps_the_tokens_that_we_draw_from():
    limits = {"top_k": True, "fewest": 5, "most": 9, "top_p": True, "least_p": 0.8}
    work = built("sample", dims={"tokens": TOKENS, "vocab": 500}, options=limits)
    theirs = agreed(work, "torch")
    assert torch.equal(theirs, work.call())
    work.values["top_p"] *= 0.3
    assert not torch.equal(work.call(), theirs)
    with pytest.raises(Absent):
        rivals.call_of("torch", built("sample", dims={"tokens": TOKENS, "vocab": 500}))


def test_an_empty_launch_has_no_result_that_could_be_another(monkeypatch):
    launched = []
    monkeypatch.setattr(rivals, "nothing", {(1,): lambda *args, **options: launched.append(args) or object()})
    work = built("rms_norm")
    theirs = agreed(work, "empty")
    assert len(launched) == 1
    assert work.result_bytes(theirs) == 0


class Compiled(KernelInterface):
    """A kernel that knows which of its variants were compiled, and by whom: a warm-up leaves it to the mode that is active."""

    fn = staticmethod(lambda n, block: None)

    def __init__(self, fails: int = 0) -> None:
        self.together, self.compiled, self.launched, self.fails = threading.Barrier(2), [], [], fails

    def run(self, n, *, grid, warmup, block, **options):
        if warmup:
            mode = _async_compile.active_mode.get()
            more = len(inspect.signature(mode.submit).parameters) - 2
            return mode.submit(block, lambda: self.compile(block), *[lambda *_: None] * more)
        if block not in self.compiled:
            self.compile(block)
        self.launched.append(block)

    def compile(self, block):
        self.together.wait(timeout=20.0)
        if block == self.fails:
            raise triton.runtime.errors.OutOfResources(2, 1, "shared memory")
        self.compiled.append(block)


@pytest.mark.parametrize("fails", (0, 4))
def test_what_a_rival_tries_is_compiled_side_by_side(fails):
    """And what does not compile is left to the rival, which knows what to do with it."""
    kernel, timed, plain = Compiled(fails), [], Autotuner.run

    def times(call, quantiles):
        if fails and len(kernel.compiled) == 1 and len(timed) == 1:
            kernel.together = threading.Barrier(1)
        timed.append(1)
        call()
        return [kernel.launched[-1]] * 3

    options = [triton.Config({"block": block}) for block in (2, 4)]
    tuned = Autotuner(kernel, ["n", "block"], options, ["n"], None, None, do_bench=times)
    with compiled_ahead(2):
        tuned[(1,)](5)
        assert sorted(kernel.compiled) == [block for block in (2, 4) if block != fails]
        assert kernel.launched == [*(block for block in (2, 4) if block != fails), 2]
    tuned[(1,)](5)
    assert kernel.launched[-1] == 2 and len(timed) == 2
    assert Autotuner.run is plain
