"""Functions, modules and whole models of Megatron-Core before and after `apply`: the same numbers, and the way back."""

from __future__ import annotations

import math
import sys
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from tests import megatron_models as models
from tests.megatron_models import CALLS, FP32, ROUTER, Sizes, build, close, module, randn, rotary_config, step
from tilewright.integrations import megatron
from tilewright.integrations.megatron.patches import APPLIED, bindings


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with models.ranks("cpu"):
        yield


@pytest.fixture
def report():
    made = megatron.apply()
    yield made
    if made in APPLIED:
        megatron.remove()


@pytest.mark.parametrize("name", CALLS)
def test_functions_compute_the_same(name):
    call = CALLS[name]
    truth = models.run(call, Sizes())
    with megatron.apply() as report:
        found = models.run(call, Sizes())
        assert report.calls() == {call.op: 1} and not report.fallbacks()
    close(found, truth, 8e-3 if name == "fused loss" else FP32)  # Megatron's gradient of that is always bf16


@pytest.mark.parametrize("padded", [False, True])
def test_rows_go_to_their_experts_and_back(padded):
    sizes = Sizes(tokens=5, experts=3)
    truth = models.there_and_back(sizes, padded)
    with megatron.apply() as report:
        found = models.there_and_back(sizes, padded)
        assert report.calls() == {"topk_routing": 1, "moe_permute": 1, "moe_unpermute": 2} and not report.fallbacks()
    close(found, truth)


def test_labels_outside_the_vocabulary_cost_nothing(report):
    logits, labels = randn(3, 1, 5).requires_grad_(), torch.tensor([[-1], [2], [7]])
    loss = module("loss").vocab_parallel_cross_entropy(logits, labels)
    loss.sum().backward()
    assert loss[0] == loss[2] == 0 and loss[1] > 0 and not logits.grad[0].any() and not logits.grad[2].any()


def test_gradients_are_measured_clipped_and_counted(report):
    """Megatron's own functions are for GPUs alone: held against torch."""
    clip, made = module("clip"), [nn.Parameter(randn(*shape)) for shape in ((3, 4), (5,), (2, 2))]
    for p in made[:2]:
        p.grad = randn(*p.shape, seed=3) * (torch.arange(p.shape[-1]) != 1)
        p.tensor_model_parallel = True
    grads = [p.grad for p in made[:2]]
    whole = torch.cat([g.flatten() for g in grads])
    for kind in (1, 2, math.inf):
        assert clip.get_grad_norm_fp32(grads, kind) == pytest.approx(float(whole.norm(kind)), rel=1e-6)
    assert clip.get_grad_norm_fp32([]) == 0.0
    assert clip.count_zeros_fp32(made, None) == 4.0
    before = [g.clone() for g in grads]
    clip.clip_grad_by_total_norm_fp32(made, 1e9, 2.0)
    assert all(torch.equal(g, b) for g, b in zip(grads, before))
    clip.clip_grad_by_total_norm_fp32(made, 1.0, float(whole.norm()))
    assert torch.cat([g.flatten() for g in grads]).norm().item() == pytest.approx(1.0, rel=1e-5)
    expected = {"multi_tensor_norm": 4, "multi_tensor_count_zeros": 1, "multi_tensor_scale": 2}
    assert report.calls() == expected and not report.fallbacks()


def test_what_an_op_cannot_do_goes_to_megatron_and_is_counted(report):
    swiglu, moe, rope = module("swiglu"), module("moe"), module("rope")
    x = randn(4, 8).requires_grad_()
    swiglu.bias_swiglu_impl(x, None, fp8_input_store=True).sum().backward()
    rope.apply_rotary_pos_emb(x.view(4, 1, 1, 8), Sizes().angles(4, 8).double(), rotary_config())
    made = moe.permute(x, torch.ones(4, 2, dtype=torch.bool), num_out_tokens=8, drop_and_pad=True)
    moe.unpermute(made[0], made[2], x.shape, drop_and_pad=True)
    moe.topk_routing_with_score_function(
        x, 2, router_replay=SimpleNamespace(get_replay_topk=lambda s, k, *_: s.topk(k))
    )
    module("loss").vocab_parallel_cross_entropy(x.view(4, 1, 8), torch.zeros(4, 1, dtype=torch.long), 0.1)
    assert not report.calls() and sum(report.fallbacks().values()) == 6
    assert "bias_swiglu_impl: its input is to be kept in FP8" in str(report)
    with pytest.raises(TypeError, match="fp8_store"):
        swiglu.bias_swiglu_impl(x, None, fp8_store=True)
    with pytest.raises(TypeError, match="multiple values"):
        swiglu.bias_swiglu_impl(x, None, input=x)
    with pytest.raises(TypeError, match="bias"):
        swiglu.bias_swiglu_impl(x)


