"""Megatron's experts and TransformerEngine's tensors from ours. TransformerEngine is stood in for by its published fields."""

from __future__ import annotations

import copy
import sys
import warnings
from types import ModuleType, SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import tilewright as tw
from tilewright.integrations.megatron import fp8
from tilewright.nn import expert_codes
from tilewright.nn.experts import moe_feed_forward

HIDDEN, FFN, EXPERTS = 16, 8, 3
CONFIG = {
    "num_layers": 1, "hidden_size": HIDDEN, "num_attention_heads": 2, "num_moe_experts": EXPERTS, "moe_ffn_hidden_size": FFN,
    "use_cpu_initialization": True, "gated_linear_unit": True, "activation_func": F.silu, "add_bias_linear": False,
    "moe_router_topk": 2,
}  # fmt: skip
COUNTS = torch.tensor([3, 0, 4])


def group(rank: int = 0, size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(rank=lambda: rank, size=lambda: size)


def experts(
    count: int = EXPERTS, ep: SimpleNamespace | None = None, tp: SimpleNamespace | None = None, **given: object
):
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.transformer import TransformerConfig

        from tilewright.integrations.megatron.experts import GroupedMLP

        config = TransformerConfig(**CONFIG)
    for name, value in given.items():  # some of them want TransformerEngine if they are given
        setattr(config, name, value)
    groups = SimpleNamespace(ep=ep or group(), expt_tp=tp or group(), expt_dp=group())
    torch.manual_seed(0)
    return GroupedMLP(count, config, pg_collection=groups)


def forward(module, weights: tuple[torch.Tensor, torch.Tensor] | None = None) -> tuple[torch.Tensor, ...]:
    """y and the gradients of x, probs and both weights; with `weights`, expert by expert in float64."""
    made = torch.Generator().manual_seed(1)
    x, probs = torch.randn(7, HIDDEN, generator=made), torch.rand(7, generator=made)
    if weights is None:
        first, second = module.weight1, module.weight2
        y, bias = module(x.requires_grad_(), COUNTS, probs.requires_grad_())
        assert bias is None
    else:
        first, second = (w.detach().double().requires_grad_() for w in weights)
        x, probs = x.double().requires_grad_(), probs.double().requires_grad_()
        rows = torch.repeat_interleave(torch.arange(EXPERTS), COUNTS)
        gate, up = torch.einsum("th,tfh->tf", x, first[rows]).chunk(2, -1)
        y = torch.einsum("tf,thf->th", F.silu(gate) * up * probs[:, None], second[rows])
    (y * torch.randn(7, HIDDEN, generator=made)).sum().backward()
    return y.detach(), x.grad, probs.grad, first.grad, second.grad


def close(found: tuple, truth: tuple) -> None:
    for ours, theirs in zip(found, truth):
        torch.testing.assert_close(ours.double(), theirs, rtol=1e-5, atol=1e-5 * float(theirs.abs().max()))


FP8 = {"fp8": "e4m3", "fp8_recipe": "blockwise", "moe_ffn_hidden_size": 128}


@pytest.mark.parametrize("given", [{}, FP8])
def test_experts_against_each_by_itself(given):
    """On a CPU FP8 changes nothing: this holds how rows find their experts."""
    module = experts(**given)
    close(forward(module), forward(module, (module.weight1, module.weight2)))


def test_codes_are_made_once_for_the_micro_batches_of_a_step(monkeypatch):
    made, given, module = [], [], experts(**FP8)
    ours, op = expert_codes.quantize_experts, moe_feed_forward.function
    monkeypatch.setattr(expert_codes, "quantize_experts", lambda weight: made.append(weight.shape) or ours(weight))
    monkeypatch.setattr(
        moe_feed_forward, "function", lambda *args, **named: given.append(args[5:]) or op(*args, **named)
    )

    def quantised() -> int:
        before = len(made)
        forward(module)
        return len(made) - before

    assert quantised() == 2 == quantised() and not module.codes.made  # of weights that learn, by hand
    module.set_is_first_microbatch()
    assert quantised() == 2 and quantised() == 0
    assert all(a is b for a, b in zip(given[-2], given[-1], strict=True)) and len(given[-1]) == 6
    module.weight1.data.mul_(2.0)  # unseen, as fused optimisers write
    module.set_is_first_microbatch()
    assert quantised() == 2
    assert torch.equal(given[-1][1], 2 * given[-2][1]) and torch.equal(given[-1][0].float(), given[-2][0].float())
    with torch.no_grad():
        module.weight2.mul_(2.0)
    assert quantised() == 1
    module.eval()
    assert quantised() == 2 and not module.codes.made  # nobody says that a step is over
    module.train().config.disable_parameter_transpose_cache = True
    module.set_is_first_microbatch()
    assert quantised() == 0 and given[-1] == ()


def test_a_rank_without_tokens():
    module = experts()
    y, _ = module(torch.zeros(0, HIDDEN, requires_grad=True), torch.zeros(EXPERTS, dtype=torch.long), torch.zeros(0))
    y.sum().backward()
    assert y.shape == (0, HIDDEN) and not module.weight1.grad.any() and not module.weight2.grad.any()


def test_weight_gradients_later_and_into_buffers():
    plain = experts()
    truth = forward(plain)
    module = experts(delay_wgrad_compute=True)
    ready = []
    module.register_wgrad_accumulation_and_reduce_hooks(lambda: ready.append(module.weight1.grad is not None))
    assert module.weight1.skip_backward_post_hook
    found = forward(module)
    assert found[3] is None and found[4] is None and len(module.waiting) == 2 and not ready
    module.backward_dw()
    assert ready == [True] and torch.equal(module.weight1.grad, truth[3]) and torch.equal(module.weight2.grad, truth[4])
    forward(module)
    module.backward_dw()
    torch.testing.assert_close(module.weight1.grad, 2 * truth[3])

    module = experts(gradient_accumulation_fusion=True)
    for weight in (module.weight1, module.weight2):
        weight.main_grad, weight.grad_added_to_main_grad = torch.ones(weight.shape), False
    forward(module)
    torch.testing.assert_close(module.weight1.main_grad, 1 + truth[3])
    torch.testing.assert_close(module.weight2.main_grad, 1 + truth[4])
    assert module.weight1.grad_added_to_main_grad


@pytest.mark.parametrize("alone", [False, True])
def test_shards_of_all_ranks_are_the_whole(alone):
    """Two ranks of experts and two of tensors: the shards make up whole weights, and loaded ones those of the module."""
    pytest.importorskip("megatron.core", reason="megatron-core is not installed: pip install megatron-core")
    from megatron.core.dist_checkpointing.mapping import apply_factories

    whole = {"linear_fc1": torch.zeros(4, 2 * FFN, HIDDEN), "linear_fc2": torch.zeros(4, HIDDEN, FFN)}
    for ep in range(2):
        for tp in range(2):
            module = experts(2, group(ep, 2), group(tp, 2))
            torch.nn.init.normal_(module.weight1), torch.nn.init.normal_(module.weight2)
            state = module.sharded_state_dict("mlp.", (), {"singleton_local_shards": alone})
            factories = dict(state)
            apply_factories(state)
            for name in ("weight1", "weight2"):
                parts = state[f"mlp.{name}"]
                for i, shard in enumerate(t for part in parts for t in (part if alone else [part])):
                    linear = shard.key.split(".")[-2]
                    if alone:
                        expert, half = 2 * ep + i % 2, shard.key.rpartition("weight")[2]
                        assert shard.key == f"mlp.experts.{expert}.{linear}.weight{half}"
                        there = whole[linear][expert]
                        there = there[(half == "_v") * FFN :][:FFN] if half else there
                    else:
                        assert shard.key == f"mlp.experts.{linear}.weight"
                        there = whole[linear]
                    assert shard.global_shape == tuple(there.shape)
                    there[shard.global_slice()] += shard.data
                data = [[t.data for t in part] for part in parts] if alone else [part.data for part in parts]
                assert torch.equal(factories[f"mlp.{name}"].merge_fn(data), getattr(module, name))
    assert all((t != 0).all() for t in whole.values())


def test_configs_that_it_is_not_for():
    for name, value in (
        ("add_bias_linear", True), ("gated_linear_unit", False), ("glu_linear_offset", 1.0), ("activation_func", F.selu),
        ("fp8", "hybrid"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=f"GroupedMLP: {name} must be"):
            experts(**{name: value})


# ---- TransformerEngine, stood in for by the fields and names it publishes --------------------------------------------------


class Quantizer:
    """`Float8BlockQuantizer` as published: what it is told, and a copy by torch's shallow one."""

    def __init__(
        self, fp8_dtype, *, rowwise, columnwise, amax_epsilon=0.0, force_pow_2_scales=True, block_scaling_dim=2
    ):
        self.dtype, self.rowwise_usage, self.columnwise_usage = fp8_dtype, rowwise, columnwise
        self.amax_epsilon, self.force_pow_2_scales = amax_epsilon, force_pow_2_scales
        self.block_scaling_dim, self.internal = block_scaling_dim, False

    def quantize_impl(self, tensor):
        raise AssertionError("TransformerEngine's own kernel")

    def copy(self):
        return copy.copy(self)


@pytest.fixture
def engine(monkeypatch):
    names = {
        "transformer_engine_torch": {"DType": SimpleNamespace(kFloat8E4M3="kFloat8E4M3", kFloat8E5M2="kFloat8E5M2")},
        "transformer_engine.pytorch.tensor.float8_blockwise_tensor": {
            "Float8BlockQuantizer": Quantizer, "Float8BlockwiseQTensor": lambda **fields: SimpleNamespace(**fields),
        },
        "transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage": {
            "Float8BlockwiseQTensorStorage": lambda **fields: SimpleNamespace(stored=True, **fields),
        },
    }  # fmt: skip
    for name, held in names.items():
        module = ModuleType(name)
        vars(module).update(held)
        for parent in (".".join(name.split(".")[: n + 1]) for n in range(name.count("."))):
            monkeypatch.setitem(sys.modules, parent, sys.modules.get(parent, ModuleType(parent)))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.parametrize(
    ("role", "granularity"),
    [("linear_weight", "128x128"), ("linear_input", "1x128"), (SimpleNamespace(tensor_type="weight"), "128x128")],
)
def test_the_quantiser_factory_makes_their_tensors(engine, role, granularity):
    made = fp8.quantizer(role)
    assert type(made) is Quantizer  # compiled code compares the type itself
    x = torch.randn(192, 256, generator=torch.Generator().manual_seed(0)).bfloat16()
    t, q = made.quantize_impl(x), tw.quantize(x, tw.fp8(granularity, ways="both"))
    assert t.shape == x.shape and t.dtype == x.dtype and t.quantizer is made and t.fp8_dtype == "kFloat8E4M3"
    assert t.is_2D_scaled == (granularity == "128x128")
    assert torch.equal(t.rowwise_data, q.data.view(torch.uint8))
    assert torch.equal(t.columnwise_data, q.data_t.view(torch.uint8))
    inner = q.scale.shape[-1]
    assert torch.equal(t.rowwise_scale_inv[:, :inner], q.scale) and t.rowwise_scale_inv.shape[1] % 4 == 0
    other = made.copy()
    other.rowwise_usage, other.internal = False, True
    stored = other.quantize_impl(x)
    assert stored.stored and stored.rowwise_data is None and stored.quantizer is other
    assert made.quantize_impl(x).rowwise_data is not None
    with pytest.raises(ValueError, match="amax_epsilon"):
        made.amax_epsilon = 1e-6
        made.quantize_impl(x)


def test_their_tensors_share_our_memory(engine):
    q = tw.quantize(torch.randn(128, 256), tw.fp8("1x128", ways="both"))
    t = fp8.to_transformer_engine(q, fp8.quantizer("linear_input"))
    assert t.rowwise_data.data_ptr() == q.data.data_ptr() and t.columnwise_data.data_ptr() == q.data_t.data_ptr()
    assert t.rowwise_scale_inv.data_ptr() == q.scale.data_ptr()
    assert t.columnwise_scale_inv.data_ptr() == q.scale_t.data_ptr()
