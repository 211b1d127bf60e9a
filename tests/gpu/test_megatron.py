"""Megatron-Core on one GPU: its own functions, layers and models in bf16 before and after `apply`, each held against the same in
fp32; that ours ran; experts in FP8; and the way back."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from tests import megatron_models as models
from tests.megatron_models import CALLS, ROUTER, Sizes, module, weighed
from tilewright.integrations import megatron
from tilewright.integrations.megatron.patches import APPLIED, bindings
from tilewright.nn import expert_codes, experts

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore")]

DEVICE = "cuda"
SIZES = {"device": DEVICE, "tokens": 257, "hidden": 768, "head_dim": 128, "vocab": 5003, "experts": 64}
PLAIN, TRUTH = (Sizes(**SIZES, dtype=dtype, values=torch.bfloat16) for dtype in (torch.bfloat16, torch.float32))
MODEL = {"hidden_size": 256, "ffn_hidden_size": 512, "vocab": 512, "length": 64}
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 128}
ROUNDED, SUMMED = 2**-8, 1e-5  # of the largest value: results in bf16, and in fp32


@pytest.fixture(scope="module", autouse=True)
def one_rank():
    with models.ranks(DEVICE):
        yield


def off(found: Tensor, truth: Tensor) -> float:
    """The largest error, relative to the largest value."""
    return float((found.double() - truth.double()).abs().max() / truth.double().abs().max().clamp(min=1e-30))


def spread(found: Tensor, truth: Tensor) -> float:
    """The root-mean-square error, relative to the values'."""
    return float((found.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-30))


def no_worse(ours: list[Tensor], theirs: list[Tensor], truth: list[Tensor]) -> None:
    """One rounding away from the truth, or about as far as Megatron's own code; what is no number, the same."""
    assert len(ours) == len(theirs) == len(truth) > 1
    for i, (a, b, exact) in enumerate(zip(ours, theirs, truth)):
        assert a.shape == b.shape and a.dtype == b.dtype and a.is_cuda == b.is_cuda, i
        if not a.dtype.is_floating_point:
            assert torch.equal(a, b), i
            continue
        bar = max(1.5 * off(b, exact), ROUNDED if a.dtype == torch.bfloat16 else SUMMED)
        assert off(a, exact) <= bar, (i, off(a, exact), bar)


def as_good(ours: dict[str, Tensor], theirs: dict[str, Tensor], truth: dict[str, Tensor]) -> None:
    """Of layers, whose roundings differ: about as far from the truth as Megatron's own code is."""
    assert ours.keys() == truth.keys() and len(ours) > 3
    for name, exact in truth.items():
        own, bar = spread(ours[name], exact), 2 * spread(theirs[name], exact) + 1e-3
        assert own <= bar, (name, own, bar)


@pytest.mark.parametrize("name", CALLS)
def test_functions(name):
    call = CALLS[name]
    theirs, truth = models.run(call, PLAIN), models.run(call, TRUTH)
    with megatron.apply() as report:
        ours = models.run(call, PLAIN)
        assert report.calls() == {call.op: 1} and not report.fallbacks()
    no_worse(ours, theirs, truth)


def test_rows_go_to_their_experts_and_back():
    theirs, truth = models.there_and_back(PLAIN), models.there_and_back(TRUTH)
    with megatron.apply() as report:
        ours = models.there_and_back(PLAIN)
        assert report.calls() == {"topk_routing": 1, "moe_permute": 1, "moe_unpermute": 2} and not report.fallbacks()
    no_worse(ours, theirs, truth)


def clipped() -> tuple[list[float], Tensor]:
    """Norms and the count of zeros of gradients, and these after clipping."""
    clip, made = module("clip"), []
    for seed, shape in enumerate(((300, 70), (1,), (4097,), (64, 64))):
        p = nn.Parameter(models.randn(*shape, seed=seed).to(DEVICE))
        p.grad, p.tensor_model_parallel = (models.randn(*shape, seed=seed + 9) * 3).round().to(DEVICE), True
        made.append(p)
    grads = [p.grad for p in made]
    found = [clip.get_grad_norm_fp32(grads, kind) for kind in (2, torch.inf)]
    found.append(clip.count_zeros_fp32(made, torch.distributed.group.WORLD))
    clip.clip_grad_by_total_norm_fp32(made, 1.0, found[0])
    return found, torch.cat([g.flatten() for g in grads])