def test_every_binding_is_replaced_and_given_back(monkeypatch):
    module("transformer.moe.token_dispatcher"), module("models.gpt"), module("optimizer")
    packages = ("megatron",)
    before = {name: dict(vars(m)) for name, m in sys.modules.items() if name.startswith("megatron.")}
    report = megatron.apply()
    theirs = {id(original) for _, original in report.originals.values()}
    assert len(theirs) == 14 and not [*bindings(packages, dict.fromkeys(theirs))]
    held = {r.module for r in report.replaced}
    assert "megatron.core.tensor_parallel.vocab_parallel_cross_entropy" in held
    assert "megatron.core.models.common.language_module.language_module.fused_vocab_parallel_cross_entropy" in held
    with pytest.raises(ValueError, match="already"):
        megatron.apply()
    later = ModuleType("megatron.later")
    later.permute = module("moe").permute
    monkeypatch.setitem(sys.modules, "megatron.later", later)
    megatron.remove()
    assert later.permute is module("moe").permute
    for name, attributes in before.items():
        now = vars(sys.modules[name])
        assert all(now.get(key) is value for key, value in attributes.items() if callable(value)), name
    with pytest.raises(ValueError, match="not patched"):
        megatron.remove()


def test_another_signature_is_not_patched(monkeypatch):
    def permute(tokens, routing_map, sideways):
        return tokens

    monkeypatch.setattr(module("moe"), "permute", permute)
    with pytest.raises(ValueError, match=r"moe_utils.permute: its parameters are \(tokens, routing_map, sideways\)"):
        megatron.apply()
    assert not APPLIED and module("moe").permute is permute
    with megatron.apply(strict=False, only=["permute", "swiglu"]) as report:
        assert [s.role for s in report.skipped] == ["permute"] and module("moe").permute is permute
    with pytest.raises(ValueError, match="only must name roles"):
        megatron.apply(only="norms")


# ---- models ----------------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("moe", [False, True])
def test_a_model_computes_the_same(moe):
    model = build(moe)
    truth = step(model)
    with megatron.apply() as report:
        found = step(model)
    expected = {"rope_one", "glu", "cross_entropy", *(ROUTER if moe else ())}
    assert {*report.calls()} == expected and not report.fallbacks()
    close([*found.values()], [*truth.values()])
    assert all(torch.equal(t, truth[name]) for name, t in step(model).items())


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_our_modules_computes_the_same():
    plain = build(True)
    truth = step(plain)
    with megatron.apply(modules=True) as report:
        model = build(True, grouped=True)
        model.load_state_dict(models.state_of_groups(plain.state_dict(), [*model.state_dict()]), strict=False)
        found = step(model)
    assert report.calls()["rms_norm"] == 5 and report.calls()["grouped_mm"] == 2
    for name in [n for n in found if n in truth]:
        close([found[name], found["loss"]], [truth[name], truth["loss"]])
    for layer in range(2):
        prefix = f"decoder.layers.{layer}.mlp.experts."
        first = torch.stack([truth[f"{prefix}local_experts.{e}.linear_fc1.weight"] for e in range(4)])
        close([found[f"{prefix}weight1"], found["loss"]], [first, truth["loss"]])
    assert type(build(False).decoder.final_layernorm) is nn.RMSNorm  # removed: Megatron's again


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("alone", [False, True])
def test_checkpoints_are_those_of_sequential_experts(alone):
    with megatron.apply(modules=True):
        ours = build(True, grouped=True).decoder.layers[0].mlp.experts
    theirs = build(True).decoder.layers[0].mlp.experts
    with torch.no_grad():
        for e, expert in enumerate(theirs.local_experts):
            ours.weight1[e], ours.weight2[e] = expert.linear_fc1.weight, expert.linear_fc2.weight
    ours, theirs = (
        assembled(m.sharded_state_dict("mlp.", (), {"singleton_local_shards": alone})) for m in (ours, theirs)
    )
    assert ours.keys() == theirs.keys() and len(ours) == (12 if alone else 2)
    assert all(torch.equal(t, theirs[key]) for key, t in ours.items())


def assembled(state: dict) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint, from their shards."""
    module("dist_checkpointing.mapping").apply_factories(state)
    shards, found = [*state.values()], {}
    while shards:
        shard = shards.pop()
        if isinstance(shard, (list, dict)):
            shards += shard if isinstance(shard, list) else shard.values()
        elif hasattr(shard, "global_slice"):
            whole = found.setdefault(shard.key, torch.full(shard.global_shape, math.nan))
            whole[shard.global_slice()] = shard.data.detach()
    return found
