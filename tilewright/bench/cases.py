"""The benchmark cases: which call, at which dimensions, how many bytes it must move, and the goal it is held to.

A case's bytes are the fewest possible: each tensor argument read once, each result written once. `fraction` is the
floor for those bytes over the measured time; `vs:RIVAL` is the rival's time over ours.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

import tilewright as tw

from ..core import register
from . import check

EPS = 1e-6
SLACK = 0.05  # how far beside the goal's own shape a case may stay under the goal


@dataclass(frozen=True)
class Work:
    """One buffer set: the call over it, the check of the call's result, and what puts overwritten inputs back."""

    call: Callable[[], Any]
    check: Callable[[Any], float]
    restore: Callable[[], None] | None = None
    rival: Callable[[], Any] | None = None  # for host time


@dataclass(frozen=True)
class Case:
    """One row: `build(dims, seed, device)` makes a buffer set, `traffic` is (bytes read, bytes written)."""

    name: str
    op: str
    dims: dict[str, int]
    build: Callable[[dict[str, int], int, str], Work]
    traffic: tuple[int, int]
    metric: str
    goal: float


def backward_of(function: Any, args: tuple, options: dict[str, Any], grads: tuple, **extra: Any) -> Callable[[], tuple]:
    """The op's backward as a call of its own: the forward is run here, once, and autograd stays out of the call."""
    op = function.op
    values = op.signature.bind(args, options)
    results = register.saved_results(op, register.flatten(op.run(values)))
    needs = frozenset(name for name in op.differentiable if values[name] is not None)
    dropped = set(op.signature.tensors) - set(op.saves)
    saved = {name: None if name in dropped else value for name, value in values.items()}
    return lambda: op.run_backward(saved, results, list(grads), needs, **extra)


