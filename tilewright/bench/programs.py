"""Cases that are no call of one op: a layer's step and a denoise loop from the examples, and a product of JAX. Each is built,
checked and timed as an op's work is, and knows the programs that it is timed beside.

The layer and the loop are the examples' own code, and so want a checkout. JAX queues its calls on a stream of its own, where no
graph of torch's sees them: they are timed in a queue of many.
"""

from __future__ import annotations

import importlib
import os
import statistics
import time
from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw

from ..check.oracle import BARS
from ..core.cost import tensor_bytes
from .cases import Case
from .check import Absent, Wrong

Call = Callable[[], Any]
ROWS = 256  # of a product that are held against float64
OFF = {True: 0.1, False: 1e-2}  # of a layer's update, relative RMS: roundings of FP8 codes, or of bf16
OFF_LOOP = {True: 0.1, False: 2e-2}  # of what a denoise loop adds to its noise, likewise
QUEUED = 24  # calls of JAX in a queue
BATCHES = 15
WARM = 4  # batches before the first that counts: an idle chip's clocks must rise


class Program:
    """What a program's case has in the place of an op's work: no gradients, and nothing written that a call would miss."""

    overwrites, steps, coarse, flops = False, False, False, None
    rivals: dict[str, Callable[[Any], Call]] = {}

    def __init__(self, case: Case) -> None:
        self.case = case

    def restore(self) -> None:
        """Nothing is overwritten."""

    def rival(self, name: str) -> Call:
        if name not in self.rivals:
            raise Absent(f"{name} has nothing for {self.case.op}")
        return self.rivals[name](self)


# ---- a layer ---------------------------------------------------------------------------------------------------------


def example(name: str) -> Any:
    try:
        return importlib.import_module(f"examples.{name}")
    except ImportError as error:
        raise Absent(f"examples/{name}.py is not here: measure it from a checkout ({error})") from None


class Layer(Program):
    """A step of a decoder layer over a paged cache, its sequences of one length."""

    def __init__(self, case: Case, seed: int = 0, device: str = "cuda") -> None:
        super().__init__(case)
        module = example("decode_layer")
        sizes = module.Sizes(*case.options["sizes"]) if "sizes" in case.options else module.QWEN3_8B
        batch, context = case.dims["batch"], case.dims["context"]
        self.plain, self.error = module.plain, module.error
        self.step = module.build(sizes, batch, context, case.options["fp8"], device, seed, [context] * batch)

    @property
    def call(self) -> Call:
        return self.step

    @property
    def tensors(self) -> list[Tensor]:
        """What a step cannot do without reading: weights, and the tokens that sequences have."""
        step, layer = self.step, self.step.layer
        weights = [codes.data for codes in layer.codes.values()] if step.fp8 else list(layer.weights.values())
        tokens = self.case.dims["batch"] * self.case.dims["context"]
        cached = [t.flatten(0, 1)[:tokens] for t in (step.cache.keys, step.cache.values)]
        return [*weights, *layer.norms.values(), *cached, step.update, step.stream]

    @property
    def values(self) -> dict[str, Tensor]:
        return {"update": self.step.update, "stream": self.step.stream}

    def traffic(self, result: Any) -> tuple[int, int]:
        return sum(map(tensor_bytes, self.tensors)), tensor_bytes(result)

    def result_bytes(self, result: Any) -> int:
        """They lie in memory that was there before."""
        return 0

    def verify(self, result: tuple[Tensor, Tensor]) -> float:
        wanted = self.plain(self.step)
        update, stream = self.error(result[0], wanted.update), self.error(result[1], wanted.stream)
        allowed = OFF[self.step.fp8]
        if not (update <= allowed and stream <= allowed / 3):
            raise Wrong(
                f"its update is off by {update:.2e}, its stream by {stream:.2e}, allowed {allowed:g} and a third"
            )
        return max(update, stream)

    def compiled(self) -> Call:
        """The layer in torch's operators, of the same precision, as torch.compile fuses it. Its cache is dense, in order and in
        bf16, whatever ours is, and is cut to its length when it is compiled: what serves it best."""
        step, sizes, context = self.step, self.step.layer.sizes, self.case.dims["context"]
        keys, values = (t.transpose(1, 2).to(torch.bfloat16).contiguous() for t in step.cache.dense())
        norms, cos, sin = step.layer.norms, step.cos, step.sin
        codes = {name: (c.data.t(), c.scale) for name, c in step.layer.codes.items()}
        inverse = {name: 1.0 / s for name, s in step.scales.items()}

        def multiply(name: str, x: Tensor) -> Tensor:
            if not step.fp8:
                return F.linear(x, step.layer.weights[name])
            q = (x.float() * inverse[name]).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
            w, scale = codes[name]
            return torch._scaled_mm(q, w, step.scales[name], scale, out_dtype=torch.bfloat16)

        def rotated(x: Tensor, name: str, position: Tensor) -> Tensor:
            x = F.rms_norm(x, x.shape[-1:], norms[name], 1e-6).float()
            a, b = x.chunk(2, -1)
            c, s = cos[position], sin[position]
            return torch.cat([a * c - b * s, b * c + a * s], -1).to(torch.bfloat16)

        def layer(update: Tensor, stream: Tensor, position: Tensor) -> tuple[Tensor, Tensor]:
            stream = update + stream
            qkv = multiply("qkv", F.rms_norm(stream, stream.shape[-1:], norms["attention"], 1e-6))
            heads = qkv.unflatten(-1, (-1, 1, sizes.head_dim))  # [batch, heads, 1, head_dim]
            q, k, v = heads.split((sizes.heads, sizes.kv_heads, sizes.kv_heads), 1)
            keys.index_copy_(2, position, rotated(k, "k", position))
            values.index_copy_(2, position, v)
            seen = keys[:, :, :context], values[:, :, :context]
            o = F.scaled_dot_product_attention(rotated(q, "q", position), *seen, enable_gqa=True)
            stream = stream + multiply("out", o.flatten(1))
            gate, up = multiply("gate_up", F.rms_norm(stream, stream.shape[-1:], norms["ffn"], 1e-6)).chunk(2, -1)
            return multiply("down", F.silu(gate) * up), stream

        torch._dynamo.reset()
        program, position = torch.compile(layer, dynamic=False), step.positions[0]
        return lambda: program(step.update, step.stream, position)

    rivals = {"compile_graph": compiled}


