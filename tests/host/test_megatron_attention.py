"""The core of Megatron's attention by `attention`, against Megatron's own module and, where that has none, the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import megatron_models as models
from tests.megatron_models import FP32, attend, attending, build, close, heads, masks, module, randn, step
from tilewright.integrations import megatron

LENGTH = models.LENGTH


@pytest.fixture(scope="module", autouse=True)
def one_rank(request):
    with models.ranks("cpu"):
        yield


CASES = {
    "causal": {}, "scaled": {"softmax_scale": 0.3}, "scaled by layers": {"apply_query_key_layer_scaling": True},
    "window": {"window_size": (3, 0)}, "no window": {"window_size": (3, 0), "window_attn_skip_freq": 1},
    "off by one": {"softmax_type": "off-by-one"}, "learnable": {"softmax_type": "learnable"},
}  # fmt: skip


def on_cpu(theirs: Callable, monkeypatch: pytest.MonkeyPatch) -> Callable:
    """A function that makes its tensors by `torch.ones` on a GPU."""
    ones = torch.ones

    def call(*given: Any) -> Tensor:
        with monkeypatch.context() as patch:
            patch.setattr(torch, "ones", lambda *shape, **named: ones(*shape, **{**named, "device": "cpu"}))
            return theirs(*given)

    return call


@pytest.mark.parametrize("name", CASES)
def test_the_core_computes_the_same(name, monkeypatch):
    softmax = module("fusions.fused_softmax")
    for mask in ("get_default_causal_mask", "get_sliding_window_causal_mask"):  # which Megatron makes on a GPU
        monkeypatch.setattr(softmax, mask, on_cpu(getattr(softmax, mask), monkeypatch))
    own = module("transformer.dot_product_attention").DotProductAttention
    truth = attend(attending(core=own, **CASES[name]), heads(), None)
    close(attend(attending(**CASES[name]), heads(), None), truth)
    assert len(truth) == (5 if name == "learnable" else 4)


@pytest.mark.parametrize("kind", ["causal", "padding", "arbitrary"])
def test_masks_say_what_is_not_seen(kind):
    own = module("transformer.dot_product_attention").DotProductAttention
    mask = torch.triu(torch.ones(LENGTH, LENGTH, dtype=torch.bool), 1)[None, None]
    if kind == "causal":  # one that is reset in the middle, which is heeded too
        mask[..., 5:, :5] = True
    else:
        mask = torch.arange(LENGTH) >= torch.tensor([6, LENGTH])[:, None, None, None]
    truth = attend(attending(kind, own), heads(), mask)
    close(attend(attending(kind), heads(), mask), truth)


def test_decoding_and_longer_keys():
    core = attending()
    q, k, v = heads(1)
    expected = attend(attending("no_mask"), [q, k, v], None)
    close(attend(core, [q, k, v], None), expected)  # the last token sees all
    q, k, v = heads(3)
    last = attend(core, [torch.cat([k.repeat_interleave(2, 2)[:-3], q]), k, v], None)[0][-3:]
    found = core(q, k, v, None, attn_mask_type=masks().causal_bottom_right)
    torch.testing.assert_close(found, last)
    with pytest.raises(ValueError, match="causal is for as many keys as queries, got 3 queries and 8 keys"):
        core(q, k, v, None)


def formula(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal, of one sequence [length, heads, head_dim]."""
    s = torch.einsum("qhd,khd->hqk", q, k) * scale
    s = s.masked_fill(torch.triu(torch.ones(s.shape[1:], dtype=torch.bool), 1), -math.inf)
    return torch.einsum("hqk,khd->qhd", s.softmax(-1), v).flatten(1)


