"""Sequences for linear attention of every kind, and that where one is cut, stepped through or forgotten does not matter."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.core.target import INTERPRETER, pretend
from tilewright.ops.recurrent import linear_tokens

NAN = float("nan")
# A chip for a way that calls would not take by themselves, and for no other: a call is replayed on the chip that it was made on
CHUNKS = replace(INTERPRETER, sms=INTERPRETER.sms + 1)
HEADS, KEY_HEADS, WIDTH, VALUES, LENGTH = 2, 1, 16, 24, 35


def drawn(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@contextlib.contextmanager
def in_chunks(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """However short sequences are."""
    monkeypatch.setattr(linear_tokens, "SHORT", -1)
    monkeypatch.setattr(linear_tokens, "SHORT_PACKED", 0)
    with pretend(CHUNKS):
        yield


def sequence(kind: str = "delta") -> dict[str, Tensor]:
    """Arguments whose first dimensions are batch and length."""
    columns = [WIDTH] if kind.startswith("columns") else []
    made = {
        "q": drawn(1, LENGTH, KEY_HEADS, WIDTH, seed=0),
        "k": drawn(1, LENGTH, KEY_HEADS, WIDTH, seed=1),
        "v": drawn(1, LENGTH, HEADS, VALUES, seed=2),
        "log_decay": -torch.rand(1, LENGTH, HEADS, *columns, generator=torch.Generator().manual_seed(3)),
    }
    return made | ({"beta": torch.sigmoid(drawn(1, LENGTH, HEADS, seed=4))} if kind.endswith("delta") else {})


def bonus_of(kind: str) -> dict[str, Tensor]:
    return {"bonus": drawn(HEADS, WIDTH, seed=6)} if kind.endswith("bonus") else {}


def run(**given: Any) -> tuple[Tensor, Tensor]:
    with tw.force("triton"):
        return tw.linear_attention(**{"normalize": True, **given})


def near(found: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-5)


def cut(given: dict[str, Tensor], first: int, end: int) -> dict[str, Tensor]:
    return {name: t[:, first:end] for name, t in given.items()}


def cut_anywhere(kind: str, size: int) -> None:
    """Parts of so many tokens, each with the state that the one before it left, give what the whole gives."""
    tokens = 19 if size > 1 else 7
    given, more, state, made = cut(sequence(kind), 0, tokens), bonus_of(kind), None, []
    for first in range(0, tokens, size):
        o, state = run(**cut(given, first, first + size), **more, state=state)
        made.append(o)
    near((torch.cat(made, 1), state), run(**given, **more))


def steps_after_prefill(kind: str) -> None:
    given, more, end = sequence(kind), bonus_of(kind), LENGTH - 3
    o, state = run(**cut(given, 0, end), **more)
    pool = torch.full((3, *state.shape[1:]), NAN)
    pool[1] = state[0]
    slots, made = torch.tensor([1]), [o]
    for t in range(end, LENGTH):
        now = {name: x[:, t] for name, x in given.items()}
        with tw.force("triton"):
            made.append(tw.linear_attention_step(state=pool, slots=slots, normalize=True, **now, **more)[:, None])
    near((torch.cat(made, 1), pool[1:2]), run(**given, **more))
    assert bool(pool[0].isnan().all()) and bool(pool[2].isnan().all()), "a slot of no token was touched"


def decayed_to_nothing(kind: str) -> None:
    """A state that a token forgets is gone, and what comes after it is kept to the last digit; of columns, each for itself."""
    given = sequence(kind)
    far = (torch.arange(LENGTH)[:, None] + torch.arange(WIDTH)) % 7 == 3
    decay = torch.where(far, -100.0, -0.01)[None, :, None].expand(1, LENGTH, HEADS, WIDTH)
    given["log_decay"] = decay[..., 0] if kind == "linear" else decay
    for dtype in (torch.float32, torch.bfloat16):
        values = {name: t if name == "log_decay" else t.to(dtype) for name, t in given.items()}
        o, last = run(**values)
        with tw.force("reference"):
            exact = tw.linear_attention(**{name: t.double() for name, t in values.items()}, normalize=True)[1]
        assert bool(o.isfinite().all())
        assert float((last - exact).norm() / exact.norm()) < 1e-5
