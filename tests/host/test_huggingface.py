"""Models of transformers, tiny and with random weights, before and after `patch`: the same numbers, and the way back."""

from __future__ import annotations

import ast
import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import transformers

from tilewright.integrations import huggingface
from tilewright.integrations.huggingface import patch, unpatch
from tilewright.integrations.roles import Fp8Linear, experts_forward

FP32 = 5e-6  # of the largest value: a few sums in another order
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 96, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2, "head_dim": 8}
DENSE = {"norm": 5, "mlp": 2, "rotary": 2, "loss": 1}
# Config, what it has beside SIZES, and how many modules of each role are replaced.
FAMILIES = {
    "Llama": ("LlamaConfig", {"mlp_bias": True}, DENSE),
    "Mistral": ("MistralConfig", {}, DENSE),
    "Qwen2": ("Qwen2Config", {"tie_word_embeddings": True}, DENSE),
    "Qwen3": ("Qwen3Config", {"head_dim": 8}, {**DENSE, "norm": 9}),
    "Qwen3Moe": (
        "Qwen3MoeConfig", {**ROUTED, "num_experts": 4, "output_router_logits": True},
        {"norm": 9, "rotary": 2, "router": 2, "experts": 2, "loss": 1},
    ),
    "Mixtral": (
        "MixtralConfig", {"num_local_experts": 4}, {"norm": 5, "rotary": 2, "router": 2, "experts": 2, "loss": 1}
    ),
    "Gemma2": ("Gemma2Config", {"head_dim": 8, "final_logit_softcapping": 3.0}, {**DENSE, "norm": 9}),
    "Gemma3": ("Gemma3TextConfig", {"head_dim": 8}, {**DENSE, "norm": 13}),
    "Phi3": ("Phi3Config", {}, DENSE),
    "DeepseekV3": (
        "DeepseekV3Config",
        {
            **ROUTED, "num_key_value_heads": 4, "n_routed_experts": 4, "n_group": 2, "topk_group": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "first_k_dense_replace": 1,
            "n_shared_experts": 1,
        },
        {"norm": 9, "mlp": 2, "router": 1, "experts": 1, "loss": 1},
    ),
    "Glm": ("GlmConfig", {"head_dim": 8, "partial_rotary_factor": 0.5}, DENSE),
    "Glm4Moe": ("Glm4MoeConfig", {**ROUTED, "n_routed_experts": 4}, {**DENSE, "router": 1, "experts": 1}),
    "GptOss": (
        "GptOssConfig", {"head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
        {"norm": 5, "rotary": 2, "router": 2, "loss": 1},
    ),
}  # fmt: skip
OPS = {
    "norm": "rms_norm", "mlp": "glu", "rotary": "rope", "router": "topk_routing", "experts": "moe_feed_forward",
    "loss": "linear_cross_entropy",
}  # fmt: skip
IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(9) < 3, -100)


def build(family: str, dtype: torch.dtype = torch.float32, **more: object) -> nn.Module:
    """Weights that are neither 0 nor 1, so that nothing is the same by chance."""
    config, given, _ = FAMILIES[family]
    torch.manual_seed(0)
    made = getattr(transformers, config)(**{**SIZES, **given, **more})
    model = getattr(transformers, f"{family}ForCausalLM")(made)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
    return model.to(dtype).train()


def step(model: nn.Module, **named: object) -> tuple[SimpleNamespace, dict[str, torch.Tensor]]:
    model.zero_grad()
    out = model(input_ids=IDS, labels=LABELS, **named)
    out.loss.backward()
    return out, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def error(found: dict[str, torch.Tensor], truth: dict[str, torch.Tensor]) -> float:
    """The largest difference, each tensor measured by its own largest value."""
    assert found.keys() == truth.keys()
    return max(((found[n] - truth[n]).abs().max() / truth[n].abs().max().clamp(min=1e-12)).item() for n in truth)


def train(model: nn.Module, steps: int) -> list[float]:
    optimiser, losses = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), []
    for _ in range(steps):
        optimiser.zero_grad()
        loss = model(input_ids=IDS, labels=LABELS).loss
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_computes_the_same(family):
    model = build(family)
    state = {name: (t.dtype, t.shape) for name, t in model.state_dict().items()}
    before, grads = step(model)
    logits = model.eval()(IDS).logits
    report = patch(model.train())
    assert {name: (t.dtype, t.shape) for name, t in model.state_dict().items()} == state
    found = {role: [r.op for r in report.replaced if r.role == role] for role in OPS}
    assert {role: len(ops) for role, ops in found.items() if ops} == FAMILIES[family][2]
    assert all({*ops} <= {OPS[role]} for role, ops in found.items())
    after, again = step(model)
    torch.testing.assert_close(after.loss, before.loss, rtol=FP32, atol=0)
    assert after.logits is None and error(again, grads) < FP32
    calls = report.calls()
    assert all(calls[OPS[role]] >= count for role, count in FAMILIES[family][2].items()), calls
    assert error({"logits": model.eval()(IDS).logits}, {"logits": logits}) < FP32
    unpatch(model.train())
    restored, last = step(model)
    assert torch.equal(restored.loss, before.loss) and all(torch.equal(last[n], grads[n]) for n in grads)
    assert restored.logits is not None and not [m for m in model.modules() if "forward" in m.__dict__]


