"""Linear attention over long sequences against float64, token by token, and the same bits every time."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from unittest import mock

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.gpu.test_properties import wide_strides
from tilewright.check import layouts
from tilewright.check.cases import Net
from tilewright.check.oracle import bits, rms
from tilewright.check.properties import guarded_memory, isolation, special_values, strides, wild_indices
from tilewright.core.target import Target, pretend
from tilewright.ops.recurrent import linear_chunks, linear_tokens

pytestmark = pytest.mark.gpu
DEVICE, LENGTH, HEADS, KEY_HEADS, WIDTH, VALUES = "cuda", 65_536, 2, 1, 64, 64
KINDS = ("head", "token", "delta", "column", "column_delta", "bonus")
FEW = linear_tokens.SHORT_PACKED  # tokens of the longest sequence that is walked through one by one
PARTS = {"keeping": (layouts.KEEPING[:3], []), "other": (layouts.KEEPING[3:], []), "expanded": ([], layouts.EXPANDED)}
SLOW = 1e-4  # of a log decay by token: what the first token left is still there at the last
RESULT, STATE, GRADIENT = 2.4e-3, 1e-5, 4e-3  # relative RMS, of bf16 inputs


@contextlib.contextmanager
def crowded() -> Iterator[None]:
    """A chip of one SM is pretended, so that walkers make outputs themselves; those of the delta rule too."""
    one = replace(Target.at(torch.device(DEVICE, 0)), sms=1)
    with mock.patch.object(linear_chunks, "DELTA_CROWD", 0.0), pretend(one):
        yield


WALKERS = {"few": contextlib.nullcontext, "crowded": crowded}


@pytest.fixture(params=WALKERS)
def walkers(request):
    with WALKERS[request.param]():
        yield request.param


@pytest.fixture
def by_chunks(monkeypatch):
    """However short sequences are, on a chip of its own, since calls are replayed."""
    target = Target.at(torch.device(DEVICE, 0))
    monkeypatch.setattr(linear_tokens, "SHORT", -1)
    monkeypatch.setattr(linear_tokens, "SHORT_PACKED", 0)
    with pretend(replace(target, sms=target.sms + 1)):
        yield


def drawn(*shape: int, seed: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    source = torch.Generator(DEVICE).manual_seed(seed)
    return (scale * torch.randn(shape, generator=source, device=DEVICE)).to(dtype)


def given(
    kind: str, length: int, heads: int = HEADS, key_heads: int = KEY_HEADS, width: int = WIDTH
) -> dict[str, Tensor]:
    """Arguments. Of decays by token one in 4,096 is -100, so that states are forgotten now and then, and most of them never: in
    three quarters of the columns there are none such."""
    rows, columns = (1, length, heads), kind in ("column", "column_delta", "bonus")
    source = torch.Generator(DEVICE).manual_seed(5)
    shape = (heads,) if kind == "head" else (*rows, width) if columns else rows
    decay = -SLOW * torch.rand(shape, generator=source, device=DEVICE)
    if kind != "head":
        far = torch.rand(shape, generator=source, device=DEVICE) < 2.0**-12
        if columns:
            far[..., width // 4 :] = False
        decay = torch.where(far, -100.0, decay)
    made = {
        "q": drawn(1, length, key_heads, width, seed=0),
        "k": drawn(1, length, key_heads, width, seed=1),
        "v": drawn(*rows, VALUES, seed=2),
        "log_decay": decay,
        "state": drawn(1, heads, width, VALUES, seed=3, dtype=torch.float32),
    }
    if "delta" in kind:
        made["beta"] = torch.sigmoid(drawn(*rows, seed=4, dtype=torch.float32))
    if kind == "bonus":
        made["bonus"] = drawn(heads, width, seed=4)
    return made


def off(found: Tensor, exact: Tensor) -> float:
    return float(rms(found.double() - exact) / rms(exact))


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_long_sequences_neither_overflow_nor_lose_the_state(kind):
    """With few walkers and crowded: the truth takes far longer than both."""
    values = given(kind, LENGTH)
    with tw.force("reference"):
        exact, state = tw.linear_attention(**{n: t.double() for n, t in values.items()}, normalize=True)
        single = tw.linear_attention(**values, normalize=True)[1]
    noise = off(single, state)  # what fp32 loses token by token
    end = LENGTH - 4096
    for name, walking in WALKERS.items():
        with walking():
            o, last = tw.linear_attention(**values, normalize=True)
        assert bool(o.isfinite().all()) and bool(last.isfinite().all()), name
        assert off(o, exact) < RESULT and off(last, state) < STATE + noise, (
            f"{name}: state off by {off(last, state):.1e}"
        )
        assert off(o[:, end:], exact[:, end:]) < RESULT, name  # as near at the end as over all


def summed(q: Tensor, k: Tensor, v: Tensor, state: Tensor, block: int = 2048) -> tuple[Tensor, Tensor]:
    """(o, the last state) where nothing decays: sums over blocks of tokens, in which each sees itself and those before it."""
    made = []
    for first in range(0, q.shape[1], block):
        own = slice(first, first + block)
        pairs = torch.einsum("bthk,bshk->bhts", q[:, own], k[:, own]).tril()
        made.append(
            torch.einsum("bhts,bshv->bthv", pairs, v[:, own]) + torch.einsum("bthk,bhkv->bthv", q[:, own], state)
        )
        state = state + torch.einsum("bthk,bthv->bhkv", k[:, own], v[:, own])
    return torch.cat(made, 1) / q.shape[-1] ** 0.5, state


@pytest.mark.parametrize("normalize", [False, True])
@torch.no_grad()
def test_a_sum_of_all_tokens_keeps_each(normalize, walkers):
    """Nothing decays, and keys and values have means, so that the state grows with every token."""
    values = given("head", LENGTH)
    values.update(log_decay=None, k=values["k"] + 1.0, v=values["v"] + 1.0)
    o, last = tw.linear_attention(**values, normalize=normalize)
    wide = {n: t.double() for n, t in values.items() if t is not None}
    if normalize:
        wide.update({n: wide[n] * torch.rsqrt(wide[n].square().sum(-1, keepdim=True) + 1e-6) for n in "qk"})
    spread = {n: wide[n].repeat_interleave(HEADS // KEY_HEADS, 2) for n in "qk"}
    exact, state = summed(**spread, v=wide["v"], state=wide["state"])
    assert bool(o.isfinite().all()) and off(last, state) < STATE, f"state off by {off(last, state):.1e}"
    assert off(o, exact) < RESULT and off(o[:, -4096:], exact[:, -4096:]) < RESULT


def test_the_gradient_of_a_state_keeps_each_token(walkers):
    """Where nothing decays it is the sum of what each token read and was asked for, and both have means."""
    values = given("head", LENGTH)
    values.update(log_decay=None, q=values["q"] + 1.0, state=values["state"].requires_grad_())
    o, _ = tw.linear_attention(**values)
    asked = torch.randn_like(o) + 1.0
    (found,) = torch.autograd.grad(o, [values["state"]], asked)
    read = values["q"].double().repeat_interleave(HEADS // KEY_HEADS, 2) / values["q"].shape[-1] ** 0.5
    exact = torch.einsum("bthk,bthv->bhkv", read, asked.double())
    assert off(found, exact) < STATE, f"off by {off(found, exact):.1e}"


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("kind", ["none", "head", "token", "delta"])
def test_gradients_at_the_sizes_of_a_layer(kind, normalize, walkers):
    """Against float64 token by token, of both results, from a state."""
    values = given("token" if kind == "none" else kind, 500, heads=4, key_heads=4, width=128)
    values.update(
        k=values["k"] * 0.1, v=drawn(1, 500, 4, 128, seed=2), state=drawn(1, 4, 128, 128, seed=3, dtype=torch.float32)
    )
    if kind == "none":
        del values["log_decay"]
    asked = [drawn(*t.shape, seed=9, dtype=t.dtype) for t in (values["v"], values["state"])]
    made = {}
    for dtype in (None, torch.float64):
        leaves = {n: (t if dtype is None else t.to(dtype)).detach().requires_grad_() for n, t in values.items()}
        with tw.force("reference") if dtype else contextlib.nullcontext():
            results = tw.linear_attention(**leaves, normalize=normalize)
            made[dtype] = torch.autograd.grad(
                results, [*leaves.values()], [a.to(r.dtype) for a, r in zip(asked, results)]
            )
    for name, found, exact in zip(values, made[None], made[torch.float64]):
        assert off(found, exact) < GRADIENT, f"{name} off by {off(found, exact):.1e}"


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_runs_have_the_same_bits(kind, walkers):
    """At the sizes of a model's layer, gradients too where there are any."""
    values = given(kind, 1024, heads=8, key_heads=4, width=128)
    columns = values["log_decay"].dim() == 4
    leaves = {} if columns else {n: t.requires_grad_() for n, t in values.items()}
    first = []
    for i in range(100):
        results = tw.linear_attention(**values, normalize=True)
        found = [*results]
        if leaves:
            found += torch.autograd.grad(results, [*leaves.values()], [torch.ones_like(r) for r in results])
        found = [t.detach() for t in found]
        first = first or found
        for at, (t, wanted) in enumerate(zip(found, first, strict=True)):
            assert torch.equal(bits(t), bits(wanted)), f"result {at} of run {i}"


