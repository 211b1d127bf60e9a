"""Models of transformers, tiny and with random weights, before and after `patch`: the same numbers, and the way back."""

from __future__ import annotations

import ast
import contextlib
import copy
import importlib.util
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import transformers

from tests.transformer_models import FAMILIES, FP32, IDS, LABELS, OLD, build, error, roles_of, step, train
from tilewright.integrations.huggingface import linear
from tilewright.integrations.huggingface import patching as huggingface
from tilewright.integrations.huggingface.experts import experts_forward
from tilewright.integrations.huggingface.linear import Fp8Linear
from tilewright.integrations.huggingface.patching import patch, unpatch
from tilewright.integrations.huggingface.report import changed
from tilewright.integrations.huggingface.rotary import ROTATIONS, rotating
from tilewright.nn.expert_codes import KeepsCodes

STEPS = 20
WIDE = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}  # whole blocks of FP8


@pytest.mark.parametrize("family", FAMILIES)
def test_a_patched_model_computes_the_same(family):
    model = build(family)
    state = {name: (t.dtype, t.shape) for name, t in model.state_dict().items()}
    before, grads = step(model)
    logits = model.eval()(IDS).logits
    report = patch(model.train())
    assert {name: (t.dtype, t.shape) for name, t in model.state_dict().items()} == state
    expected = {(role, op): count for role, (op, count) in roles_of(family).items()}
    assert Counter((r.role, r.op) for r in report.replaced if not (OLD and r.role == "router")) == expected
    after, again = step(model)
    torch.testing.assert_close(after.loss, before.loss, rtol=FP32, atol=0)
    assert after.logits is None and error(again, grads) < FP32
    calls, within = report.calls(), roles_of(family).get("decoder", ("", 0))[1]
    for (role, op), count in expected.items():
        assert calls[op] >= count - (within if role == "norm" else 0), calls  # the second norms of layers add residuals
    assert error({"logits": model.eval()(IDS).logits}, {"logits": logits}) < FP32
    unpatch(model.train())
    restored, last = step(model)
    assert torch.equal(restored.loss, before.loss) and all(torch.equal(last[n], grads[n]) for n in grads)
    assert restored.logits is not None and not [m for m in model.modules() if changed(m)]


@pytest.mark.parametrize("family", FAMILIES)
def test_training_goes_the_same_way(family):
    plain, patched = build(family), build(family)
    report = patch(patched)
    expected, found = train(plain, STEPS), train(patched, STEPS)
    assert found == pytest.approx(expected, rel=2e-5) and expected[-1] < expected[0]
    assert report.calls()["linear_cross_entropy"] == STEPS


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_bf16_is_no_farther_from_the_truth(family):
    _, truth = step(build(family, torch.bfloat16).float())
    model = build(family, torch.bfloat16)
    _, plain = step(model)
    patch(model)
    _, ours = step(model)
    # Over all elements: of the largest errors either may be luck
    ours, plain = (sum(((g[n] - truth[n]).norm() / truth[n].norm()) ** 2 for n in truth) for g in (ours, plain))
    assert ours < 1.2 * plain


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
    # All but the last norm run again in the backward
    assert report.calls()["rms_norm"] == 2 * 2 + 1 and report.calls()["add_rms_norm"] == 2 * 2
    other = copy.deepcopy(model)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    assert error(step(other)[1], grads) < FP32  # a copy stands on its own
    unpatch(other)
    assert error(step(other)[1], grads) == 0
    assert model.lm_head.__dict__["forward"].__self__ is model.lm_head


@pytest.fixture(params=[False, True], ids=["plain", "fp8"])
def fp8(request, monkeypatch) -> bool:
    monkeypatch.setattr(linear, "LEAST", WIDE["hidden_size"])
    return request.param


def by_itself(model: nn.Module, fp8: bool) -> dict[str, torch.Tensor]:
    """Gradients by the model's own gated layers."""
    with patch(model, only="linear", fp8=True) if fp8 else contextlib.nullcontext():
        return step(model)[1]


def test_down_projections_that_are_more_than_a_product_are_called(fp8):
    model = build("Llama", **WIDE)
    down = model.model.layers[0].mlp.down_proj
    grads = by_itself(model, fp8)
    with patch(model, only=["mlp", "linear"], fp8=fp8) as report:
        product = type(down).forward
        handles = [
            lambda: down.register_forward_hook(lambda *_: None),
            lambda: down.register_full_backward_pre_hook(lambda *_: None),
            lambda: nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
        ]
        for made in handles:
            handle = made()
            assert error(step(model)[1], grads) < FP32
            handle.remove()
        down.forward = lambda x: product(down, x)
        assert error(step(model)[1], grads) < FP32
        del down.forward
        assert report.calls()["glu"] == 3 and not {"glu_linear", "glu_linear_fp8"} & {*report.calls()}
        assert error(step(model)[1], grads) < FP32
        assert report.calls()["glu"] == 3 and report.calls()["glu_linear_fp8" if fp8 else "glu_linear"] == 1


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_gated_layers_under_autocast(fp8):
    model = build("Llama", **WIDE)
    truth = step(model)[1]
    with torch.autocast("cpu", torch.bfloat16):
        plain = by_itself(model, fp8)
        report = patch(model, only=["mlp", "linear"], fp8=fp8)
        ours = step(model)[1]
    assert report.calls()["glu_linear_fp8" if fp8 else "glu_linear"] == 1 and "glu" not in report.calls()
    assert 0 < error(ours, truth) < 1.2 * error(plain, truth)


