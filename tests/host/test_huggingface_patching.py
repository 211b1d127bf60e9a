"""What `patch` leaves behind: after errors, under dropout, in replicas, in files and under accelerate's hooks."""

from __future__ import annotations

import copy
import importlib
import io

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import transformers

from tests.transformer_models import FP32, IDS, LABELS, SIZES, build, error, step
from tilewright.integrations.huggingface import linear, patching
from tilewright.integrations.huggingface.patching import patch, unpatch
from tilewright.integrations.huggingface.roles import Found


def dicts(model: nn.Module) -> list[tuple[type, dict]]:
    """Everything that a patch could change."""
    return [(type(m), dict(m.__dict__)) for m in model.modules()]


# ---- errors -----------------------------------------------------------------------------------------------------------------


class Norm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(32)), 1e-6

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight


class Raising(Norm):
    @property
    def variance_epsilon(self) -> float:
        raise IndexError("no such\nlayer")


def failing(found: Found) -> Found:
    """The first of its changes can be made, the second not."""

    def changes(count):
        first, *_ = found.changes(count)
        return [first, (first[0], "__class__", int)]

    return Found(found.op, changes)


@pytest.mark.parametrize("stage", ["finding", "changing", "interrupted"])
def test_whatever_raises_leaves_the_model_as_it_was(stage, monkeypatch):
    model = build("Llama")
    model.model.norm = Raising() if stage == "finding" else Norm()
    expected, before = dicts(model), step(model)[0].loss
    own = patching.norm

    def norm(name, module):
        found = own(name, module)
        if type(module) is not Norm:
            return found
        if stage == "interrupted":
            raise KeyboardInterrupt
        return failing(found)

    monkeypatch.setattr(patching, "norm", norm)
    words = {"finding": "IndexError: no such layer", "changing": "TypeError: __class__ assignment"}.get(stage)
    for strict in (True, False) if words is None else (True,):
        error, match = (KeyboardInterrupt, None) if words is None else (ValueError, f"norm model.norm: {words}")
        with pytest.raises(error, match=match):
            patch(model, strict=strict)
        assert dicts(model) == expected
        with pytest.raises(ValueError, match="is not patched"):
            unpatch(model)
    if words is not None:
        report = patch(model, strict=False)
        assert [s.module for s in report.skipped] == ["model.norm"] and report.skipped[0].reason.startswith(words)
        assert "forward" not in model.model.norm.__dict__ and len(report.replaced) == 11
        unpatch(model)
        assert dicts(model) == expected
    torch.testing.assert_close(step(model)[0].loss, before, rtol=0, atol=0)


@pytest.mark.parametrize("role", ["norm", "decoder", "rotary", "gated", "loss"])
def test_a_role_that_raises_is_skipped(role, monkeypatch):
    """In its probe, at a model that is patched half by then."""
    model = build("Llama")
    expected = dicts(model)

    def raises(*given, **named):
        raise RuntimeError("probe")

    file = "causal_loss" if role == "loss" else role
    module = importlib.import_module(f"tilewright.integrations.huggingface.{file}")
    monkeypatch.setattr(module, "compared" if role in ("loss", "rotary") else "compared_in_modes", raises)
    with pytest.raises(ValueError, match="RuntimeError: probe") as caught:
        patch(model)
    assert dicts(model) == expected and isinstance(caught.value.__cause__, RuntimeError)
    report = patch(model, strict=False)
    assert {s.reason for s in report.skipped} == {"RuntimeError: probe"} and report.replaced
    unpatch(model)
    assert dicts(model) == expected