@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_columns"])
@pytest.mark.parametrize(
    "holds", [guarded_memory, isolation, special_values, wide_strides, wild_indices], ids=lambda p: p.__name__
)
def test_properties_of_short_sequences_by_chunks(name, holds, by_chunks):
    """Those that draw short sequences alone, which are walked through token by token by themselves."""
    holds(tw.catalogue()[name], Net(device=DEVICE))


@pytest.mark.parametrize("name", ["linear_attention", "linear_attention_columns"])
@pytest.mark.parametrize("part", PARTS)
def test_strides_of_short_sequences_by_chunks(name, part, by_chunks, monkeypatch):
    """In parts: all kernels are compiled for each layout, which takes minutes."""
    keeping, expanded = PARTS[part]
    monkeypatch.setattr(layouts, "KEEPING", keeping)
    monkeypatch.setattr(layouts, "EXPANDED", expanded)
    strides(tw.catalogue()[name], Net(device=DEVICE))


def short(kind: str) -> tuple[dict[str, Tensor], dict[str, Tensor], Tensor]:
    """Arguments of a few short sequences at a layer's sizes: packed, and a row of a batch each; and their marks."""
    many, length, heads = 5, FEW, 8
    values = given(kind, many * length, heads=heads, key_heads=4, width=128)
    values["state"] = drawn(many, heads, 128, VALUES, seed=3, dtype=torch.float32)
    alike = [n for n, t in values.items() if n in ("state", "bonus") or t.dim() == 1]
    rows = {n: t if n in alike else t.reshape(many, length, *t.shape[2:]) for n, t in values.items()}
    return values, rows, torch.arange(0, many * length + 1, length, device=DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_short_sequences_by_chunks(kind, by_chunks):
    _, rows, _ = short(kind)
    found = tw.linear_attention(**rows, normalize=True)
    with tw.force("reference"):
        exact = tw.linear_attention(**{n: t.double() for n, t in rows.items()}, normalize=True)
    assert off(found[0], exact[0]) < RESULT and off(found[1], exact[1]) < STATE


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_short_sequences_are_steps(kind):
    """Packed, in rows of a batch and step by step, nothing is rounded to 16 bits but outputs."""
    packed, rows, marks = short(kind)
    o, last = tw.linear_attention(**rows, normalize=True)
    with tw.force("reference"):
        exact = tw.linear_attention(**{n: t.double() for n, t in rows.items()}, normalize=True)
    assert off(o, exact[0]) < RESULT and off(last, exact[1]) < 1e-6
    other, end = tw.linear_attention(**packed, normalize=True, cu_seqlens=marks)
    assert off(other.reshape(o.shape), o.double()) < 3e-4 and off(end, last.double()) < 1e-6
    pool = rows["state"].clone()
    for t in range(o.shape[1]):
        now = {n: x if n == "bonus" or x.dim() == 1 else x[:, t] for n, x in rows.items() if n != "state"}
        step = tw.linear_attention_step(**now, state=pool, normalize=True)
        assert off(step, o[:, t].double()) < 3e-4
    assert off(pool, last.double()) < 1e-6
