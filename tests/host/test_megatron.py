"""Functions, modules and whole models of Megatron-Core before and after `apply`: the same numbers, and the way back.

Megatron wants a GPU in places that have nothing to do with what is computed; these are answered here, on a CPU, with one rank.
"""

from __future__ import annotations

import importlib
import math
import sys
import warnings
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core")

from tilewright.integrations import megatron
from tilewright.integrations.megatron.patches import APPLIED, bindings

FP32 = 2e-6  # of the largest value: a few sums in another order
MODULES = {
    "swiglu": "fusions.fused_bias_swiglu", "rope": "models.common.embeddings.rope_utils", "moe": "transformer.moe.moe_utils",
    "loss": "tensor_parallel.cross_entropy", "fused_loss": "fusions.fused_cross_entropy", "clip": "optimizer.clip_grads",
}  # fmt: skip
SIZES = {
    "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_hidden_size": 48, "use_cpu_initialization": True,
    "gated_linear_unit": True, "activation_func": F.silu, "bias_activation_fusion": True, "normalization": "RMSNorm",
    "add_bias_linear": False, "hidden_dropout": 0.0, "attention_dropout": 0.0, "masked_softmax_fusion": False,
}  # fmt: skip
EXPERTS = {
    "num_moe_experts": 4, "moe_router_topk": 2, "moe_router_dtype": "fp32", "moe_z_loss_coeff": 1e-3,
    "moe_token_dispatcher_type": "allgather", "moe_ffn_hidden_size": 24,
}  # fmt: skip


def module(name: str) -> ModuleType:
    return importlib.import_module(f"megatron.core.{MODULES.get(name, name)}")


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with warnings.catch_warnings(), pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("ignore")
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        module("parallel_state").initialize_model_parallel()
        torch.compiler.set_stance("force_eager")  # Megatron compiles its small functions
        patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
        patch.setattr(module("tensor_parallel.random").CudaRNGStatesTracker, "fork", lambda *_: nullcontext())
        patch.setattr(module("moe"), "te_general_gemm", None, raising=False)  # 0.16 has no such name without TE
        yield
        torch.compiler.set_stance("default")
        module("parallel_state").destroy_model_parallel()
        dist.destroy_process_group()


@pytest.fixture
def report():
    made = megatron.apply()
    yield made
    if made in APPLIED:
        megatron.remove()


def randn(*shape: int, seed: int = 0, grad: bool = True) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).requires_grad_(grad)


def rotary_config(**given: object) -> SimpleNamespace:
    names = ("apply_rope_fusion", "rotary_interleaved", "multi_latent_attention")
    return SimpleNamespace(**{**dict.fromkeys(names, False), "mrope_section": None, **given})