ODD = {  # whose losses, or their configs, once made `patch` raise what it should not
    "Gemma3n": (
        "Gemma3nTextConfig",
        {
            **SIZES, "head_dim": 8, "vocab_size_per_layer_input": 96, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
            "num_kv_shared_layers": 0, "activation_sparsity_pattern": [0.95, 0.0], "layer_types": ["full_attention"] * 2,
        },
    ),
    "HYV4": ("HYV4Config", SIZES),
    "CpmAnt": (
        "CpmAntConfig",
        {
            "vocab_size": 96, "hidden_size": 32, "num_attention_heads": 4, "dim_head": 8, "dim_ff": 48, "num_hidden_layers": 2,
            "prompt_length": 2, "prompt_types": 2, "segment_types": 2,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", ODD)
def test_a_model_with_an_odd_loss_stays_whole(family):
    config, given = ODD[family]
    if not hasattr(transformers, config):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    model = getattr(transformers, f"{family}ForCausalLM")(getattr(transformers, config)(**given))
    expected = dicts(model)
    try:
        patch(model)
    except ValueError as error:
        assert "strict=False leaves such modules as they are" in str(error)
    else:
        unpatch(model)
    assert dicts(model) == expected
    assert patch(model, strict=False).replaced
    unpatch(model)
    assert dicts(model) == expected


# ---- modes ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("rate", [0.1, 1e-4])
def test_layers_that_drop_values_in_training_stay(training, rate):
    """Patched in either mode, and however few they drop."""
    config = transformers.SeedOssConfig(**SIZES, head_dim=8, residual_dropout=rate)
    model = transformers.SeedOssForCausalLM(config).train(training)
    torch.manual_seed(5)
    report, drawn = patch(model), torch.rand(1)
    torch.manual_seed(5)
    assert torch.equal(drawn, torch.rand(1))  # a probe draws nothing
    assert {(s.role, s.reason.partition(":")[0]) for s in report.skipped} == {("mlp", "not down(glu(gate, up))")}
    assert all("in training its code does more" in s.reason for s in report.skipped) and len(report.skipped) == 2
    assert "mlp" not in {r.role for r in report.replaced}
    unpatch(model)
    model.config.residual_dropout = 0.0
    assert not patch(transformers.SeedOssForCausalLM(model.config)).skipped


class Noisy(Norm):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + self.training


class DroppingLayer(transformers.models.llama.modeling_llama.LlamaDecoderLayer):
    def forward(self, hidden_states: torch.Tensor, **named: object) -> torch.Tensor:
        return nn.functional.dropout(super().forward(hidden_states, **named), 0.5, self.training)


def test_norms_layers_routers_and_experts_are_probed_in_both_modes(monkeypatch):
    model = build("Qwen3Moe").eval()
    model.model.norm = Noisy()
    block = model.model.layers[0].mlp
    route, feed = type(block.gate).forward, type(block.experts).forward
    monkeypatch.setattr(type(block.gate), "forward", lambda self, x: route(self, x + self.training))
    monkeypatch.setattr(type(block.experts), "forward", lambda self, x, i, w: feed(self, x + self.training, i, w))
    report = patch(model, only=["norm", "router", "experts"])
    assert {(s.role, "in training" in s.reason) for s in report.skipped} == {
        ("norm", True), ("router", True), ("experts", True)
    }  # fmt: skip
    assert {r.role for r in report.replaced} == {"norm"}
    model = build("Llama")
    model.model.layers[1].__class__ = DroppingLayer
    report = patch(model.eval(), only=["decoder"])
    assert [s.module for s in report.skipped] == ["model.layers.1"] and "in training" in report.skipped[0].reason


# ---- experts that a token has twice -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Mixtral", "GptOss"])
def test_repeated_experts_are_added(family):
    model = build(family)
    experts = model.model.layers[0].mlp.experts
    x, weights = torch.randn(5, 32, requires_grad=True), torch.rand(5, 3, requires_grad=True)
    chosen, dy = torch.tensor([[1, 1, 2], [0, 0, 0], [3, 1, 3], [2, 1, 0], [3, 3, 1]]), torch.randn(5, 32)

    def results() -> tuple[torch.Tensor, ...]:
        y = experts(x, chosen, weights)
        return y, *torch.autograd.grad(y, (x, weights, *experts.parameters()), dy)

    model.set_experts_implementation("eager")
    expected = dict(enumerate(results()))
    patch(model)
    assert error(dict(enumerate(results())), expected) < FP32


def test_tables_of_experts_may_repeat_one():
    """DeepSeek-V4 routes the tokens of its first layers by a table, which is all zeros until it is loaded."""
    if not hasattr(transformers, "DeepseekV4Config"):
        pytest.skip(f"transformers {transformers.__version__} has no DeepSeek-V4")
    torch.manual_seed(0)
    given = {**SIZES, "head_dim": 16, "moe_intermediate_size": 24, "num_experts_per_tok": 2, "n_routed_experts": 4}
    model = transformers.DeepseekV4ForCausalLM(transformers.DeepseekV4Config(**given)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p), alpha=0.1)
        tables = [m.tid2eid for m in model.modules() if hasattr(m, "tid2eid")]
        for table in tables:
            table.random_(4)
        assert tables and (tables[0][IDS, 0] == tables[0][IDS, 1]).any()
        expected = model(IDS).logits
        report = patch(model, strict=False)
        assert {r.op for r in report.replaced if r.role == "experts"} == {"grouped_mm"}
        assert error({"logits": model(IDS).logits}, {"logits": expected}) < FP32


# ---- replicas and files -----------------------------------------------------------------------------------------------------


def replicas(model: nn.Module, monkeypatch) -> list[nn.Module]:
    """Two, as `torch.nn.DataParallel` makes them, but on the CPU."""
    module = importlib.import_module("torch.nn.parallel.replicate")
    monkeypatch.setattr(module, "_get_device_index", lambda device, _: device)
    monkeypatch.setattr(
        module, "_broadcast_coalesced_reshape", lambda given, devices, detach=False: [[t.clone() for t in given]] * 2
    )
    return module.replicate(model, ["cpu", "cpu"])


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "GptOss"])
def test_replicas_have_weights_of_their_own(family, monkeypatch):
    model = build(family)
    before, grads = step(model)
    report = patch(model)
    model.zero_grad()
    first, second = replicas(model, monkeypatch)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    out = first(input_ids=IDS, labels=LABELS)
    out.loss.backward()
    torch.testing.assert_close(out.loss, before.loss, rtol=FP32, atol=0)
    assert error({n: p.grad for n, p in model.named_parameters()}, grads) < FP32
    assert report.calls()["rms_norm"] and "linear_cross_entropy" not in report.calls()  # the loss is the model's own
    assert all(m.__dict__["forward"].__self__ is m for m in second.modules() if "forward" in m.__dict__)
    unpatch(model)
    assert first.model.norm.__dict__["forward"].__self__ is first.model.norm