@pytest.mark.parametrize("padded", [False, True])
def test_packed_sequences_of_latent_attention(padded):
    """Keys of 24 columns and values of 16. Of padding behind a sequence nothing is asked."""
    params = module("packed_seq_params").PackedSeqParams
    marks, ends = torch.tensor([0, 3, 8, 12], dtype=torch.int32), (2, 8, 11) if padded else (3, 8, 12)
    given = [randn(12, 4, width, seed=i) for i, width in enumerate((24, 24, 16))]
    packed = {"qkv_format": "thd", "cu_seqlens_q": marks, "cu_seqlens_kv": marks}
    weights = randn(12, 64, seed=9)
    if padded:
        lengths = torch.tensor([0, *ends]) - torch.tensor([0, *marks[:-1]])
        actual = lengths.cumsum(0).int()
        packed |= {f"cu_seqlens_{x}_padded": marks for x in ("q", "kv")}
        packed |= {f"cu_seqlens_{x}": actual for x in ("q", "kv")}
        for i in range(3):
            weights[ends[i] : marks[i + 1]] = 0.0
    core = attending("padding_causal", softmax_scale=0.2)
    found = attend(core, given, None, packed_seq_params=params(**packed), weights=weights)
    truth = [t.double().requires_grad_() for t in given]
    made = torch.zeros(12, 64, dtype=torch.float64)
    for begin, end in zip(marks.tolist(), ends):
        made[begin:end] = formula(*(t[begin:end] for t in truth), 0.2)
    (made * weights).sum().backward()
    there = weights.abs().sum(1) > 0
    for ours, theirs in zip([found[0][there], *found[1:]], [made.detach()[there], *(t.grad for t in truth)]):
        assert (ours - theirs).abs().max() < FP32 * theirs.abs().max()


def test_a_model_with_our_core():
    plain = build(False, num_query_groups=2)
    truth = step(plain)
    with megatron.apply(modules=True, attention=True) as report:
        model = build(False, num_query_groups=2)
        model.load_state_dict(plain.state_dict())
        found = step(model)
        assert report.calls()["attention"] == 2 and not report.fallbacks()
        assert "rms_norm, grouped_mm, attention" in {r.op for r in report.replaced}
    close([*found.values()], [*truth.values()])
    assert type(build(False).decoder.layers[0].self_attention.core_attention).__name__ == "DotProductAttention"
    with megatron.apply(modules=True):
        core = build(False).decoder.layers[0].self_attention.core_attention
        assert type(core).__name__ == "DotProductAttention"
    with pytest.raises(ValueError, match="modules=True is needed"):
        megatron.apply(attention=True)


LATENT = {
    "multi_latent_attention": True, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8, "rope_type": "rope",
}  # fmt: skip


def test_a_model_of_latent_attention(monkeypatch):
    """Which Megatron's own core is not for: against the formula in its place."""
    from tilewright.integrations.megatron.attention import CoreAttention

    latent = module("transformer.multi_latent_attention")
    if not module("extensions.transformer_engine").HAVE_TE:  # by which it asks of layers whether they are these
        monkeypatch.setattr(latent, "TELinear", type("TELinear", (), {}))
    with megatron.apply(modules=True, attention=True) as report:
        config = module("transformer.transformer_config").MLATransformerConfig(**{**models.MODEL, **LATENT})
        layer = module("models.gpt.gpt_layer_specs").get_gpt_layer_local_spec(
            normalization="RMSNorm", multi_latent_attention=True
        )
        torch.manual_seed(0)
        model = module("models.gpt").GPTModel(config, layer, models.VOCAB, LENGTH, position_embedding_type="rope")
        found = step(model)
        assert report.calls()["attention"] == 2

        def forward(self: Any, q: Tensor, k: Tensor, v: Tensor, *_: Any, **named: Any) -> Tensor:
            assert q.shape[-1] == k.shape[-1] == 16 and v.shape[-1] == 8
            each = [formula(q[:, i], k[:, i], v[:, i], self.scale) for i in range(q.shape[1])]
            return torch.stack(each, 1)

        monkeypatch.setattr(CoreAttention, "forward", forward)
        close([*found.values()], [*step(model).values()])


def test_what_is_refused():
    for name, value in (("attention_dropout", 0.1), ("qk_clip", True), ("fp8_dot_product_attention", True)):
        with pytest.raises(ValueError, match=f"CoreAttention: {name} must be"):
            attending(**{name: value})
    with pytest.raises(ValueError, match="softmax_type must be"):
        attending(softmax_type="other")
    with pytest.raises(ValueError, match="no attention_bias"):
        attending()(*heads(), None, attention_bias=torch.zeros(1))
    packed = module("packed_seq_params").PackedSeqParams(
        qkv_format="thd", cu_seqlens_q=torch.tensor([0, 8]), cu_seqlens_q_padded=torch.tensor([0, 8])
    )
    with pytest.raises(ValueError, match="must be causal"):
        attending("padding")(*(t[:, 0] for t in heads()), None, packed_seq_params=packed)


def test_an_offset_that_learns_is_sharded():
    core = attending(softmax_type="learnable")
    group = module("parallel_state").get_data_parallel_group(with_context_parallel=True)
    state = core.sharded_state_dict("core.", (), {"dp_cp_group": group})
    assert [*state] == ["core.softmax_offset"] and state["core.softmax_offset"].data is core.softmax_offset