def _normal(seed: int, device: str) -> Callable[..., Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    return partial(torch.randn, generator=generator, device=device, dtype=torch.bfloat16)


def _block_format(ways: str) -> Any:
    return tw.fp8("1x128", ways=ways)


# ------------------------------------------------------------------------------------------------------------- rms_norm


def rms_norm_forward(dims: dict[str, int], seed: int, device: str, ways: str | None = None) -> Work:
    draw = _normal(seed, device)
    x, weight = draw(dims["tokens"], dims["hidden"]), draw(dims["hidden"])

    def truth(band: slice) -> Tensor:
        return check.rms_norm(x[band], weight, EPS)

    if ways is None:
        return Work(lambda: tw.rms_norm(x, weight, EPS), lambda y: check.compare_rows(y, truth, check.ROW_BARS, "y"))
    out_format = _block_format(ways)
    return Work(
        lambda: tw.rms_norm(x, weight, EPS, out_format=out_format), lambda q: check.compare_quantized(q, truth, "y")
    )


def rms_norm_backward(dims: dict[str, int], seed: int, device: str) -> Work:
    draw = _normal(seed, device)
    tokens, hidden = dims["tokens"], dims["hidden"]
    x, weight, dy = draw(tokens, hidden), draw(hidden), draw(tokens, hidden)

    def verify(grads: tuple) -> float:
        dx, dweight = grads[:2]
        error = check.compare_rows(
            dx, lambda band: check.rms_norm_gradients(x[band], weight, dy[band], EPS)[0], check.GRADIENT_BARS, "dx"
        )
        parts = check.chunks(tokens, hidden)
        truth = sum(check.rms_norm_gradients(x[part], weight, dy[part], EPS)[1] for part in parts)
        bar, ulp = check.COLUMN_BARS[dweight.dtype], check.ULPS[dweight.dtype]
        return max(error, check.compare([(dweight, truth)], bar, ulp, "dweight"))

    return Work(backward_of(tw.rms_norm, (x, weight, EPS), {}, (dy,)), verify)


def rms_norm_launch(dims: dict[str, int], seed: int, device: str) -> Work:
    draw = _normal(seed, device)
    other = draw(dims["tokens"], dims["hidden"])
    x, weight = draw(dims["tokens"], dims["hidden"]), draw(dims["hidden"])
    return Work(
        lambda: tw.rms_norm(x, weight),
        lambda y: check.compare_rows(y, lambda band: check.rms_norm(x[band], weight, EPS), check.ROW_BARS, "y"),
        rival=lambda: torch.add(x, other),
    )


# ------------------------------------------------------------------------------------------------------------------ glu


def glu_forward(dims: dict[str, int], seed: int, device: str, ways: str | None = None) -> Work:
    x = _normal(seed, device)(dims["tokens"], 2 * dims["hidden"])

    def truth(band: slice) -> Tensor:
        return check.glu(x[band])

    if ways is None:
        return Work(lambda: tw.glu(x), lambda y: check.compare_rows(y, truth, check.ROW_BARS, "y"))
    out_format = _block_format(ways)
    return Work(lambda: tw.glu(x, out_format=out_format), lambda q: check.compare_quantized(q, truth, "y"))


def glu_backward(dims: dict[str, int], seed: int, device: str, ways: str | None = None) -> Work:
    draw = _normal(seed, device)
    x, dy = draw(dims["tokens"], 2 * dims["hidden"]), draw(dims["tokens"], dims["hidden"])

    def truth(band: slice) -> Tensor:
        return check.glu_gradient(x[band], dy[band])

    if ways is None:
        call = backward_of(tw.glu, (x,), {}, (dy,))
        return Work(call, lambda grads: check.compare_rows(grads[0], truth, check.GRADIENT_BARS, "dx"))
    call = backward_of(tw.glu, (x,), {}, (dy,), grad_format=_block_format(ways))
    return Work(call, lambda grads: check.compare_quantized(grads[0], truth, "dx"))


# -------------------------------------------------------------------------------------------------------- cross_entropy


def _logits(dims: dict[str, int], seed: int, device: str) -> tuple[Tensor, Tensor]:
    logits = _normal(seed, device)(dims["tokens"], dims["vocab"])
    generator = torch.Generator(device).manual_seed(seed + 1000)
    return logits, torch.randint(dims["vocab"], (dims["tokens"],), generator=generator, device=device)


def cross_entropy_forward(dims: dict[str, int], seed: int, device: str) -> Work:
    logits, labels = _logits(dims, seed, device)

    def verify(loss: Tensor) -> float:
        check.all_written(loss, "loss")
        picked = check.bands(loss.shape[0], height=32)
        pairs = ((loss[b], check.cross_entropy(logits[b], labels[b])) for b in picked)
        return check.compare(pairs, check.ROW_BARS[loss.dtype], 2e-6, "loss")

    return Work(lambda: tw.cross_entropy(logits, labels, reduction="none"), verify)


def cross_entropy_backward(dims: dict[str, int], seed: int, device: str) -> Work:
    """The gradient overwrites the logits; `restore` brings them back, so that every timed call meets real logits."""
    original, labels = _logits(dims, seed, device)
    logits = original.clone()
    dloss = _normal(seed + 1, device)(dims["tokens"]).float()
    options = {"reduction": "none", "inplace_backward": True}
    call = backward_of(tw.cross_entropy, (logits, labels), options, (dloss,))

    def verify(grads: tuple) -> float:
        gradient = grads[0]
        if gradient.data_ptr() != logits.data_ptr():
            raise check.Wrong("dlogits: not written over the logits")
        for part in check.chunks(*logits.shape):  # every row of a gradient sums to zero, an unwritten element does not
            sums = gradient[part].float().sum(-1).abs()
            if not bool((sums <= 1e-2 * dloss[part].abs() + 1e-5).all()):
                raise check.Wrong(f"dlogits: a row from {part.start} on sums to {float(sums.max()):.3g}")

        # The label's entry is larger than all others together: apart, neither hides an error of the other.
        def pairs(at_label: bool) -> Any:
            for band in check.bands(dims["tokens"], height=32):
                got, column = gradient[band], labels[band, None]
                want = check.cross_entropy_gradient(original[band], labels[band], dloss[band])
                if at_label:
                    yield got.gather(-1, column), want.gather(-1, column)
                else:
                    yield got.scatter(-1, column, 0.0), want.scatter(-1, column, 0.0)

        bar, ulp = check.GRADIENT_BARS[gradient.dtype], check.ULPS[gradient.dtype]
        return max(check.compare(pairs(apart), bar, ulp, "dlogits") for apart in (False, True))

    return Work(call, verify, restore=lambda: logits.copy_(original))


# ----------------------------------------------------------------------------------------------------------------- rows

BF16, FP8, FP32, INT64 = 2, 1, 4, 8


def _codes(elements: int, ways: int) -> int:
    """Bytes of blockwise FP8: a code an element and a scale for each 128 of them, once for each way."""
    return ways * (elements * FP8 + elements // check.BLOCK * FP32)


def _rms_norm_bytes(d: dict[str, int]) -> int:
    return BF16 * (d["tokens"] + 1) * d["hidden"]  # x and the weight


Traffic = Callable[[dict[str, int]], tuple[int, int]]
TRAFFIC: dict[str, Traffic] = {
    "rms_norm_fwd": lambda d: (_rms_norm_bytes(d), BF16 * d["tokens"] * d["hidden"]),
    "rms_norm_bwd": lambda d: (_rms_norm_bytes(d) + BF16 * d["tokens"] * d["hidden"], _rms_norm_bytes(d)),
    "rms_norm_quant_fwd": lambda d: (_rms_norm_bytes(d), _codes(d["tokens"] * d["hidden"], 2)),
    "rms_norm_quant_row_fwd": lambda d: (_rms_norm_bytes(d), _codes(d["tokens"] * d["hidden"], 1)),
    "silu_fwd": lambda d: (BF16 * d["tokens"] * 2 * d["hidden"], BF16 * d["tokens"] * d["hidden"]),
    "silu_bwd": lambda d: (BF16 * d["tokens"] * 3 * d["hidden"], BF16 * d["tokens"] * 2 * d["hidden"]),
    "silu_quant_fwd": lambda d: (BF16 * d["tokens"] * 2 * d["hidden"], _codes(d["tokens"] * d["hidden"], 2)),
    "silu_quant_bwd": lambda d: (BF16 * d["tokens"] * 3 * d["hidden"], _codes(d["tokens"] * 2 * d["hidden"], 2)),
    # logits and labels in, loss out; then logits, labels, the loss's gradient and the rows' logsumexp in, gradient out
    "cross_entropy_fwd": lambda d: (d["tokens"] * (BF16 * d["vocab"] + INT64), FP32 * d["tokens"]),
    "cross_entropy_bwd": lambda d: (
        d["tokens"] * (BF16 * d["vocab"] + INT64 + 2 * FP32),
        BF16 * d["tokens"] * d["vocab"],
    ),
    "launch_rms_norm": lambda d: (0, 0),
}

HIDDEN = tuple({"tokens": t, "hidden": h} for h in (4096, 7168) for t in (4096, 16384))
VOCAB = tuple({"tokens": t, "vocab": v} for v in (32000, 151936) for t in (4096, 16384))
NARROW = {"tokens": 8192, "hidden": 2048}
WIDE = {"tokens": 8192, "vocab": 157184}
SMALL = {"tokens": 64, "hidden": 512}

# name, op, builder, metric, goal, the goal's own dimensions, further ones (held to the goal less SLACK)
FAMILIES = (
    ("rms_norm_fwd", "rms_norm", rms_norm_forward, "fraction", 0.92, NARROW, HIDDEN),
    ("rms_norm_bwd", "rms_norm", rms_norm_backward, "fraction", 0.82, NARROW, HIDDEN),
    ("rms_norm_quant_fwd", "rms_norm", partial(rms_norm_forward, ways="both"), "fraction", 0.70, NARROW, HIDDEN),
    ("rms_norm_quant_row_fwd", "rms_norm", partial(rms_norm_forward, ways="row"), "fraction", 0.92, NARROW, HIDDEN),
    ("silu_fwd", "glu", glu_forward, "fraction", 0.96, NARROW, HIDDEN),
    ("silu_bwd", "glu", glu_backward, "fraction", 0.96, NARROW, HIDDEN),
    ("silu_quant_fwd", "glu", partial(glu_forward, ways="both"), "fraction", 0.88, NARROW, HIDDEN),
    ("silu_quant_bwd", "glu", partial(glu_backward, ways="both"), "fraction", 0.76, NARROW, HIDDEN),
    ("cross_entropy_fwd", "cross_entropy", cross_entropy_forward, "fraction", 0.97, WIDE, VOCAB),
    ("cross_entropy_bwd", "cross_entropy", cross_entropy_backward, "fraction", 0.96, WIDE, VOCAB),
    ("launch_rms_norm", "rms_norm", rms_norm_launch, "vs:torch_add", 0.90, SMALL, ()),
)


def _cases() -> dict[str, Case]:
    found = {}
    for name, op, build, metric, goal, own, further in FAMILIES:
        for dims in (own, *further):
            full = f"{name}/{'x'.join(map(str, dims.values()))}"
            held = goal if dims is own else round(goal - SLACK, 4)
            found[full] = Case(full, op, dims, build, TRAFFIC[name](dims), metric, held)
    return found


CASES: dict[str, Case] = _cases()
