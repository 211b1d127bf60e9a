"""What is done to a patched model after the patch, by its user, by threads and by what looks at it, has its effect."""

from __future__ import annotations

import copy
import functools
import io
import sys
import threading
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from torch import nn

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
from transformers import LlamaForCausalLM

from tests.transformer_models import FP32, IDS, LABELS, build, error, step
from tilewright.integrations.huggingface import attention, causal_loss
from tilewright.integrations.huggingface.patching import patch, unpatch

ONE = {"num_hidden_layers": 1}


def both(family: str = "Llama", **more: object) -> tuple[nn.Module, nn.Module]:
    model = build(family, **ONE)
    other = copy.deepcopy(model)
    patch(other, **more)
    return model, other


def same(model: nn.Module, other: nn.Module, bar: float = FP32) -> bool:
    """Loss and every gradient."""
    (before, grads), (after, again) = step(model), step(other)
    return torch.allclose(after.loss, before.loss, rtol=bar) and error(again, grads) < bar


# ---- threads ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def often():
    """Threads change places after a few lines."""
    before, threads = sys.getswitchinterval(), torch.get_num_threads()
    sys.setswitchinterval(1e-5)
    torch.set_num_threads(1)
    yield
    sys.setswitchinterval(before)
    torch.set_num_threads(threads)