def test_gradients_are_measured_clipped_and_counted():
    theirs, scaled = clipped()
    with megatron.apply() as report:
        ours, clipped_by_us = clipped()
    assert report.calls() == {"multi_tensor_norm": 2, "multi_tensor_count_zeros": 1, "multi_tensor_scale": 1}
    assert ours == pytest.approx(theirs, rel=SUMMED) and ours[2] > 0 and not report.fallbacks()
    assert off(clipped_by_us, scaled) < SUMMED


def copies(moe: bool, grouped: bool = False, **sizes: int) -> tuple[nn.Module, nn.Module, nn.Module]:
    """A model in bf16; the same in fp32; and the same of our modules in bf16, for which Megatron is patched just then."""
    given = {**MODEL, **(EXPERTS if moe else {}), **sizes}
    plain = models.build(moe, dtype=torch.bfloat16, **given).to(DEVICE)
    exact = models.build(moe, **given).to(DEVICE)
    exact.load_state_dict(plain.state_dict())
    with megatron.apply(modules=True):
        ours = models.build(moe, grouped=grouped, dtype=torch.bfloat16, **given).to(DEVICE)
    ours.load_state_dict(models.state_of_groups(plain.state_dict(), [*ours.state_dict()]), strict=False)
    return plain, exact, ours


def test_a_dense_model():
    plain, exact, built = copies(False)
    theirs, truth = models.step(plain), models.step(exact)
    with megatron.apply() as report:
        as_good(models.step(plain), theirs, truth)
        assert report.calls() == {"rope_one": 4, "glu": 2, "cross_entropy": 1} and not report.fallbacks()
        as_good(models.step(built), theirs, truth)
    before = report.calls()
    assert torch.equal(models.step(plain)["loss"], theirs["loss"]) and report.calls() == before


def test_a_dense_model_with_our_core_of_attention():
    given = {"num_query_groups": 2}
    plain, exact, _ = copies(False, **given)
    theirs, truth = models.step(plain), models.step(exact)
    with megatron.apply(modules=True, attention=True) as report:
        model = models.build(False, dtype=torch.bfloat16, **MODEL, **given).to(DEVICE)
        model.load_state_dict(plain.state_dict())
        found = models.step(model)
        assert report.calls()["attention"] == 2 and not report.fallbacks()
    as_good(found, theirs, truth)


def through(layer: nn.Module) -> dict[str, Tensor]:
    """What a layer of experts makes of fixed tokens, and the gradients."""
    x = models.randn(64, 2, MODEL["hidden_size"], seed=5).bfloat16().to(DEVICE, next(layer.parameters()).dtype)
    y, _ = layer(x.requires_grad_())
    layer.zero_grad()
    weighed(y, 6).backward()
    found = {n: p.grad for n, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, **models.state_of_groups(found, ["experts.weight1", "experts.weight2"])}


@pytest.mark.parametrize(("dispatcher", "more"), [("allgather", set()), ("alltoall", {"sort_chunks"})])
def test_a_mixture_of_experts(dispatcher, more):
    plain, exact, built = (
        model.decoder.layers[0].mlp for model in copies(True, grouped=True, moe_token_dispatcher_type=dispatcher)
    )
    theirs, truth = through(plain), through(exact)
    with megatron.apply() as report:
        as_good(through(plain), theirs, truth)
        assert {*report.calls()} == {*ROUTER, *more, "glu"} and not report.fallbacks()
        as_good(through(built), theirs, truth)
    assert {*report.calls()} == {*ROUTER, *more, "glu"} and not report.fallbacks()


