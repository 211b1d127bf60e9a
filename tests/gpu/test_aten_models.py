"""Models of transformers with their operators replaced, on a GPU in bf16, in both modes: a step beside float64, and twenty."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import tilewright as tw
from tests.aten.models import KINDS, built, error, step
from tests.aten.test_auto import fallback, nothing_is_left, rows  # noqa: F401
from tests.aten.test_models import declared

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16
EPS = torch.finfo(BF16).eps
STEPS = 20
MODES = ("all", "auto")
# Whose attention is causal without a mask, which flash attention takes
FLASH = {"Llama", "Qwen3"}


@pytest.fixture(autouse=True)
def flash() -> Iterator[None]:
    with sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]):
        yield


def attention(name: str) -> str:
    return "sdpa" if name in FLASH else "eager"


def block(mode: str, model: nn.Module, given: dict, rows) -> tw.aten.use:  # noqa: F811
    """The replacements of a mode: in "auto" of every other overload that a step calls, by rows that are made up."""
    if mode == "all":
        return tw.aten.use("all")
    with tw.aten.observe() as calls:
        step(model, given)
    rows(*declared(calls)[0], fallback(1.0))
    return tw.aten.use("auto", observed=calls)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_a_step_is_as_exact_as_torchs(name, mode, rows):  # noqa: F811
    """Errors of logits, of the loss and of every gradient, against float64, are at most twice torch's and a step of bf16."""
    given = KINDS[name].given("cuda")
    model = built(name, "cuda", BF16, attention(name))
    weights = {n: p.double() for n, p in model.named_parameters()}  # which bf16 has rounded
    exact = built(name, "cuda", torch.float64, attention(name))
    exact.load_state_dict({**exact.state_dict(), **weights})
    with sdpa_kernel(SDPBackend.MATH):
        truth = step(exact, given)
    plain = error(step(model, given), truth)
    with block(mode, model, given, rows):
        ours, said = error(step(model, given), truth), tw.aten.report()
    wrong = {n: (ours[n], plain[n]) for n in ours if not ours[n] <= 2 * plain[n] + EPS}
    assert not wrong
    taken = {one for one, n in said.items() if n["taken"]}
    if mode == "auto":  # whether a gradient is added in place is autograd's choice, from call to call
        assert taken and {one for one in said if not one.startswith("add")} <= taken
    else:
        assert {"mm", "embedding", "nll_loss_forward", "nll_loss_backward", "_log_softmax"} <= taken
        assert ("_flash_attention_forward" in taken) == (name in FLASH)


def trained(model: nn.Module, given: dict) -> list[float]:
    optimiser, losses = torch.optim.SGD(model.parameters(), lr=0.05), []
    for _ in range(STEPS):
        losses.append(float(step(model, given)["loss"]))
        optimiser.step()
    return losses


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", KINDS)
def test_twenty_steps_learn_what_torchs_learn(name, mode, rows):  # noqa: F811
    """Losses in bf16 are no further from those in fp32 than torch's are at their worst, twice, and a step of bf16."""
    given = KINDS[name].given("cuda")
    exact = trained(built(name, "cuda", torch.float32, attention(name)), given)
    plain = trained(built(name, "cuda", BF16, attention(name)), given)
    model = built(name, "cuda", BF16, attention(name))
    with block(mode, built(name, "cuda", BF16, attention(name)), given, rows):
        ours, said = trained(model, given), tw.aten.report()
    assert sum(one["taken"] for one in said.values()) >= STEPS * len(said) // 4
    room = 2 * max(abs(a - b) for a, b in zip(plain, exact)) + EPS * max(exact)
    assert exact[-1] < exact[0] and max(abs(a - b) for a, b in zip(ours, exact)) <= room