@pytest.mark.parametrize(
    ("family", "steps"), [("Llama", 20), ("Gemma2", 5), ("Qwen3Moe", 5), ("Glm4Moe", 5), ("Phi3", 5)]
)
def test_training_goes_the_same_way(family, steps):
    plain, patched = build(family), build(family)
    report = patch(patched)
    expected, found = train(plain, steps), train(patched, steps)
    assert found == pytest.approx(expected, rel=2e-5) and expected[-1] < expected[0]
    assert report.calls()["linear_cross_entropy"] == steps


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_bf16_is_no_farther_from_the_truth(family):
    _, truth = step(build(family, torch.bfloat16).float())
    model = build(family, torch.bfloat16)
    _, plain = step(model)
    patch(model)
    _, ours = step(model)
    assert error(ours, truth) < 1.2 * error(plain, truth)


def test_gradient_checkpointing_adapters_and_copies():
    class Adapter(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base, self.bias = base, None
            self.down, self.up = nn.Linear(base.in_features, 2), nn.Linear(2, base.out_features)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.up(self.down(x))

    model = build("Llama")
    mlp = model.model.layers[0].mlp
    mlp.gate_proj = Adapter(mlp.gate_proj)
    before, grads = step(model)
    report = patch(model)
    model.gradient_checkpointing_enable()
    after, again = step(model)
    assert error(again, grads) < FP32 and torch.allclose(after.loss, before.loss, rtol=FP32)
    assert report.calls()["rms_norm"] == 4 * 2 + 1  # all but the last run again in the backward
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert error(step(other)[1], grads) < FP32  # a copy stands on its own
    unpatch(other)
    assert error(step(other)[1], grads) == 0
    assert model.lm_head.__dict__["forward"].__self__ is model.lm_head


@pytest.mark.parametrize("family", ["Llama", "Qwen3"])  # the second norms heads, whose gradients come strided
def test_compiled_whole(family):
    model = build(family)
    before, grads = step(model)
    report = patch(model)
    torch._dynamo.reset()
    graphs = []

    def backend(graph: torch.fx.GraphModule, given: list) -> object:
        graphs.append({str(node.target) for node in graph.graph.nodes})
        return torch._dynamo.lookup_backend("aot_eager")(graph, given)

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    model.zero_grad()
    out = compiled(input_ids=IDS, labels=LABELS, use_cache=False)
    out.loss.backward()
    assert torch.allclose(out.loss, before.loss, rtol=FP32)
    assert error({n: p.grad for n, p in model.named_parameters()}, grads) < FP32
    (nodes,) = graphs
    assert {f"tilewright.{op}.default" for op in ("rms_norm", "glu", "rope", "linear_cross_entropy")} <= nodes
    assert not report.calls()


def test_the_loss_heeds_its_options():
    model = build("Gemma2")
    items = torch.tensor(31)
    before, grads = step(model, num_items_in_batch=items)
    parts = model(input_ids=IDS, labels=LABELS, return_dict=False)
    moved = torch.roll(LABELS, 1, 1)
    shifted = model(input_ids=IDS, labels=LABELS, shift_labels=moved).loss
    with patch(model) as report:
        after, again = step(model, num_items_in_batch=items)
        assert torch.allclose(after.loss, before.loss, rtol=FP32) and error(again, grads) < FP32
        again = model(input_ids=IDS, labels=LABELS, return_dict=False)
        assert isinstance(again, tuple) and len(again) == len(parts) - 1
        assert torch.allclose(model(IDS, None, None, None, None, LABELS).loss, parts[0], rtol=FP32)
        assert torch.allclose(model(input_ids=IDS, labels=LABELS, shift_labels=moved).loss, shifted, rtol=FP32)
        count = report.calls()["linear_cross_entropy"]
        asked = model(input_ids=IDS, labels=LABELS, return_logits=True)
        assert asked.logits.shape == (2, 9, 96) and torch.allclose(asked.loss, parts[0], rtol=FP32)
        assert model.eval()(input_ids=IDS, labels=LABELS).logits is not None
        assert report.calls()["linear_cross_entropy"] == count
        assert model.generate(IDS[:, :4], max_new_tokens=2, do_sample=False).shape == (2, 6)
    report = patch(model.train(), loss="cross_entropy", only=["loss"])
    after, again = step(model, num_items_in_batch=31)
    assert (
        after.logits is not None and torch.allclose(after.loss, before.loss, rtol=FP32) and error(again, grads) < FP32
    )
    assert report.calls() == {"cross_entropy": 1}


def test_only_one_instance_changes():
    model = build("Mixtral")
    other = type(model)(model.config)
    other.load_state_dict(model.state_dict())
    _, grads = step(other.train())
    report = patch(model)
    assert all(torch.equal(g, grads[n]) for n, g in step(other)[1].items()) and not report.calls()
    assert not [m for m in other.modules() if "forward" in m.__dict__] and other.config is model.config
    unpatch(model)
    report = patch(model, experts=False, loss=None, only=["norm", "router", "experts", "loss"])
    assert {r.role for r in report.replaced} == {"norm"}


def test_linear_layers_in_fp8():
    sizes = {"hidden_size": 1024, "intermediate_size": 1024, "num_hidden_layers": 1, "num_attention_heads": 8}
    model = build("Qwen2", **sizes)
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.3)
    before, grads = step(model)
    names = [*model.state_dict()]
    report = patch(model, fp8=True)
    replaced = {r.module.rpartition(".")[2] for r in report.replaced if r.role == "linear"}
    assert replaced == {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    skipped = {s.module.rpartition(".")[2] for s in report.skipped if s.role == "linear"}
    assert skipped == {"k_proj", "v_proj", "lm_head"}
    after, again = step(model)
    assert report.calls()["linear_fp8"] == 5 and [*model.state_dict()] == names
    assert torch.allclose(after.loss, before.loss, rtol=0.02) and not torch.equal(after.loss, before.loss)
    assert error(again, grads) < 0.5
    assert isinstance(model.model.layers[0].mlp.gate_proj, Fp8Linear)
    unpatch(model)
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear
    assert all(torch.equal(g, grads[n]) for n, g in step(model)[1].items())


def test_experts_by_name():
    patched, model = build("Mixtral"), build("Mixtral")
    patch(patched)
    before, grads = step(model)
    model.set_experts_implementation("tilewright")
    after, again = step(model)
    assert torch.allclose(after.loss, before.loss, rtol=FP32) and 0 < error(again, grads) < FP32
    experts = model.model.layers[0].mlp.experts
    x, probs = torch.randn(3, 32), torch.rand(3, 2)
    away = torch.tensor([[0, 4], [4, 4], [1, 2]])  # 4 is an expert of another rank
    here = torch.where(away < 4, probs, 0.0)
    expected = experts_forward(experts, x, away.clamp(max=3), here)
    torch.testing.assert_close(experts_forward(experts, x, away, probs), expected)
    with pytest.raises(ValueError, match="has_bias=True"):
        experts_forward(build("GptOss").model.layers[0].mlp.experts, x, away, probs)


class WrongRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def test_errors_say_what_is_wrong():
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with pytest.raises(ValueError, match=f"nothing was replaced(.|\n)*transformers {transformers.__version__}"):
        patch(plain)
    assert not patch(plain, strict=False).replaced
    unpatch(plain)
    model = build("Llama")
    model.model.norm = WrongRMSNorm()
    with pytest.raises(ValueError, match="model.norm: not rms_norm: results differ(.|\n)*strict=False"):
        patch(model)
    assert not [m for m in model.modules() if "forward" in m.__dict__]
    report = patch(model, strict=False)
    assert [(s.role, s.module) for s in report.skipped] == [("norm", "model.norm")] and len(report.replaced) == 9
    assert "norm: 1 skipped: not rms_norm" in str(report) and "rotary: 2 by rope" in str(report)
    with pytest.raises(ValueError, match="patched already"):
        patch(model)
    ours = model.forward
    model.forward = lambda *given, **named: ours(*given, **named)
    with pytest.raises(ValueError, match="forward of a LlamaForCausalLM was replaced after the patch"):
        unpatch(model)
    model.__dict__["forward"] = report.changes[-2].value
    unpatch(model)
    with pytest.raises(ValueError, match="is not patched"):
        unpatch(model)
    with pytest.raises(ValueError, match="loss must be one of"):
        patch(model, loss="mse")
    with pytest.raises(ValueError, match="only must name roles"):
        patch(model, only=["norms"])


def test_transformers_is_imported_by_a_patch_alone():
    for path in Path(huggingface.__file__).parent.glob("*.py"):
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in getattr(node, "names", [])] + [getattr(node, "module", None) or ""]
            assert not [n for n in names if n.startswith("transformers")], path