# ---- a denoise loop --------------------------------------------------------------------------------------------------


class Denoise(Program):
    """All Euler steps of a diffusion transformer, from noise to a sample."""

    def __init__(self, case: Case, seed: int = 0, device: str = "cuda") -> None:
        super().__init__(case)
        module = example("denoise")
        sizes = module.Sizes(*case.options["sizes"]) if "sizes" in case.options else module.DIT
        sizes = sizes._replace(tokens=case.dims["tokens"], context=case.dims["context"])
        self.plain, self.error = module.plain, module.error
        self.loop = module.build(sizes, case.dims["batch"], case.options["fp8"], device, seed)

    @property
    def call(self) -> Call:
        return self.loop

    @property
    def values(self) -> dict[str, Tensor]:
        return {"noise": self.loop.noise, "context": self.loop.context}

    def traffic(self, result: Tensor) -> tuple[int, int]:
        """Each step reads weights, which no cache holds, and keys and values of the context; projections of it are read once."""
        loop, model = self.loop, self.loop.model
        weights = [
            w.data if loop.fp8 else w for block in (model.codes if loop.fp8 else model.blocks) for w in block.values()
        ]
        each = sum(map(tensor_bytes, [*weights, *model.up_bias, *loop.pairs, model.enter, model.leave, model.position]))
        once = sum(map(tensor_bytes, [*model.context, loop.context, loop.noise, loop.style]))
        return model.sizes.steps * each + once, tensor_bytes(result)

    def result_bytes(self, result: Any) -> int:
        """It lies in memory that was there before."""
        return 0

    def verify(self, result: Tensor) -> float:
        off, allowed = self.error(self.loop, result, self.plain(self.loop).sample), OFF_LOOP[self.loop.fp8]
        if not off <= allowed:
            raise Wrong(f"its sample is off by {off:.2e}, allowed {allowed:g}")
        return off

    def compiled(self) -> Call:
        """The loop in torch's operators, in bf16, as torch.compile fuses it. A block is compiled once for all: it begins with the
        gated addition of the block before, so that all which can be fused is in one."""
        loop, model, sizes = self.loop, self.loop.model, self.loop.model.sizes
        if loop.fp8:
            raise Absent("its twin in torch's operators is bf16")
        norm = F.layer_norm if sizes.norm == "layer" else F.rms_norm

        def modulated(h: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
            return norm(h, h.shape[-1:], eps=1e-6) * (1 + scale) + shift

        def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (sizes.heads, sizes.head_dim)).transpose(1, 2) for t in (q, k, v))
            return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)

        def enter(state: Tensor) -> Tensor:
            return F.linear(state.to(torch.bfloat16), model.enter, model.enter_bias) + model.position

        def block(
            h: Tensor, update: Tensor, gate: Tensor, style: Tensor, pair: Tensor, bias: Tensor, w: dict
        ) -> tuple[Tensor, ...]:
            (s0, b0, g0), (s1, b1, g1), (s2, b2, g2) = (part.unbind() for part in style.unflatten(0, (3, 3)).unbind())
            h = h + gate * update
            h = h + g0 * F.linear(attended(*F.linear(modulated(h, s0, b0), w["qkv"]).chunk(3, -1)), w["out"])
            seen = attended(F.linear(modulated(h, s1, b1), w["query"]), *pair.chunk(2, -1))
            h = h + g1 * F.linear(seen, w["cross"])
            x = F.gelu(F.linear(modulated(h, s2, b2), w["up"], bias), approximate="tanh")
            return h, F.linear(x, w["down"]), g2

        def leave(h: Tensor, update: Tensor, gate: Tensor, style: Tensor, state: Tensor, size: Tensor) -> Tensor:
            x = modulated(h + gate * update, *style.unbind())
            return state + size * F.linear(x, model.leave, model.leave_bias).float()

        torch._dynamo.reset()
        enter, block, leave = (torch.compile(one, dynamic=False) for one in (enter, block, leave))
        nothing = loop.noise.new_zeros((), dtype=torch.bfloat16)

        def call() -> Tensor:
            state, pairs = loop.noise, [F.linear(loop.context, w) for w in model.context]
            for style, size in zip(loop.style.unflatten(1, (-1, sizes.hidden)).unbind(), loop.sizes_of_steps.unbind()):
                h, gate = enter(state), nothing
                update = h
                for i, weights in enumerate(model.blocks):
                    h, update, gate = block(
                        h, update, gate, style[9 * i : 9 * i + 9], pairs[i], model.up_bias[i], weights
                    )
                state = leave(h, update, gate, style[-2:], state, size)
            return state

        return call

    rivals = {"compile_graph": compiled}


