"""Recurrences over more than 2^31 elements: the last rows, whose addresses are the largest, against a call on them alone. What came
before them has decayed by then."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.gpu.test_large import FREE
from tilewright.check.oracle import rms

pytestmark = pytest.mark.gpu
DEVICE, TOKENS, HEADS, WIDTH = "cuda", 131_200, 128, 128  # 2^31 elements and some
LAST, BEFORE = 128, 128  # tokens that are compared, and those before them of which e**-128 is left
# Heads here share one key head and so their scores, whose errors scatter where tokens are few: as many are compared
MANY = 4096
RESULT, GRADIENT, STATE = 2.4e-3, 4e-3, 1e-5


@pytest.fixture(autouse=True)
def room() -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of the device's memory, free")


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    source = torch.Generator(DEVICE).manual_seed(seed)
    return torch.randn(shape, generator=source, device=DEVICE, dtype=dtype)


def same(found: Tensor, wanted: Tensor, bar: float) -> None:
    error = rms(found.double() - wanted.double())
    assert error <= bar * rms(wanted.double()), f"relative RMS error {error / rms(wanted.double()):.2e}"


def arguments(kind: str) -> dict[str, Tensor]:
    q, k = (normal(1, TOKENS, 1, WIDTH, seed=i) for i in range(2))
    made = {"q": q, "k": k, "v": normal(1, TOKENS, HEADS, WIDTH, seed=2)}
    if kind == "columns":
        return {**made, "log_decay": torch.full((1, TOKENS, HEADS, WIDTH), -1.0, device=DEVICE, dtype=torch.bfloat16)}
    more = {"beta": torch.full((1, TOKENS, HEADS), 0.5, device=DEVICE)} if kind == "delta" else {}
    return {**made, "log_decay": torch.full((HEADS,), -1.0, device=DEVICE), **more}


def tail(values: dict[str, Tensor], last: int = LAST) -> dict[str, Tensor]:
    """The last tokens alone, in float64, and those before them."""
    return {n: (t if t.dim() == 1 else t.detach()[:, TOKENS - last - BEFORE :]).double() for n, t in values.items()}


@pytest.mark.parametrize("kind", ["linear", "delta", "columns"])
@torch.no_grad()
def test_linear_attention(kind):
    values = arguments(kind)
    o, last = tw.linear_attention(**values, normalize=True)
    with tw.force("reference"):
        exact, state = tw.linear_attention(**tail(values, MANY), normalize=True)
    same(o[:, TOKENS - MANY :], exact[:, BEFORE:], RESULT)
    same(last, state, STATE)


def test_gradients_of_linear_attention():
    values = {n: t.requires_grad_() for n, t in arguments("linear").items()}
    del values["log_decay"]
    decay = torch.full((HEADS,), -1.0, device=DEVICE)
    o, _ = tw.linear_attention(**values, log_decay=decay, normalize=True)
    do = torch.zeros_like(o)
    do[:, TOKENS - LAST :] = normal(1, LAST, HEADS, WIDTH, seed=3)
    found = torch.autograd.grad(o, [*values.values()], do)
    few = {n: t.requires_grad_() for n, t in tail(values).items()}
    with tw.force("reference"):
        exact, _ = tw.linear_attention(**few, log_decay=decay.double(), normalize=True)
    wanted = torch.autograd.grad(exact, [*few.values()], do[:, TOKENS - LAST - BEFORE :].double())
    for ours, theirs in zip(found, wanted, strict=True):
        same(ours[:, TOKENS - LAST :], theirs[:, BEFORE:], GRADIENT)


@torch.no_grad()
def test_steps():
    """Slots at the end of a pool; the others stay."""
    pool, tokens = TOKENS // WIDTH + 8, 3
    state = torch.zeros(pool, HEADS, WIDTH, WIDTH, device=DEVICE)
    slots = torch.tensor([pool - 1, pool - 3, pool - 2], device=DEVICE)
    state[slots] = normal(tokens, HEADS, WIDTH, WIDTH, seed=4, dtype=torch.float32)
    q, k = (normal(tokens, 1, WIDTH, seed=i) for i in range(2))
    v, decay = normal(tokens, HEADS, WIDTH, seed=2), -torch.rand(tokens, HEADS, WIDTH, device=DEVICE)
    before = state[slots].double()
    o = tw.linear_attention_step(q, k, v, state, decay, slots=slots, normalize=True)
    with tw.force("reference"):
        exact = tw.linear_attention_step(*(t.double() for t in (q, k, v)), before, decay.double(), normalize=True)
    same(o, exact, RESULT)
    same(state[slots], before, STATE)
    assert not state[: pool - 3].any()


@torch.no_grad()
def test_causal_conv1d_steps():
    """As linear attention's."""
    columns, tokens = 8192, 3
    pool = TOKENS * HEADS * WIDTH // columns // 3 + 8
    state = torch.zeros(pool, columns, 3, device=DEVICE, dtype=torch.bfloat16)
    slots = torch.tensor([pool - 1, pool - 3, pool - 2], device=DEVICE)
    state[slots] = normal(tokens, columns, 3, seed=4)
    x, weight, before = normal(tokens, columns, seed=0), normal(columns, 4, seed=1), state[slots]
    y = tw.causal_conv1d_step(x, weight, None, state, slots, act="silu")
    wide = before.double()
    with tw.force("reference"):
        exact = tw.causal_conv1d_step(x.double(), weight.double(), None, wide, act="silu")
    same(y, exact, RESULT)
    assert torch.equal(state[slots], wide.to(state.dtype)) and not state[: pool - 3].any()


def test_causal_conv1d():
    columns = 8192
    x = normal(1, TOKENS * HEADS * WIDTH // columns, columns, seed=0).requires_grad_()
    weight, bias = (normal(columns, *size, seed=i).requires_grad_() for i, size in enumerate(((4,), ()), 1))
    y, last = tw.causal_conv1d(x, weight, bias, act="silu")
    do = torch.zeros_like(y)
    do[:, -LAST:] = normal(1, LAST, columns, seed=3)
    found = torch.autograd.grad(y, (x, weight, bias), do)
    few = [t.detach().double().requires_grad_() for t in (x[:, -LAST - BEFORE :], weight, bias)]
    with tw.force("reference"):
        exact, _ = tw.causal_conv1d(*few, act="silu")
    wanted = torch.autograd.grad(exact, few, do[:, -LAST - BEFORE :].double())
    same(y[:, -LAST:], exact[:, BEFORE:], RESULT)
    assert torch.equal(last, x.detach()[:, -3:].transpose(1, 2))
    for ours, theirs in zip(found, wanted, strict=True):
        same(
            ours[:, -LAST:] if ours.dim() == 3 else ours, theirs[:, BEFORE:] if theirs.dim() == 3 else theirs, GRADIENT
        )