@pytest.mark.parametrize(
    "kinds", [(False,) * 4, (True,) * 3, (True, True, False)], ids=["reading", "training", "mixed"]
)
def test_threads_share_a_patched_model(kinds, often):
    model = build("Llama")
    patch(model)
    parameters, draws = [*model.parameters()], torch.Generator().manual_seed(3)
    given = [torch.randint(3, 96, (2, 9), generator=draws) for _ in kinds]

    def run(ids: torch.Tensor, trains: bool) -> list[torch.Tensor]:
        with torch.set_grad_enabled(trains):
            if not trains:
                return [model(ids).logits]
            loss = model(ids, labels=ids).loss
            return [loss, *torch.autograd.grad(loss, parameters)]

    expected, found = [run(*each) for each in zip(given, kinds)], []

    def work(ids: torch.Tensor, trains: bool, truth: list[torch.Tensor]) -> None:
        for _ in range(20):
            try:
                made = run(ids, trains)
                found.append(all(torch.allclose(a, b, rtol=1e-4, atol=1e-5) for a, b in zip(made, truth, strict=True)))
            except Exception as raised:
                found.append(repr(raised))

    threads = [threading.Thread(target=work, args=each) for each in zip(given, kinds, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [True] * 20 * len(kinds)
    assert not [m for m in model.modules() if "q_proj" in m.__dict__]


def test_threads_that_train_keep_hidden_states_apart(monkeypatch):
    """A softcap keeps them from the head to the loss, and here one thread waits for the other between."""
    model = build("Gemma2", **ONE)
    patch(model, only="loss")
    given = [torch.roll(IDS, n, 1) for n in range(2)]
    expected, found = [model(ids, labels=LABELS).loss for ids in given], {}
    meeting, tanh = threading.Barrier(2, timeout=30), torch.tanh

    def waiting(x: torch.Tensor) -> torch.Tensor:
        meeting.wait()
        return tanh(x)

    def work(n: int) -> None:
        found[n] = model(given[n], labels=LABELS).loss

    monkeypatch.setattr(torch, "tanh", waiting)
    threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0] == expected[0] != expected[1] == found[1]


# ---- the loss ---------------------------------------------------------------------------------------------------------------


def test_what_is_set_later_counts_in_training():
    model, other = both("Mixtral", only="loss")
    for each in (model, other):
        each.config.output_router_logits, each.router_aux_loss_coef = True, 10.0
    assert step(model)[0].loss > 8 and same(model, other)
    body = copy.deepcopy(model.model)
    with torch.no_grad():
        for p in body.parameters():
            p.mul_(1.1)
    model.model, other.model = body, copy.deepcopy(body)
    assert same(model, other)
    model.resize_token_embeddings(99)
    other.resize_token_embeddings(99)
    other.load_state_dict(model.state_dict())
    assert same(model, other)


def test_a_body_that_is_compiled_later_is_called_in_training():
    model, other = both()
    graphs = []

    def backend(graph: torch.fx.GraphModule, given: list) -> object:
        graphs.append(graph)
        return graph.forward

    other.model = torch.compile(other.model, backend=backend)
    assert torch.allclose(step(other)[0].loss, step(model)[0].loss, rtol=FP32) and graphs


class Keeping(LlamaForCausalLM):
    """With a z-loss, and what it keeps of its calls."""

    calls, z, keeps = 0, 0.0, False

    def forward(self, input_ids=None, labels=None, **named):
        out = super().forward(input_ids=input_ids, labels=labels, **named)
        self.calls += 1
        if self.keeps:
            self.last = out.logits
        if self.z and labels is not None:
            out.loss = out.loss + self.z * out.logits.logsumexp(-1).square().mean()
        return out


@pytest.mark.parametrize("before", [True, False])
def test_a_forward_that_keeps_logits_or_adds_a_loss_of_them(before):
    model = build("Llama", **ONE)
    model.__class__ = Keeping
    other = copy.deepcopy(model)
    if before:
        for found in ({"keeps": True}, {"z": 0.5}):
            other.__dict__.update(found)
            with pytest.raises(ValueError, match="patch: Keeping: loss : not linear_cross_entropy"):
                patch(other, only="loss")
            for name in found:
                del other.__dict__[name]
        assert "last" not in other.__dict__
    report = patch(other, only="loss")
    for _ in range(3):
        assert same(model, other) and other.calls == model.calls
    assert report.calls() == {"linear_cross_entropy": 3}
    for name, value in (("z", 0.5), ("keeps", True)):
        for each in (model, other):
            setattr(each, name, value)
        for _ in range(2):
            assert same(model, other) and other.calls == model.calls
    assert torch.equal(other.last, model.last) and report.calls() == {"linear_cross_entropy": 3}
    for each in (model, other):
        each.z, each.keeps = 0.0, False
    assert same(model, other) and report.calls() == {"linear_cross_entropy": 4}
    unpatch(other)


def test_logits_that_are_kept_for_the_first_time_in_a_call(monkeypatch):
    """Without a number that says so."""
    model = build("Llama", **ONE)
    model.__class__ = Keeping
    other = copy.deepcopy(model)
    report = patch(other, only="loss")
    forward = Keeping.__dict__["forward"]

    @functools.wraps(forward)
    def keeping(self, *given, **named):
        out = forward(self, *given, **named)
        object.__setattr__(self, "last", out.logits)
        return out

    monkeypatch.setattr(other.__dict__[causal_loss.SHADOW], "original", keeping)
    for calls in (1, 1):
        assert torch.allclose(step(other)[0].loss, step(model)[0].loss, rtol=FP32)
        assert other.last.shape[-1] == other.config.vocab_size and report.calls() == {"linear_cross_entropy": calls}


def test_a_loss_function_of_later():
    model, other = both(only="loss")
    for each in (model, other):
        each.loss_function = lambda logits, labels, **_: logits.square().mean()
    assert same(model, other)


def halved(module: nn.Module, given: tuple, result: torch.Tensor) -> torch.Tensor:
    return result * 0.5


@pytest.mark.parametrize("first", [True, False], ids=["hooked first", "patched first"])
def test_hooks_of_the_head_are_given_logits(first):
    model = build("Llama", **ONE)
    other = copy.deepcopy(model)
    if not first:
        report = patch(other, only="loss")
    handles = [each.lm_head.register_forward_hook(halved) for each in (model, other)]
    if first:
        report = patch(other, only="loss")
    assert same(model, other) and not report.calls()
    for handle in handles:
        handle.remove()
    seen = []
    for hook in (
        lambda: other.lm_head.register_full_backward_hook(lambda m, i, o: seen.append(o[0].shape[-1])),
        lambda: other.lm_head.register_full_backward_pre_hook(lambda m, o: seen.append(o[0].shape[-1])),
        lambda: nn.modules.module.register_module_forward_hook(
            lambda m, i, o: seen.append(o.shape[-1]) if m is other.lm_head else None
        ),
    ):
        handle = hook()
        assert same(model, other) and not report.calls()
        handle.remove()
    assert seen == [96] * 3
    handles = [each.lm_head.register_forward_pre_hook(lambda m, given: (given[0] * 2,)) for each in (model, other)]
    assert same(model, other) and report.calls() == {"linear_cross_entropy": 1}


# ---- activations ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["Llama", "Gemma2"])
def test_an_activation_that_is_replaced_or_hooked_later(family):
    model, other = both(family, only="mlp")
    again = copy.deepcopy(other)  # whose activation is a copy
    reports = [m.__dict__["_tilewright_report"] for m in (other, again)]
    assert same(model, other) and same(model, again)
    assert all(report.calls() == {"glu_linear": 2} for report in reports)  # they count together
    mlps, own = [m.model.layers[0].mlp for m in (model, other)], [m.model.layers[0].mlp.act_fn for m in (model, other)]
    ways = {
        "replaced": lambda mlp: setattr(mlp, "act_fn", nn.GELU()),
        "hooked": lambda mlp: mlp.act_fn.register_forward_hook(halved),
        "given another forward": lambda mlp: setattr(mlp.act_fn, "forward", torch.tanh),
    }
    for way in ways.values():
        made = [way(mlp) for mlp in mlps]
        assert same(model, other)
        for mlp, act, handle in zip(mlps, own, made):
            mlp.act_fn = act
            act.__dict__.pop("forward", None)
            if handle is not None:
                handle.remove()
    assert reports[0].calls() == {"glu_linear": 2}
    assert same(model, other) and reports[0].calls() == {"glu_linear": 3}


def test_an_activation_whose_attribute_changes():
    model = build("Llama", **ONE)
    model.model.layers[0].mlp.act_fn = nn.GELU(approximate="tanh")
    with pytest.raises(ValueError, match="no activation of glu's|nothing was replaced"):
        patch(model, only="mlp")
    model.model.layers[0].mlp.act_fn = nn.GELU()
    other = copy.deepcopy(model)
    report = patch(other, only="mlp")
    assert same(model, other) and report.calls() == {"glu_linear": 1}
    for each in (model, other):
        each.model.layers[0].mlp.act_fn.approximate = "tanh"
    assert same(model, other) and report.calls() == {"glu_linear": 1}


# ---- attention --------------------------------------------------------------------------------------------------------------


def test_a_config_is_pickled_as_it_was():
    model = build("Llama", **ONE)
    config = model.config
    patch(model, attention=True)
    assert model.config is not config
    for protocol in range(6):
        made = ForkingPickler.loads(ForkingPickler.dumps(model.config, protocol))
        assert type(made) is type(config) and made.to_dict() == config.to_dict()
    torch.save({"config": model.config}, io.BytesIO())
    for way in (copy.copy, copy.deepcopy):
        made = way(model.config)
        assert type(made) is type(model.config) and made._attn_implementation == attention.NAME
        made.use_cache = not config.use_cache
        assert config.use_cache is not made.use_cache


@pytest.mark.parametrize("own", ["eager", "sdpa"])
def test_a_mask_that_learns_is_left_to_the_model(own):
    model = build("Llama", **ONE)
    model.set_attn_implementation(own)
    causal = torch.where(torch.ones(9, 9).tril().bool(), 0.0, torch.finfo().min)
    mask = (causal + 0.1 * torch.randn(2, 1, 9, 9, generator=torch.Generator().manual_seed(2)).tril()).requires_grad_()

    def gradient() -> torch.Tensor:
        return torch.autograd.grad(model(IDS, labels=LABELS, attention_mask=mask).loss, mask)[0]

    expected = gradient()
    report = patch(model, attention=True)
    assert error({"mask": gradient()}, {"mask": expected}) < 1e-4 and "attention" not in report.calls()
    assert [s.reason for s in report.skipped] == ["some calls: its mask wants a gradient"]
    with torch.no_grad():
        model(IDS, attention_mask=mask)
    assert report.calls()["attention"] == 1


# ---- where a patch is made --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("under", ["inference mode", "default dtype"])
def test_a_patch_is_the_same_wherever_it_is_made(under):
    model, other = both(attention=True)
    expected = other.__dict__["_tilewright_report"].replaced
    made = copy.deepcopy(model)
    try:
        if under == "default dtype":
            torch.set_default_dtype(torch.bfloat16)
        with torch.inference_mode(under == "inference mode"):
            report = patch(made, attention=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert report.replaced == expected and not report.skipped and same(model, made)