# ---- JAX -------------------------------------------------------------------------------------------------------------


def jax_on(device: str) -> tuple[Any, Any]:
    """JAX and its device of a kind, without which there is nothing to measure."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # or it takes three quarters of the memory
    try:
        jax = importlib.import_module("jax")
        return jax, jax.devices(device)[0]
    except (ImportError, RuntimeError) as error:
        raise Absent(f"jax cannot be had on {device}: {str(error).splitlines()[0]}") from None


class JaxProduct(Program):
    """`tilewright.jax.gemm_fp8` of bf16 factors, compiled by XLA; calls go round over three sets of them."""

    SCALES = 0.0113, 0.0009

    def __init__(self, case: Case, seed: int = 0, device: str = "cuda") -> None:
        super().__init__(case)
        self.jax, self.device = jax_on(device)
        m, n, k = (case.dims[name] for name in ("tokens", "columns", "hidden"))
        normal, bf16 = self.jax.random.normal, self.jax.numpy.bfloat16
        with self.jax.default_device(self.device):
            keys = self.jax.random.split(self.jax.random.key(seed), (3, 2))
            self.sets = [(normal(a, (m, k), bf16), normal(b, (k, n), bf16) * k**-0.5) for a, b in keys]

    def going_round(self, function: Callable[..., Any]) -> Call:
        """Calls of a function of two factors, each over the next set."""
        program, at = self.jax.jit(function), iter(range(1 << 62))
        return lambda: program(*self.sets[next(at) % len(self.sets)])

    @cached_property
    def call(self) -> Call:
        return self.going_round(lambda x, w: tw.jax.gemm_fp8(x, w, *self.SCALES))

    def traffic(self, result: Any) -> tuple[int, int]:
        x, w = self.sets[0]
        return x.nbytes + w.nbytes, result.nbytes

    def verify(self, result: Any) -> float:
        """Rows of a call over the first set beside the same codes in float64."""
        x, w = self.sets[0]
        codes = [tw.jax.quantize_fp8(t, s).astype("float32") for t, s in zip((x[:ROWS], w), self.SCALES)]
        a, b, y = (torch.from_dlpack(t).double() for t in (*codes, result[:ROWS].astype("float32")))
        scale = float(torch.tensor(self.SCALES[0])) * float(torch.tensor(self.SCALES[1]))
        exact = a @ b * scale
        error, allowed = float((y - exact).norm() / exact.norm()), BARS["F"].low
        if not error <= allowed * (1 + 2 / y.numel() ** 0.5):
            raise Wrong(f"relative RMS error {error:.3g}, allowed {allowed:.3g}")
        return error

    def queued_us(self, call: Call, queued: int = QUEUED) -> float:
        """Microseconds a call where many are queued, and the queue waited for once: the device is never idle in between."""
        times = []
        for _ in range(WARM + BATCHES):
            start = time.perf_counter()
            for _ in range(queued):
                last = call()
            last.block_until_ready()
            times.append((time.perf_counter() - start) * 1e6 / queued)
        return statistics.median(times[WARM:])

    def host_us(self) -> float:
        """Microseconds that the host takes to queue a call."""
        self.call().block_until_ready()
        start = time.perf_counter()
        last = self.call()
        took = (time.perf_counter() - start) * 1e6
        last.block_until_ready()
        return took

    def in_bf16(self) -> Call:
        """XLA's own product of the same factors."""
        return self.going_round(lambda x, w: x @ w)

    def by_codes(self) -> Call:
        """Ours where the second factor is codes already, as a weight's are."""
        codes = [tw.jax.quantize_fp8(w, self.SCALES[1]) for _, w in self.sets]
        program, at = self.jax.jit(lambda x, w: tw.jax.gemm_fp8(x, w, *self.SCALES)), iter(range(1 << 62))

        def call() -> Any:
            i = next(at) % len(self.sets)
            return program(self.sets[i][0], codes[i])

        return call

    rivals = {"jax_bf16": in_bf16, "jax_codes": by_codes}


PROGRAMS: dict[str, type[Program]] = {"qwen3 layer": Layer, "dit loop": Denoise, "jax.gemm_fp8": JaxProduct}
