"""One decoder layer of Qwen3, a token for each sequence over a paged cache, captured once and replayed: FP8, or bf16.

    python examples/decode_layer.py                     tiny sizes, on a CPU too
    python examples/decode_layer.py --model --batch 32  the sizes of Qwen3-8B, which want a GPU
    python examples/decode_layer.py --model --bf16

Every operation stores into memory that was there before (`out=`), so that a captured step allocates nothing. All that changes from
step to step is read on the device: positions, slots of the cache, lengths, the table of pages, scales. A layer takes the hidden
state as two summands, the stream and the last layer's update of it, for the addition belongs to the norm that comes next.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

EPS, THETA, PAGE = 1e-6, 1e6, 16
BF16, E4M3 = torch.bfloat16, torch.float8_e4m3fn


class Sizes(NamedTuple):
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(columns, inner) of the four products of a layer."""
        width = self.heads * self.head_dim
        return {
            "qkv": (width + 2 * self.kv_heads * self.head_dim, self.hidden),
            "out": (self.hidden, width),
            "gate_up": (2 * self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


QWEN3_8B = Sizes(4096, 12288, 32, 8, 128)
TINY = Sizes(64, 128, 4, 2, 32)


class Layer:
    """Random weights, in bf16, and as FP8 codes with a scale each."""

    def __init__(self, sizes: Sizes, device: str, seed: int = 0) -> None:
        source = torch.Generator(device).manual_seed(seed)

        def drawn(*shape: int, scale: float, shift: float = 0.0) -> Tensor:
            return (shift + scale * torch.randn(shape, generator=source, device=device)).to(BF16)

        self.sizes = sizes
        self.norms = {name: drawn(sizes.hidden, scale=0.1, shift=1.0) for name in ("attention", "ffn")}
        self.norms |= {name: drawn(sizes.head_dim, scale=0.1, shift=1.0) for name in ("q", "k")}
        self.weights = {name: drawn(n, k, scale=k**-0.5) for name, (n, k) in sizes.products.items()}
        self.codes = {name: tw.quantize(w, tw.fp8("tensor", pow2=False)) for name, w in self.weights.items()}


class Cache:
    """Pages of keys and values of e4m3 codes with a scale for each head, or of bf16; sequences have pages in random order."""

    def __init__(self, sizes: Sizes, batch: int, room: int, device: str, fp8: bool, seed: int = 1) -> None:
        source = torch.Generator(device).manual_seed(seed)
        each = -(-room // PAGE)
        shape = batch * each, PAGE, sizes.kv_heads, sizes.head_dim
        self.table = torch.randperm(batch * each, generator=source, device=device).view(batch, each).to(torch.int32)
        self.keys, self.values = (torch.randn(shape, generator=source, device=device).to(BF16) for _ in range(2))
        self.scales: dict[str, Tensor] = {}
        if fp8:
            self.scales = {
                n: torch.full((1, 1, sizes.kv_heads, 1), 4.5 / 448.0, device=device) for n in ("k_scale", "v_scale")
            }
            self.keys, self.values = (
                (t.float() / s).clamp(-448.0, 448.0).to(E4M3)
                for t, s in zip((self.keys, self.values), self.scales.values())
            )

    def slots(self, positions: Tensor) -> Tensor:
        """Where tokens at these positions [batch, length] are kept."""
        return self.table.gather(1, positions // PAGE).long() * PAGE + positions % PAGE

    def dense(self) -> tuple[Tensor, Tensor]:
        """Keys and values [batch, room, kv_heads, head_dim] in fp32, in the order of positions."""
        wide = [t.float() for t in (self.keys, self.values)]
        wide = [t * s for t, s in zip(wide, self.scales.values())] if self.scales else wide
        return tuple(t[self.table.long()].flatten(1, 2) for t in wide)


class Step:
    """A step of a layer for a batch: what it reads, the memory for all it makes, and the calls."""

    def __init__(
        self, layer: Layer, cache: Cache, update: Tensor, stream: Tensor, lengths: list[int], fp8: bool
    ) -> None:
        sizes, (batch, hidden), device = layer.sizes, update.shape, update.device
        self.layer, self.cache, self.fp8 = layer, cache, fp8
        self.update, self.stream = update, stream
        # Read on the device: they may be other numbers when a graph is replayed
        self.kv_len = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.positions = (self.kv_len - 1).long().view(batch, 1)
        self.slots = cache.slots(self.positions)
        known = cache.table.shape[1] * PAGE
        rates = THETA ** (-torch.arange(0, sizes.head_dim, 2, device=device).double() / sizes.head_dim)
        angles = torch.arange(known, device=device).double()[:, None] * rates
        self.cos, self.sin = angles.cos().float(), angles.sin().float()
        # Static scales of what is multiplied; `calibrate` measures them
        self.scales = {name: torch.ones(1, device=device) for name in sizes.products}
        self.formats = {name: tw.fp8("tensor", scale=s) if fp8 else None for name, s in self.scales.items()}
        self.factors = {
            name: layer.codes[name].t() if fp8 else layer.weights[name].t() for name in sizes.products
        }  # fmt: skip

        def room(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=BF16, device=device)

        self.made = {name: room(batch, n) for name, (n, _) in sizes.products.items()}
        self.streams = room(batch, hidden), room(batch, hidden)
        self.q, self.o = (room(batch, 1, sizes.heads, sizes.head_dim) for _ in range(2))
        self.lse = torch.empty(batch, sizes.heads, 1, device=device)
        self.read = {
            name: self.formats[name].empty((batch, k), BF16, device) if fp8 else room(batch, k)
            for name, (_, k) in sizes.products.items()
        }

    def multiply(self, name: str, x: Tensor) -> Tensor:
        if self.fp8:
            return tw.scaled_mm(x, self.factors[name], out=self.made[name])
        return tw.matmul(x, self.factors[name], out=self.made[name])

    def __call__(self) -> tuple[Tensor, Tensor]:
        """(update, stream) that the next layer takes."""
        layer, cache, sizes, batch = self.layer, self.cache, self.layer.sizes, self.update.shape[0]
        x, stream = tw.add_rms_norm(
            self.update, self.stream, layer.norms["attention"], EPS, out_format=self.formats["qkv"],
            out=(self.read["qkv"], self.streams[0]),
        )  # fmt: skip
        qkv = self.multiply("qkv", x).view(batch, 1, -1)
        q = tw.qkv_split_cache(
            qkv, sizes.heads, sizes.kv_heads, sizes.head_dim, cache.keys, cache.values, self.slots, layer.norms["q"],
            layer.norms["k"], cos=self.cos, sin=self.sin, positions=self.positions, eps=EPS, packing="plain", **cache.scales,
            out=self.q,
        )  # fmt: skip
        o, _ = tw.cached_attention(
            q, cache.keys, cache.values, cache.table, self.kv_len, **cache.scales, out=(self.o, self.lse)
        )
        o = o.view(batch, -1)
        if self.fp8:
            o = tw.quantize(o, self.formats["out"], out=self.read["out"])
        x, stream = tw.add_rms_norm(
            self.multiply("out", o), stream, layer.norms["ffn"], EPS, out_format=self.formats["gate_up"],
            out=(self.read["gate_up"], self.streams[1]),
        )  # fmt: skip
        x = tw.glu(self.multiply("gate_up", x), out_format=self.formats["down"], out=self.read["down"])
        return self.multiply("down", x), stream

    def calibrate(self) -> None:
        """Scales from the largest numbers that the layer multiplies here. They are written where kernels read them, so that a graph
        captured before goes on with the new ones."""
        for name, x in plain(self).inputs.items():
            self.scales[name].copy_((x.abs().amax() / 448.0).clamp(min=1e-12))

    def advance(self) -> None:
        """The next token of each sequence: nothing here waits for the device."""
        self.kv_len += 1
        self.positions += 1
        self.slots.copy_(self.cache.slots(self.positions))

    def captured(self) -> Callable[[], tuple[Tensor, Tensor]]:
        """The same step as a graph, whose results lie where the step's own do; on a CPU the step itself."""
        if not self.update.is_cuda:
            return self
        self()  # compiles what the graph will launch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = self()

        def replay() -> tuple[Tensor, Tensor]:
            graph.replay()
            return made

        return replay


# ---- plain torch -----------------------------------------------------------------------------------------------------


class Plain(NamedTuple):
    update: Tensor
    stream: Tensor
    inputs: dict[str, Tensor]  # of each product


def plain(step: Step) -> Plain:
    """The layer in fp32 by torch's operators, with the same codes of weights and of earlier tokens, but no others."""
    layer, sizes = step.layer, step.layer.sizes
    weights = {n: (c.dequantize().float() if step.fp8 else layer.weights[n].float()) for n, c in layer.codes.items()}
    norms = {name: w.float() for name, w in layer.norms.items()}
    inputs: dict[str, Tensor] = {}

    def multiply(name: str, x: Tensor) -> Tensor:
        inputs[name] = x
        return x @ weights[name].t()

    stream = step.update.float() + step.stream.float()
    heads = multiply("qkv", F.rms_norm(stream, stream.shape[-1:], norms["attention"], EPS)).unflatten(
        -1, (-1, sizes.head_dim)
    )
    q, k, v = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), 1)
    at = step.positions[:, 0]
    q, k = (
        turned(F.rms_norm(t, t.shape[-1:], norms[n], EPS), step.cos[at], step.sin[at]) for n, t in (("q", q), ("k", k))
    )
    keys, values = step.cache.dense()
    rows = torch.arange(len(at), device=at.device)
    keys[rows, at], values[rows, at] = k, v
    seen = torch.arange(keys.shape[1], device=at.device) < step.kv_len[:, None]
    keys, values = (t.repeat_interleave(sizes.heads // sizes.kv_heads, 2) for t in (keys, values))
    scores = torch.einsum("bhd,bkhd->bhk", q, keys) / math.sqrt(sizes.head_dim)
    weight = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
    o = torch.einsum("bhk,bkhd->bhd", weight, values.masked_fill(~seen[:, :, None, None], 0.0)).flatten(1)
    stream = stream + multiply("out", o)
    gate, up = multiply("gate_up", F.rms_norm(stream, stream.shape[-1:], norms["ffn"], EPS)).chunk(2, -1)
    return Plain(multiply("down", F.silu(gate) * up), stream, inputs)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads [batch, heads, head_dim], columns i and i + head_dim / 2 rotated."""
    a, b = x.chunk(2, -1)
    cos, sin = cos[:, None], sin[:, None]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def error(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


# ---- the example -----------------------------------------------------------------------------------------------------


def build(
    sizes: Sizes, batch: int, context: int, fp8: bool, device: str, seed: int = 0, lengths: list[int] | None = None
) -> Step:
    """A calibrated step of sequences of up to `context` tokens, of which the first is the longest, with room for a page more."""
    source = torch.Generator(device).manual_seed(seed + 2)
    lengths = lengths or [context - 3 * i % max(1, context // 2) for i in range(batch)]
    update, stream = (torch.randn(batch, sizes.hidden, generator=source, device=device).to(BF16) for _ in range(2))
    cache = Cache(sizes, batch, context + PAGE, device, fp8, seed + 1)
    step = Step(Layer(sizes, device, seed), cache, update, stream, lengths, fp8)
    step.calibrate()
    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=4, help="tokens of each sequence (4)")
    parser.add_argument("--batch", type=int, default=2, help="sequences (2)")
    parser.add_argument("--context", type=int, help="tokens in the cache (40, of a model 4096)")
    parser.add_argument("--model", action="store_true", help="the sizes of Qwen3-8B")
    parser.add_argument("--bf16", action="store_true", help="bf16 in the place of FP8")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    context = given.context or (4096 if given.model else 40)
    step = build(QWEN3_8B if given.model else TINY, given.batch, context, not given.bf16, device)
    run = step.captured()
    for number in range(given.steps):
        wanted = plain(step)  # before, for the step writes its token into the cache
        update, stream = run()
        print(
            f"step {number}: off by {error(update, wanted.update):.2e}, the stream by {error(stream, wanted.stream):.2e}"
        )
        step.advance()
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(100):
            run()
        end.record()
        torch.cuda.synchronize()
        print(f"{start.elapsed_time(end) * 10:.1f} us a step")


if __name__ == "__main__":
    main()
