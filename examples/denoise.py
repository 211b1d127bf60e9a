"""A diffusion transformer's denoise loop, from noise to a sample in all its Euler steps, captured once and replayed: bf16, or FP8.

    python examples/denoise.py                  tiny sizes, on a CPU too
    python examples/denoise.py --model          24 blocks of width 1152, 256 tokens, 10 steps, which want a GPU
    python examples/denoise.py --model --fp8
    python examples/denoise.py --norm rms       the blocks of an action expert: RMS norms in the place of layer norms

A block is self attention, cross attention to a context (a prompt, or what a robot sees) and two products with a GELU between.
Before each stands a norm whose scale and shift come from the time, after each a gate that does: h = h + gate * f(norm(h) * (1 +
scale) + shift). The gate and the addition belong to the norm that comes next, which so reads what is modulated as it lies.

What depends on the time alone is made before the loop for all steps (`Loop.schedule`), and keys and values of the context once in
each run. All buffers are there before, and all that may change between replays is read on the device: noise, context, times,
step sizes, scales.
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

EPS = 1e-6
BF16, FP32 = torch.bfloat16, torch.float32
SHORTEST, LONGEST = 4e-3, 4.0  # periods of the time's sines
PARTS = ("self", "cross", "ffn")  # of a block; each has its scale, shift and gate


class Sizes(NamedTuple):
    blocks: int
    hidden: int
    heads: int
    head_dim: int
    ffn: int
    tokens: int
    context: int
    channels: int
    steps: int
    norm: str = "layer"

    @property
    def products(self) -> dict[str, tuple[int, int]]:
        """(columns, inner) of the products of a block."""
        width = self.heads * self.head_dim
        return {
            "qkv": (3 * width, self.hidden),
            "out": (self.hidden, width),
            "query": (width, self.hidden),
            "cross": (self.hidden, width),
            "up": (self.ffn, self.hidden),
            "down": (self.hidden, self.ffn),
        }


DIT = Sizes(24, 1152, 16, 72, 4608, 256, 512, 16, 10)
TINY = Sizes(2, 64, 4, 16, 128, 12, 10, 8, 3)


class Model:
    """Random weights. Those of blocks also as FP8 codes with a scale each; what goes in and out stays in bf16, as it is little."""

    def __init__(self, sizes: Sizes, device: str, seed: int = 0) -> None:
        source = torch.Generator(device).manual_seed(seed)

        def drawn(*shape: int, scale: float) -> Tensor:
            return (scale * torch.randn(shape, generator=source, device=device)).to(BF16)

        def matrix(n: int, k: int) -> Tensor:
            return drawn(n, k, scale=k**-0.5)

        self.sizes, hidden, width = sizes, sizes.hidden, sizes.heads * sizes.head_dim
        self.blocks = [{name: matrix(n, k) for name, (n, k) in sizes.products.items()} for _ in range(sizes.blocks)]
        self.codes = [
            {name: tw.quantize(w, tw.fp8("tensor", pow2=False)) for name, w in block.items()} for block in self.blocks
        ]
        self.up_bias = [drawn(sizes.ffn, scale=0.1) for _ in range(sizes.blocks)]
        self.context = [matrix(2 * width, hidden) for _ in range(sizes.blocks)]
        self.enter, self.enter_bias = matrix(hidden, sizes.channels), drawn(hidden, scale=0.1)
        self.leave, self.leave_bias = matrix(sizes.channels, hidden), drawn(sizes.channels, scale=0.1)
        self.position = drawn(sizes.tokens, hidden, scale=0.5)
        # From the time to scales, shifts and gates of every part of every block, and to a scale and a shift of the last norm
        self.time = matrix(hidden, hidden)
        self.style = drawn((3 * len(PARTS) * sizes.blocks + 2) * hidden, hidden, scale=1.5 * hidden**-0.5)


class Loop:
    """A denoise loop for a batch: what it reads, the memory for all it makes, and the calls."""

    def __init__(self, model: Model, noise: Tensor, context: Tensor, fp8: bool) -> None:
        sizes, device, batch = model.sizes, noise.device, noise.shape[0]
        rows, width = batch * sizes.tokens, sizes.heads * sizes.head_dim
        self.model, self.fp8, self.batch = model, fp8, batch
        # Read on the device: they may be other numbers when a graph is replayed
        self.noise, self.context = noise, context
        self.sizes_of_steps = torch.empty(sizes.steps, device=device)
        self.style = torch.empty(sizes.steps, model.style.shape[0], dtype=BF16, device=device)
        # Static scales of what blocks multiply, for all steps; `calibrate` measures them
        self.scales = [{name: torch.ones(1, device=device) for name in sizes.products} for _ in range(sizes.blocks)]
        self.formats = [
            {name: tw.fp8("tensor", scale=s) if fp8 else None for name, s in scales.items()} for scales in self.scales
        ]
        factors = model.codes if fp8 else model.blocks
        self.factors = [{name: w.t() for name, w in block.items()} for block in factors]

        def room(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        # One set of buffers for all blocks and steps: what a block read is done with when the next begins
        self.made = {name: room(rows, n) for name, (n, _) in sizes.products.items() if name != "up"}
        self.read = {
            name: self.formats[0][name].empty((rows, k), BF16, device) if fp8 else room(rows, k)
            for name, (_, k) in sizes.products.items()
        }
        self.attended = room(batch, sizes.tokens, sizes.heads, sizes.head_dim)
        self.pairs = [room(batch, sizes.context, 2, sizes.heads, sizes.head_dim) for _ in range(sizes.blocks)]
        self.latent, self.stream = room(rows, sizes.channels), room(rows, sizes.hidden)
        self.entered, self.last = room(rows, sizes.hidden, dtype=FP32), room(rows, sizes.hidden)
        self.velocity, self.state = (room(batch, sizes.tokens, sizes.channels, dtype=FP32) for _ in range(2))
        self.width = width

    # ---- what the loop reads ----

    def schedule(self, times: Tensor) -> None:
        """Euler steps from each of `times` to the next, steps + 1 of them: step sizes, and all that depends on the time. A graph
        captured before goes on with them."""
        model, half = self.model, self.model.sizes.hidden // 2
        periods = SHORTEST * (LONGEST / SHORTEST) ** torch.linspace(0, 1, half, device=times.device)
        angles = 2 * math.pi * times[:-1, None].float() / periods
        embedded = F.silu(torch.cat([angles.sin(), angles.cos()], -1).to(BF16) @ model.time.t())
        self.style.copy_(embedded @ model.style.t())
        self.sizes_of_steps.copy_(times.diff())

    def modulation(self, step: int) -> list[tuple[Tensor, ...]]:
        """(scale, shift, gate) of each part of each block in a step, and (scale, shift) of the last norm: views, no copies."""
        vectors = self.style[step].view(-1, self.model.sizes.hidden).unbind()
        return [vectors[i : i + 3] for i in range(0, len(vectors), 3)]

    def calibrate(self) -> None:
        """Scales from the largest numbers that blocks multiply here in any step, written where kernels read them."""
        for scales, largest in zip(self.scales, plain(self).largest):
            for name, scale in scales.items():
                scale.copy_((largest[name] / 448.0).clamp(min=1e-12))

    # ---- the calls ----

    def normed(
        self, update: Tensor | None, gate: Tensor | None, scale: Tensor, shift: Tensor, block: int, name: str
    ) -> Tensor:
        """The stream, after the last part's gated update of it, normed and modulated: what product `name` of a block reads."""
        layer = self.model.sizes.norm == "layer"
        given = {"eps": EPS, "scale": scale, "shift": shift}
        out = self.last if name == "leave" else self.read[name]
        given["out_format"] = None if name == "leave" else self.formats[block][name]
        if update is None:
            return (tw.layer_norm if layer else tw.rms_norm)(self.stream, **given, out=out)
        add_norm = tw.add_layer_norm if layer else tw.add_rms_norm
        return add_norm(update, self.stream, gate=gate, **given, out=(out, self.stream))[0]

    def multiply(self, block: int, name: str, x: Tensor) -> Tensor:
        product = tw.scaled_mm if self.fp8 else tw.matmul
        return product(x, self.factors[block][name], out=self.made[name])

    def activated(self, block: int, x: Tensor) -> Tensor:
        """gelu(x @ up + bias), as what the product after it reads."""
        given = {"bias": self.model.up_bias[block], "act": "gelu_tanh", "out_format": self.formats[block]["down"]}
        product = tw.scaled_mm if self.fp8 else tw.matmul
        return product(x, self.factors[block]["up"], **given, out=self.read["down"])

    def attend(self, block: int, name: str, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attention, and the product `name` of it. Heads are read where the product before stored them."""
        o = tw.attention(q, k, v, out=self.attended).view(-1, self.width)
        if self.fp8:
            o = tw.quantize(o, self.formats[block][name], out=self.read[name])
        return self.multiply(block, name, o)

    def heads(self, x: Tensor, tokens: int, parts: int) -> tuple[Tensor, ...]:
        return x.view(self.batch, tokens, parts, -1, self.model.sizes.head_dim).unbind(2)

    def step(self, number: int, state: Tensor) -> Tensor:
        model, sizes = self.model, self.model.sizes
        latent = tw.epilogue(state.view(-1, sizes.channels), out_dtype=BF16, out=self.latent)
        entered = tw.matmul(latent, model.enter.t(), out_dtype="float32", out=self.entered)
        by_token = self.batch, sizes.tokens, sizes.hidden
        tw.epilogue(
            entered.view(by_token), bias=model.enter_bias, add=model.position, out_dtype=BF16, out=self.stream.view(by_token)
        )  # fmt: skip
        *parts, (last_scale, last_shift) = self.modulation(number)
        update = gate = None
        for block in range(sizes.blocks):
            for part, (scale, shift, next_gate) in zip(PARTS, parts[block * len(PARTS) :]):
                name = {"self": "qkv", "cross": "query", "ffn": "up"}[part]
                x = self.normed(update, gate, scale, shift, block, name)
                if part == "self":
                    update = self.attend(block, "out", *self.heads(self.multiply(block, "qkv", x), sizes.tokens, 3))
                elif part == "cross":
                    (q,) = self.heads(self.multiply(block, "query", x), sizes.tokens, 1)
                    update = self.attend(block, "cross", q, *self.pairs[block].unbind(2))
                else:
                    update = self.multiply(block, "down", self.activated(block, x))
                gate = next_gate
        x = self.normed(update, gate, last_scale, last_shift, 0, "leave")
        tw.matmul(x, model.leave.t(), out_dtype="float32", out=self.velocity.view(-1, sizes.channels))
        size = self.sizes_of_steps[number : number + 1]
        return tw.epilogue(self.velocity, bias=model.leave_bias, gate=size, residual=state, out=self.state)

    def __call__(self) -> Tensor:
        """The sample [batch, tokens, channels] in fp32 that noise becomes."""
        rows = self.context.view(-1, self.model.sizes.hidden)
        for w, pair in zip(self.model.context, self.pairs):
            tw.matmul(rows, w.t(), out=pair.view(rows.shape[0], -1))
        state = self.noise
        for number in range(self.model.sizes.steps):
            state = self.step(number, state)
        return state

    def captured(self) -> Callable[[], Tensor]:
        """The same loop as a graph, whose sample lies where the loop's own does; on a CPU the loop itself."""
        if not self.noise.is_cuda:
            return self
        self()  # compiles what the graph will launch
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            made = self()

        def replay() -> Tensor:
            graph.replay()
            return made

        return replay


# ---- plain torch -----------------------------------------------------------------------------------------------------


class Plain(NamedTuple):
    sample: Tensor
    largest: list[dict[str, Tensor]]  # of what each product of each block reads, in any step


def plain(loop: Loop) -> Plain:
    """The loop in fp32 by torch's operators, with the same codes of weights, but no others."""
    model, sizes = loop.model, loop.model.sizes
    if loop.fp8:
        blocks = [{name: c.dequantize().float() for name, c in block.items()} for block in model.codes]
    else:
        blocks = [{name: w.float() for name, w in block.items()} for block in model.blocks]
    norm = F.layer_norm if sizes.norm == "layer" else F.rms_norm
    largest = [{name: torch.zeros((), device=loop.noise.device) for name in sizes.products} for _ in blocks]

    def multiply(block: int, name: str, x: Tensor) -> Tensor:
        largest[block][name] = torch.maximum(largest[block][name], x.abs().amax())
        return x @ blocks[block][name].t()

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (sizes.heads, sizes.head_dim)).transpose(1, 2) for t in (q, k, v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

    state = loop.noise.clone()
    pairs = [(loop.context.float() @ w.float().t()).chunk(2, -1) for w in model.context]
    for number in range(sizes.steps):
        h = state @ model.enter.float().t() + model.enter_bias.float() + model.position.float()
        *parts, last = ([t.float() for t in vectors] for vectors in loop.modulation(number))
        for at, (scale, shift, gate) in enumerate(parts):
            block, part = divmod(at, len(PARTS))
            x = norm(h, h.shape[-1:], eps=EPS) * (1 + scale) + shift
            if PARTS[part] == "self":
                update = multiply(block, "out", attended(*multiply(block, "qkv", x).chunk(3, -1)))
            elif PARTS[part] == "cross":
                update = multiply(block, "cross", attended(multiply(block, "query", x), *pairs[block]))
            else:
                x = F.gelu(multiply(block, "up", x) + model.up_bias[block].float(), approximate="tanh")
                update = multiply(block, "down", x)
            h = h + gate * update
        x = norm(h, h.shape[-1:], eps=EPS) * (1 + last[0]) + last[1]
        state = state + loop.sizes_of_steps[number] * (x @ model.leave.float().t() + model.leave_bias.float())
    return Plain(state, largest)


def error(loop: Loop, found: Tensor, wanted: Tensor) -> float:
    """Of what the steps added to the noise, relative."""
    return float((found - wanted).norm() / (wanted - loop.noise).norm())


# ---- the example -----------------------------------------------------------------------------------------------------


def build(sizes: Sizes, batch: int, fp8: bool, device: str, seed: int = 0) -> Loop:
    """A calibrated loop from noise at time 1 to a sample at time 0, in equal steps."""
    source = torch.Generator(device).manual_seed(seed + 1)
    noise = torch.randn(batch, sizes.tokens, sizes.channels, generator=source, device=device)
    context = torch.randn(batch, sizes.context, sizes.hidden, generator=source, device=device).to(BF16)
    loop = Loop(Model(sizes, device, seed), noise, context, fp8)
    loop.schedule(torch.linspace(1, 0, sizes.steps + 1, device=device))
    if fp8:
        loop.calibrate()
    return loop


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, help="Euler steps (3, of a model 10)")
    parser.add_argument("--batch", type=int, default=2, help="samples (2)")
    parser.add_argument("--model", action="store_true", help="the sizes of a model")
    parser.add_argument("--norm", choices=("layer", "rms"), default="layer", help="the norms of blocks (layer)")
    parser.add_argument("--fp8", action="store_true", help="FP8 in the place of bf16")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = DIT if given.model else TINY
    sizes = sizes._replace(norm=given.norm, steps=given.steps or sizes.steps)
    loop = build(sizes, given.batch, given.fp8, device)
    run = loop.captured()
    for times in ("equal", "squared"):
        if times == "squared":  # another schedule in the same graph: first steps are the longest
            loop.schedule(torch.linspace(1, 0, sizes.steps + 1, device=device) ** 2)
        print(f"{times} times: off by {error(loop, run(), plain(loop).sample):.2e}")
    if device == "cuda":
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(20):
            run()
        end.record()
        torch.cuda.synchronize()
        print(f"{start.elapsed_time(end) / 20:.2f} ms a sample of {sizes.steps} steps")


if __name__ == "__main__":
    main()