@pytest.mark.parametrize("rotation", ROTATIONS, ids=str)
def test_rotated_heads_lie_as_they_did(rotation):
    """Else the result of attention, which lies as its queries do, would be copied and kept for the next layer."""
    q, k = (torch.randn(2, 5, heads, 16, requires_grad=True) for heads in (4, 2))
    angles = torch.cat([torch.randn(2, 5, 8)] * rotation.times, -1)
    function = transformers.models.llama.modeling_llama.apply_rotary_pos_emb
    made = rotating(function, rotation, lambda op: None)(
        q.transpose(1, 2), k.transpose(1, 2), angles.cos(), angles.sin()
    )
    grads = torch.autograd.grad(sum(t.square().sum() for t in made), (q, k))
    assert all(t.transpose(1, 2).is_contiguous() for t in made) and all(t.is_contiguous() for t in grads)


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
    assert {f"tilewright.{op}.default" for op in ("rms_norm", "glu_linear", "rope", "linear_cross_entropy")} <= nodes
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
        assert isinstance(again, tuple) and len(again) == len(parts) and again[1] is None
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
    assert not [m for m in other.modules() if changed(m)] and other.config is model.config
    unpatch(model)
    report = patch(model, experts=False, loss=None, only=["norm", "router", "experts", "loss"])
    assert {r.role for r in report.replaced} == {"norm"}


def coded(model: nn.Module) -> list[str]:
    """The weights of which codes are kept."""
    return [n for m in model.modules() if isinstance(m, KeepsCodes) for n in m.codes.made]


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
    assert report.calls()["linear_fp8"] == 4 and [*model.state_dict()] == names
    assert report.calls()["glu_linear_fp8"] == 1
    assert {r.op for r in report.replaced if r.role == "mlp"} == {"glu_linear_fp8"}
    assert torch.allclose(after.loss, before.loss, rtol=0.02) and not torch.equal(after.loss, before.loss)
    assert error(again, grads) < 0.5
    assert isinstance(model.model.layers[0].mlp.gate_proj, Fp8Linear)
    assert not coded(model)
    model.requires_grad_(False).zero_grad()
    model(IDS)
    assert not coded(model) and report.calls()["glu_linear_fp8"] == 2
    unpatch(model.requires_grad_(True))
    assert type(model.model.layers[0].mlp.gate_proj) is nn.Linear
    assert all(torch.equal(g, grads[n]) for n, g in step(model)[1].items())


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_experts_by_name(family):
    patched, model = build(family), build(family)
    patch(patched)
    before, grads = step(model)
    if not OLD:
        model.set_experts_implementation("tilewright")
        after, again = step(model)
        assert torch.allclose(after.loss, before.loss, rtol=FP32) and 0 < error(again, grads) < FP32
    experts = model.model.layers[0].mlp.experts
    x, probs = torch.randn(3, 32), torch.rand(3, 2)
    away = torch.tensor([[0, 4], [4, 4], [1, 2]])  # 4 is an expert of another rank
    here = torch.where(away < 4, probs, 0.0)
    expected = experts_forward(experts, x, away.clamp(max=3), here)
    torch.testing.assert_close(experts_forward(experts, x, away, probs), expected)
    experts.has_gate = False
    with pytest.raises(ValueError, match="no op for experts with has_gate=False"):
        experts_forward(experts, x, away, probs)


def test_experts_in_fp8():
    """What their codes change shows on a GPU alone; here, that they are the weights' and follow them."""
    model = build("Qwen3Moe", hidden_size=1024, moe_intermediate_size=768, num_hidden_layers=1, num_experts=2)
    before, grads = step(model)
    report = patch(model, fp8=True, only=["experts"])
    experts = model.model.layers[0].mlp.experts
    after, again = step(model)
    assert report.calls() == {"moe_feed_forward(fp8)": 1}
    # So wide, the router's gradient is a sum that cancels: transformers' own is 9e-6 off float64's
    assert torch.allclose(after.loss, before.loss, rtol=FP32) and error(again, grads) < 2e-5
    assert not experts.codes.made  # of weights that learn
    model.requires_grad_(False).zero_grad()
    model(input_ids=torch.tensor([[1, 2, 3]]))
    assert not experts.codes.made  # nor of others, unless it is asked for
    experts.codes.until_cleared = True
    for _ in range(2):
        with torch.no_grad():
            model(input_ids=torch.tensor([[1, 2, 3]]))
        assert {*experts.codes.made} == {"gate_up_proj", "down_proj"}
        for name in experts.codes.made:
            weight, kept = getattr(experts, name).detach(), experts.codes.of(name, getattr(experts, name))
            assert (kept.dequantize().view(weight.shape) - weight).abs().max() < weight.abs().max() / 16
        experts.down_proj.mul_(-1.0)
    unpatch(model)
    assert type(experts).__name__ == "Qwen3MoeExperts" and "codes" not in experts.__dict__
    report = patch(build("GptOss"), fp8=True, only=["experts"])
    assert {r.op for r in report.replaced} == {"grouped_mm"} and "usual gate" in report.skipped[0].reason
    report = patch(build("Mixtral"), fp8=True, only=["experts"])
    assert {r.op for r in report.replaced} == {"moe_feed_forward"} and "not in FP8: hidden" in report.skipped[0].reason