def test_a_model_of_experts():
    """A router that is given other roundings may choose another expert: losses are compared, not gradients."""
    plain, exact, _ = copies(True)
    truth = models.step(exact)["loss"]
    theirs = spread(models.step(plain)["loss"], truth)
    with megatron.apply(modules=True) as report:
        model = models.build(True, grouped=True, dtype=torch.bfloat16, **MODEL, **EXPERTS).to(DEVICE)
        model.load_state_dict(models.state_of_groups(plain.state_dict(), [*model.state_dict()]), strict=False)
        found = models.step(model)
    wanted = {*ROUTER, "rope_one", "cross_entropy", "rms_norm", "grouped_mm"}
    assert {*report.calls()} == wanted and not report.fallbacks()
    assert spread(found["loss"], truth) <= 2 * theirs + 1e-3
    assert all(t.isfinite().all() for t in found.values())


def grouped(**given: object) -> nn.Module:
    """Experts of ours, by themselves; FP8 wants TransformerEngine where Megatron's config is made, not here."""
    from tilewright.integrations.megatron.experts import GroupedMLP

    groups = SimpleNamespace(**dict.fromkeys(("ep", "expt_tp", "expt_dp"), models.GROUP))
    config = models.build(True, dtype=torch.bfloat16, **MODEL, **EXPERTS).config
    for name, value in given.items():
        setattr(config, name, value)
    torch.manual_seed(0)
    return GroupedMLP(EXPERTS["num_moe_experts"], config, pg_collection=groups).to(DEVICE)


def micro_batch(layer: nn.Module) -> dict[str, Tensor]:
    counts = torch.tensor([40, 0, 96, 1, 200, 31, 64, 80], device=DEVICE)
    rows = int(counts.sum())
    x = models.randn(rows, MODEL["hidden_size"], seed=7).to(DEVICE, torch.bfloat16).requires_grad_()
    probs = models.randn(rows, seed=8).sigmoid().to(DEVICE).requires_grad_()
    layer.zero_grad()
    y, _ = layer(x, counts, probs)
    weighed(y, 9).backward()
    found = {n: p.grad.clone() for n, p in layer.named_parameters()}
    return {"y": y.detach(), "x": x.grad, "probs": probs.grad, **found}


def test_experts_in_fp8_quantise_once(monkeypatch):
    plain, coded = grouped(), grouped(fp8="e4m3", fp8_recipe="blockwise")
    coded.load_state_dict(plain.state_dict())
    truth, alone = micro_batch(plain), micro_batch(coded)
    for name, exact in truth.items():
        assert 1e-3 < spread(alone[name], exact) < 0.1, (name, spread(alone[name], exact))
    made, again = [], []
    ours, inside = expert_codes.quantize_experts, experts.quantised
    monkeypatch.setattr(expert_codes, "quantize_experts", lambda weight: made.append(0) or ours(weight))
    monkeypatch.setattr(experts, "quantised", lambda *given: again.append(0) or inside(*given))
    coded.set_is_first_microbatch()
    for _ in range(2):
        found = micro_batch(coded)
        assert all(torch.equal(t, alone[name]) for name, t in found.items())
    assert len(made) == 2 and not again  # neither in the second forward nor in a backward
    coded.config.disable_parameter_transpose_cache = True
    found = micro_batch(coded)
    assert all(torch.equal(t, alone[name]) for name, t in found.items())
    assert len(made) == 2 and len(again) == 4


def test_everything_is_given_back():
    report = megatron.apply(modules=True)
    theirs = {id(original) for _, original in report.originals.values()}
    assert len(theirs) >= 15 and not [*bindings(("megatron",), dict.fromkeys(theirs))]
    megatron.remove()
    assert not APPLIED and not [*bindings(("megatron",), report.originals)]
    assert len([*bindings(("megatron",), dict.fromkeys(theirs))]) >= len(theirs)
    assert type(models.build(False).decoder.final_layernorm) is nn.RMSNorm
