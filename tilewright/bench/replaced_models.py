"""Whole models whose operators are replaced, as cases: a step of plain torch modules that know nothing of it, beside the same step
without replacements. Nothing but torch is needed: a BERT, and a decoder as Llama is one, over a whole prompt or a token at a time.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright as tw

from .cases import Case
from .check import Wrong
from .tallies import slower
from .turns import RUNS, settled

WARM, STEPS = 2, 4  # of a run, whose time is that of the latter
LONG_S = 0.2  # that a run is to take, so that a short step is timed by many
# Relative to plain torch in bf16, which is off by as much itself: one rounding is 1.1e-3 RMS, some 20 of them a layer
LOSS, GRADIENT = 5e-3, 0.15


Past = tuple[Tensor, Tensor]  # rotated keys and values of a layer, of the tokens before


class Layer(nn.Module):
    """Attention and a feed-forward part: as BERT's, norms after the sums, or as Llama's, norms before, a gate, rotated heads."""

    def __init__(self, hidden: int, inner: int, heads: int, kv_heads: int, causal: bool) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.causal = heads, kv_heads, causal
        width = hidden // heads
        norm = nn.RMSNorm if causal else nn.LayerNorm
        self.norms = nn.ModuleList([norm(hidden) for _ in range(2)])
        self.qkv = nn.Linear(hidden, (heads + 2 * kv_heads) * width, bias=not causal)
        self.out = nn.Linear(hidden, hidden, bias=not causal)
        self.up = nn.Linear(hidden, inner * (2 if causal else 1), bias=not causal)
        self.down = nn.Linear(inner, hidden, bias=not causal)

    def attend(self, x: Tensor, angles: Tensor, past: Past | None) -> Tensor:
        batch, length, hidden = x.shape
        parts = self.qkv(x).view(batch, length, self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
        q, k, v = parts.split((self.heads, self.kv_heads, self.kv_heads), 1)
        if self.causal:
            q, k = (rotated(t, angles) for t in (q, k))
            if past is not None:
                k, v = (torch.cat(pair, 2) for pair in zip(past, (k, v)))
            k, v = (t.repeat_interleave(self.heads // self.kv_heads, 1) for t in (k, v))
        made = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal and past is None)
        return self.out(made.transpose(1, 2).reshape(batch, length, hidden))

    def feed(self, x: Tensor) -> Tensor:
        if not self.causal:
            return self.down(F.gelu(self.up(x)))
        gate, up = self.up(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)

    def forward(self, x: Tensor, angles: Tensor, past: Past | None = None) -> Tensor:
        first, second = self.norms
        if self.causal:
            x = x + self.attend(first(x), angles, past)
            return x + self.feed(second(x))
        x = first(x + self.attend(x, angles, past))
        return second(x + self.feed(x))


def rotated(t: Tensor, angles: Tensor) -> Tensor:
    first, second = t.chunk(2, -1)
    return t * angles.cos() + torch.cat((-second, first), -1) * angles.sin()


class Model(nn.Module):
    """Embeddings, layers and a head over all tokens; its loss."""

    def __init__(
        self, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, causal: bool
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocab, hidden)
        self.layers = nn.ModuleList([Layer(hidden, inner, heads, kv_heads, causal) for _ in range(layers)])
        self.head = nn.Linear(hidden, vocab, bias=False)
        self.width = hidden // heads

    def forward(self, ids: Tensor, pasts: Sequence[Past] | None = None) -> Tensor:
        before = 0 if pasts is None else pasts[0][0].shape[2]
        steps = torch.arange(0, self.width, 2, device=ids.device) / self.width
        places = torch.arange(before, before + ids.shape[1], device=ids.device)
        angles = torch.outer(places, 10_000.0**-steps).repeat(1, 2)
        x = self.tokens(ids)
        angles = angles.to(x.dtype)
        for at, layer in enumerate(self.layers):
            x = layer(x, angles, None if pasts is None else pasts[at])
        return F.cross_entropy(self.head(x).flatten(0, 1).float(), ids.flatten())


class Step(NamedTuple):
    """A step of a model, and what it gave: the loss and, of a training step, the gradients."""

    run: Callable[[], Tensor]
    model: Model


def build(case: Case, device: str = "cuda") -> Step:
    """The model of a case, with random weights, and its step: forward and backward, or forward alone, which with a `context` is of
    tokens after so many."""
    given = {name: value for name, value in case.options.items() if name not in ("mode", "train")}
    torch.manual_seed(0)
    with torch.device(device):
        model = Model(**given).to(torch.bfloat16 if device == "cuda" else torch.float32)
        ids = torch.randint(given["vocab"], (case.dims["batch"], case.dims["length"]))
        pasts = None
        if "context" in case.dims:
            shape = case.dims["batch"], given["kv_heads"], case.dims["context"], model.width
            dtype = model.head.weight.dtype
            pasts = [(torch.randn(shape, dtype=dtype), torch.randn(shape, dtype=dtype)) for _ in model.layers]

    def train() -> Tensor:
        model.zero_grad(set_to_none=True)
        loss = model(ids)
        loss.backward()
        return loss.detach()

    def infer() -> Tensor:
        with torch.no_grad():
            return model(ids, pasts)

    return Step(train if case.options["train"] else infer, model)


def outcome(step: Step) -> list[Tensor]:
    return [step.run(), *(p.grad.clone() for p in step.model.parameters() if p.grad is not None)]


def off(made: list[Tensor], wanted: list[Tensor]) -> float:
    """How far the gradients are off, RMS over parameters; the loss where there are none. Raises `Wrong`."""
    if len(made) != len(wanted):
        raise Wrong(f"{len(made) - 1} gradients, not {len(wanted) - 1}")
    loss = abs(float(made[0]) / float(wanted[0]) - 1)
    each = [
        float((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-20)) for a, b in zip(made[1:], wanted[1:])
    ]
    gradient = (sum(e * e for e in each) / len(each)) ** 0.5 if each else 0.0
    if not (loss <= LOSS and gradient <= GRADIENT):
        raise Wrong(f"the loss is off by {loss:.2e}, the gradients by {gradient:.2e}")
    return gradient or loss


def block(case: Case, step: Step) -> tw.aten.use:
    """The replacements of a case: in mode "auto" by calls that a step was seen to make."""
    mode = case.options["mode"]
    if mode == "all":
        return tw.aten.use("all")
    with tw.aten.observe() as calls:
        step.run()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="aten: nothing is replaced")
        return tw.aten.use(mode, observed=calls)


def seconds(run: Callable[[], Any], drain: Callable[[], None], steps: int) -> float:
    """Of one of so many steps, until the device has done them."""
    for _ in range(WARM):
        run()
    drain()
    start = time.perf_counter()
    for _ in range(steps):
        run()
    drain()
    return (time.perf_counter() - start) / steps


def measure(case: Case, beside: Sequence[str], device: str = "cuda") -> dict[str, Any]:
    """A step of a whole model with its operators replaced, and without, in turn, several times over. Raises `check.Wrong`."""
    step = build(case, device)
    drain = torch.cuda.synchronize if device == "cuda" else lambda: None
    wanted = outcome(step)
    replacing = block(case, step)
    with replacing:
        error, said = off(outcome(step), wanted), tw.aten.report()
    wanted.clear()

    steps = max(STEPS, int(LONG_S / seconds(step.run, drain, 1)))

    def both() -> list[float]:
        with replacing:
            own = seconds(step.run, drain, steps)
        return [1e6 * own, 1e6 * seconds(step.run, drain, steps)]

    pairs = settled("steps", both, RUNS)
    us, plain = map(statistics.median, zip(*pairs))
    count = sum(one["taken"] for one in said.values())
    return {
        "us": us, "floor_us": None, "host_us": None, "rivals": {"eager": plain}, "error": error, "method": "steps", "bytes": [0, 0],
        "extra_bytes": None, "runs": {"steps": pairs},
        "note": f"{count} calls of {len(said)} overloads replaced in a step; slower in {slower(pairs)} of {len(pairs)} runs",
    }  # fmt: skip