@pytest.mark.parametrize("frozen", [False, True])
def test_weights_written_past_their_version_are_those_multiplied(frozen, monkeypatch):
    """Adapters merge through `.data`, averages are taken so, and fused optimisers count no version."""
    monkeypatch.setattr(linear, "LEAST", WIDE["hidden_size"])
    model = build("Llama", **WIDE).requires_grad_(not frozen).eval()
    patch(model, fp8=True, loss=None)
    linears = [m for m in model.modules() if isinstance(m, Fp8Linear)]
    with torch.no_grad():
        first = model(IDS).logits
        for m in linears:
            m.weight.data.mul_(0.5)
        fresh = model(IDS).logits
        assert torch.equal(fresh, copy.deepcopy(model)(IDS).logits) and not torch.equal(fresh, first)
        # Kept where it is asked for, until whoever writes says so
        for m in linears:
            m.codes.until_cleared = True
        assert torch.equal(model(IDS).logits, fresh) and len(coded(model)) == len(linears)
        for m in linears:
            m.weight.data.mul_(0.5)
        assert torch.equal(model(IDS).logits, fresh)
        for m in linears:
            m.codes.clear()
        assert not torch.equal(model(IDS).logits, fresh)
        assert torch.equal(model(IDS).logits, copy.deepcopy(model)(IDS).logits)


def test_tables_whose_halves_are_of_different_axes():
    """HunYuan-VL's columns take angles from more axes than pairs can; Qwen2-VL's pairs take each its own."""
    name = "transformers.models.hunyuan_vl"
    if importlib.util.find_spec(name) is None:
        pytest.skip("this transformers has no HunYuan-VL")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 96}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    rope = {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [2, 2, 2, 2]}
    made = importlib.import_module(f"{name}.modeling_hunyuan_vl")
    torch.manual_seed(0)
    config = made.HunYuanVLTextModel.config_class(**sizes, rope_parameters=rope)
    model = made.HunYuanVLTextModel(config).eval()
    positions = torch.randint(30, (4, *IDS.shape))
    with torch.no_grad():
        expected = model(IDS, position_ids=positions).last_hidden_state
        report = patch(model)
        found = model(IDS, position_ids=positions).last_hidden_state
    assert error({"hidden": found}, {"hidden": expected}) < FP32
    reasons = [s.reason for s in report.skipped if s.role == "rotary"]
    assert len(reasons) == 2 and "rotates otherwise by tables of HunYuanVLRotaryEmbedding" in reasons[0]


class WrongRMSNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x / (x.abs().mean(-1, keepdim=True) + self.eps)


def test_errors_say_what_is_wrong(monkeypatch):
    plain = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    with pytest.raises(ValueError, match=f"nothing was replaced(.|\n)*transformers {transformers.__version__}"):
        patch(plain)
    assert not patch(plain, strict=False).replaced
    unpatch(plain)
    model = build("Llama")
    model.model.norm = WrongRMSNorm()
    with pytest.raises(ValueError, match="model.norm: not rms_norm: results differ(.|\n)*strict=False"):
        patch(model)
    assert not [m for m in model.modules() if changed(m)]
    report = patch(model, strict=False)
    assert [(s.role, s.module) for s in report.skipped] == [("norm", "model.norm")] and len(report.replaced) == 11
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
    monkeypatch.setattr(huggingface, "version", lambda name: "4.57.6")
    with pytest.raises(ValueError, match="transformers must be 5.0 at least, is 4.57.6"):
        patch(model)
    monkeypatch.undo()
    with pytest.raises(ValueError, match="loss must be one of"):
        patch(model, loss="mse")
    with pytest.raises(ValueError, match="only must name roles"):
        patch(model, only=["norms"])


def test_transformers_is_imported_by_a_patch_alone():
    for path in Path(huggingface.__file__).parent.glob("*.py"):
        if path.name == "trainer.py":  # which is imported by name
            continue
        for node in ast.parse(path.read_text()).body:
            names = [a.name for a in getattr(node, "names", [])] + [getattr(node, "module", None) or ""]
            assert not [n for n in names if n.startswith("transformers")], path