def test_replicas_of_layers_in_fp8(monkeypatch):
    monkeypatch.setattr(linear, "LEAST", 128)
    model = build("Llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    patch(model, fp8=True, loss=None)
    expected = step(model)[1]
    model.zero_grad()
    first, _ = replicas(model, monkeypatch)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    first(input_ids=IDS, labels=LABELS).loss.backward()
    assert error({n: p.grad for n, p in model.named_parameters()}, expected) < FP32


def test_a_patched_model_is_not_pickled():
    model = build("Llama")
    patch(model)
    for part in (model, model.model, model.model.layers[0], model.model.norm, model.lm_head):
        with pytest.raises(
            TypeError, match=r"a patched model cannot be pickled: save its state_dict\(\), or unpatch it first"
        ):
            torch.save(part, io.BytesIO())
    torch.save(model.state_dict(), io.BytesIO())
    other = copy.deepcopy(model)
    assert torch.equal(step(other)[0].loss, step(model)[0].loss)
    for each in (other, model):
        unpatch(each)
        file = io.BytesIO()
        torch.save(each, file)
        assert file.tell() > sum(p.nbytes for p in each.parameters()) / 2  # tied weights are written once
    empty = nn.Linear(2, 2)
    patch(empty, strict=False)
    with pytest.raises(TypeError, match="cannot be pickled"):
        torch.save(empty, io.BytesIO())


# ---- accelerate's hooks -----------------------------------------------------------------------------------------------------

PLACES = {
    "model.embed_tokens": "cpu",
    "model.rotary_emb": "cpu",
    "model.layers.0": "cpu",
    "model.norm": "disk",
    "lm_head": "disk",
}


def offloaded(model: nn.Module, way: str, folder: str) -> nn.Module:
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
    if way == "cpu":
        return accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
    if way == "disk":
        return accelerate.disk_offload(model, folder, execution_device=torch.device("cpu"))
    return accelerate.dispatch_model(
        model, {**PLACES, "model.layers.1": "disk"}, main_device="cpu", offload_dir=folder, force_hooks=True
    )


# So small experts have no FP8 products
@pytest.mark.parametrize("family, fp8", [("Llama", False), ("Llama", True), ("Qwen3Moe", False)])
@pytest.mark.parametrize("way", ["cpu", "disk", "map"])
def test_offloaded_models_run_through_their_hooks(family, way, fp8, tmp_path, monkeypatch):
    """Patched before the hooks come, or after; unpatched below them, or without."""
    monkeypatch.setattr(linear, "LEAST", 128)
    sizes = {"hidden_size": 128, "intermediate_size": 128}
    hooks = pytest.importorskip("accelerate.hooks", reason="accelerate is not installed: pip install accelerate")
    given = {"input_ids": IDS, "labels": LABELS}
    model = build(family, **sizes)
    with torch.no_grad():
        expected = model(**given).loss
        report = patch(model, fp8=fp8)
        wanted, calls = model(**given).loss, report.calls()
    unpatch(model)
    roles = {(r.role, r.module, r.op) for r in report.replaced}
    bar = {"rtol": FP32, "atol": 0}
    torch.testing.assert_close(wanted, expected, rtol=0.05 if fp8 else FP32, atol=0)
    for order in ("patch, hooks", "hooks, patch"):
        for last in ("unpatch below", "unpatch after"):
            model = build(family, **sizes)
            if order == "patch, hooks":
                report = patch(model, fp8=fp8)
                offloaded(model, way, str(tmp_path / order / last))
            else:
                offloaded(model, way, str(tmp_path / order / last))
                report = patch(model, fp8=fp8)
            assert {(r.role, r.module, r.op) for r in report.replaced} == roles
            with torch.no_grad():
                torch.testing.assert_close(model(**given).loss, wanted, **bar)
                made = report.calls()
                assert (
                    made["linear_cross_entropy"] == 1
                    and made["rope"] == 2
                    and (made.get("linear_fp8") if fp8 else True)
                )
                assert made["rms_norm"] + made.get("add_rms_norm", 0) == calls["rms_norm"] + calls["add_rms_norm"]
                if last == "unpatch below":
                    unpatch(model)
                    assert torch.equal(model(**given).loss, expected)
                    hooks.remove_hook_from_submodules(model)
                else:
                    hooks.remove_hook_from_submodules(model)
                    torch.testing.assert_close(model(**given).loss, wanted, **bar)
                    unpatch(model)
                assert torch.equal(model(**given).loss, expected)
            assert "linear" not in report.calls() and {type(m) for m in model.modules()} == {
                type(m) for m in build(family).modules()
            }
            with pytest.raises(ValueError, match="is not patched"):
                unpatch(model)