def angles(positions: int, columns: int, interleaved: bool = False) -> torch.Tensor:
    half = torch.arange(positions)[:, None] * 0.3 ** torch.arange(columns // 2)
    both = half.repeat_interleave(2, -1) if interleaved else torch.cat([half, half], -1)
    return both.float()[:, None, None]


GROUP = SimpleNamespace(size=lambda: 1, rank=lambda: 0)
LENGTHS = torch.tensor([0, 3, 9], dtype=torch.int32)
MAP = torch.tensor([[1, 0, 1], [0, 0, 1], [1, 1, 0], [0, 1, 1], [0, 0, 0]], dtype=torch.bool)
GROUPS = {"num_groups": 4, "group_topk": 2}
# Which function, what it is given, which op it is to be.
CALLS = {
    "swiglu": ("swiglu.bias_swiglu_impl", lambda: ((randn(3, 2, 12), None), {}), "glu"),
    "biased": ("swiglu.bias_swiglu_impl", lambda: ((randn(5, 12), randn(12, seed=1)), {}), "glu"),
    "weighted": ("swiglu.weighted_bias_swiglu_impl", lambda: ((randn(5, 12), None, randn(5, 1, seed=1)), {}), "glu"),
    "rope": (
        "rope.apply_rotary_pos_emb", lambda: ((randn(6, 2, 3, 8), angles(6, 4), rotary_config()), {"mscale": 1.2}), "rope_one",
    ),
    "pairs": (
        "rope.apply_rotary_pos_emb",
        lambda: ((randn(6, 2, 3, 8), angles(6, 8, True), rotary_config(rotary_interleaved=True)), {}), "rope_one",
    ),
    "packed": (
        "rope.apply_rotary_pos_emb",
        lambda: ((randn(9, 3, 8), angles(7, 8), rotary_config()), {"cu_seqlens": LENGTHS, "cp_group": GROUP}), "rope_one",
    ),
    "loss": ("loss.vocab_parallel_cross_entropy", lambda: ((randn(4, 2, 11), torch.arange(8).view(4, 2)), {}), "cross_entropy"),
    "fused loss": (
        "fused_loss.fused_vocab_parallel_cross_entropy",
        lambda: ((randn(4, 2, 11), torch.arange(8).view(4, 2), dist.group.WORLD), {}), "cross_entropy",
    ),
    "gating": (
        "moe.router_gating_linear", lambda: ((randn(3, 2, 8), randn(5, 8, seed=1), randn(5, seed=2), torch.float32), {}),
        "router_linear",
    ),
    "z loss": ("moe.z_loss_func", lambda: ((randn(7, 5), 0.1), {}), "router_z_loss"),
    "softmax": ("moe.topk_routing_with_score_function", lambda: ((randn(7, 8), 3), {"scaling_factor": 2.5}), "topk_routing"),
    "pre softmax": ("moe.topk_routing_with_score_function", lambda: ((randn(7, 8), 3, True), {}), "topk_routing"),
    "sigmoid": (
        "moe.topk_routing_with_score_function",
        lambda: ((randn(7, 8), 4), {"score_function": "sigmoid", "expert_bias": randn(8, seed=1).detach(), **GROUPS}),
        "topk_routing",
    ),
    "chunks": (
        "moe.sort_chunks_by_idxs",
        lambda: ((randn(7, 4), torch.tensor([2, 0, 4, 1]), torch.tensor([2, 3, 1, 0]), randn(7, seed=1)), {}), "sort_chunks",
    ),
}  # fmt: skip


def run(call, given: tuple, named: dict) -> list[torch.Tensor]:
    """Results that are tensors, and the gradients of all that learn."""
    made = call(*given, **named)
    found = [t for t in (made if isinstance(made, tuple) else (made,)) if isinstance(t, torch.Tensor)]
    sum((t * randn(*t.shape, seed=9)).sum() for t in found if t.requires_grad).backward()
    return [*(t.detach() for t in found), *(t.grad for t in given if getattr(t, "grad", None) is not None)]


def close(found: list[torch.Tensor], truth: list[torch.Tensor], bar: float = FP32) -> None:
    assert len(found) == len(truth) > 1
    for ours, theirs in zip(found, truth):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
        scale = theirs.abs().amax().clamp(min=1e-9) if theirs.dtype.is_floating_point else 1
        assert ((ours.double() - theirs.double()).abs().amax() / scale).item() <= bar


@pytest.mark.parametrize("name", CALLS)
def test_functions_compute_the_same(name):
    path, build, op = CALLS[name]
    where, function = path.split(".")
    truth = run(getattr(module(where), function), *build())
    with megatron.apply() as report:
        found = run(getattr(module(where), function), *build())
        assert report.calls() == {op: 1} and not report.fallbacks()
    close(found, truth, 8e-3 if name == "fused loss" else FP32)  # Megatron's gradient of that is always bf16


@pytest.mark.parametrize("padded", [False, True])
def test_rows_go_to_their_experts_and_back(padded):
    def there_and_back() -> list[torch.Tensor]:
        moe = module("moe")
        x, logits = randn(5, 4), randn(5, 3, seed=1)
        probs, routing = moe.topk_routing_with_score_function(logits, 2)
        if padded:  # written into the same memory, which then has more experts for a token than were chosen
            routing = moe.pad_routing_map(routing, 4)
        count = int(routing.sum())
        rows, row_probs, order, *_ = moe.permute(x, routing, probs, num_out_tokens=count)
        y = moe.unpermute(rows * row_probs[:, None], order, x.shape)
        again = moe.unpermute(rows, order, x.shape, probs=probs, routing_map=routing)
        (y.square().sum() + (again * randn(5, 4, seed=2)).sum()).backward()
        return [rows.detach(), row_probs.detach(), y.detach(), again.detach(), x.grad, logits.grad]

    truth = there_and_back()
    with megatron.apply() as report:
        found = there_and_back()
        assert report.calls() == {"topk_routing": 1, "moe_permute": 1, "moe_unpermute": 2} and not report.fallbacks()
    close(found, truth)


def test_labels_outside_the_vocabulary_cost_nothing(report):
    logits, labels = randn(3, 1, 5), torch.tensor([[-1], [2], [7]])
    loss = module("loss").vocab_parallel_cross_entropy(logits, labels)
    loss.sum().backward()
    assert loss[0] == loss[2] == 0 and loss[1] > 0 and not logits.grad[0].any() and not logits.grad[2].any()


def test_gradients_are_measured_clipped_and_counted(report):
    """Megatron's own functions are for GPUs alone: held against torch."""
    clip, made = module("clip"), [nn.Parameter(randn(*shape, grad=False)) for shape in ((3, 4), (5,), (2, 2))]
    for p in made[:2]:
        p.grad = randn(*p.shape, seed=3, grad=False) * (torch.arange(p.shape[-1]) != 1)
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
    x = randn(4, 8)
    swiglu.bias_swiglu_impl(x, None, fp8_input_store=True).sum().backward()
    rope.apply_rotary_pos_emb(x.view(4, 1, 1, 8), angles(4, 8).double(), rotary_config())
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


def build(moe: bool, grouped: bool = False) -> nn.Module:
    config = module("transformer").TransformerConfig(**SIZES, **(EXPERTS if moe else {}), moe_grouped_gemm=grouped)
    specs = module("models.gpt.gpt_layer_specs")
    layer = specs.get_gpt_layer_local_spec(
        num_experts=4 if moe else None, moe_grouped_gemm=grouped, normalization="RMSNorm"
    )
    torch.manual_seed(0)
    return module("models.gpt").GPTModel(config, layer, 96, 16, position_embedding_type="rope")


def step(model: nn.Module) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 96, (2, 8), generator=torch.Generator().manual_seed(1))
    mask = torch.triu(torch.ones(8, 8, dtype=torch.bool), 1)[None, None]
    model.zero_grad()
    loss = model(ids, torch.arange(8).expand(2, 8), mask, labels=ids)
    loss.mean().backward()
    return {"loss": loss.detach(), **{n: p.grad.clone() for n, p in model.named_parameters()}}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("moe", [False, True])
def test_a_model_computes_the_same(moe):
    model = build(moe)
    truth = step(model)
    with megatron.apply() as report:
        found = step(model)
    expected = {"rope_one", "glu", "cross_entropy"}
    if moe:
        expected |= {"router_linear", "topk_routing", "router_z_loss", "moe_permute", "moe_unpermute"}
    assert {*report.calls()} == expected and not report.fallbacks()
    close([*found.values()], [*truth.values()])
    assert all(torch.equal(t, truth[name]) for name, t in step(model).items())


@pytest.mark.filterwarnings("ignore")
def test_a_model_of_our_modules_computes_the_same():
    plain = build(True)
    truth = step(plain)
    with megatron.apply(modules=True) as report:
        model = build(True, grouped=True)
        state = plain.state_dict()
        for name in [n for n in model.state_dict() if n.endswith(("weight1", "weight2"))]:
            prefix, number = name[: -len("weight1")], name[-1]
            parts = [f"{prefix}local_experts.{e}.linear_fc{number}.weight" for e in range(4)]
            state[name] = torch.stack([state.pop(part) for part in parts])
        model.load_state_dict({k: v for k, v in state.items() if "_extra_state" not in k}, strict=False)
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
