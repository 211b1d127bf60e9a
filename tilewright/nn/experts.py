"""The feed-forward of each expert, for the tokens that go to it: y[t] = sum over the experts e of token t of
down[e] @ (probs[t, e] * act(gate) * up), where [gate | up] = gate_up[e] @ x[t].

Rows grouped by expert go through two grouped products with `glu` between them. Backward, with dy[t] at each row r of token t:

    dact = dy @ down;  ddown = dy.T @ act;  [dgate | dup], dprobs from `glu`;  dgate_up = [dgate | dup].T @ rows
    dx[t] = sum over the rows r of t of [dgate | dup] @ gate_up

In FP8 the factors of all six products are e4m3 codes, of rows in blocks of 128 along the inner dimension and of weights in blocks
of 128x128, each rounded once, as it is made; sums are fp32, and what leaves a product is in the dtype of x. No count comes to
the host.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import Tensor

from ..core.draw import Draw
from ..core.format import Quantized
from ..core.signature import above, at_least
from ..core.tensor import cdiv, name_of
from ..formats.fill import fill
from ..formats.fp8 import fp8
from ..gemm.grouped_inner import grouped_mm_inner, grouped_mm_inner_fp8
from ..gemm.grouped_rows import grouped_mm_rows, grouped_mm_rows_fp8
from ..op import Bars, Cost, Gradient, Op, Out, Sharding, Triton, single, upcast
from ..ops.activation.glu import glu
from ..ops.moe.moe_map import check_routing, find_rows
from ..ops.moe.moe_permute import backward as permute_backward
from ..ops.moe.moe_permute import moe_permute, probs_of_rows, produce, spread, sum_rows
from ..ops.quantise.quantize import quantize
from .expert_codes import BLOCK, blocks_of, quantised, transposed_blocks

ALIGN = {"input": 1, "fp8": BLOCK}  # of the rows of an expert
CODES = {ways: fp8("1x128", ways=ways) for ways in ("row", "col", "both")}
OP = "moe_feed_forward"


def reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    routing: Tensor | None = None,
    probs: Tensor | None = None,
    gate_up_codes: Tensor | None = None,
    gate_up_scale: Tensor | None = None,
    gate_up_codes_t: Tensor | None = None,
    down_codes: Tensor | None = None,
    down_scale: Tensor | None = None,
    down_codes_t: Tensor | None = None,
    *,
    act: Literal["silu", "gelu_tanh", "gelu_erf", "relu", "sigmoid"] = "silu",
    limit: float | None = None,
    capacity: int | None = None,
    precision: Literal["input", "fp8"] = "input",
    keep: Literal["all", "product", "input"] = "all",
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Each token's sum over its experts of `down[e] @ glu(gate_up[e] @ x)`, times the router's `probs`: [tokens, hidden].

    `gate_up` is [experts, 2 * ffn, hidden], `down` [experts, hidden, ffn]. `routing` [tokens, k] has the experts of each token,
    `probs` their weights (1 without); an index outside [0, experts) is none, and the weights of a repeated one are added. Without
    `routing` there is one expert, for all tokens. `act` and `limit` are those of `glu`. `capacity` bounds the rows of all experts
    together, each expert's rounded up to 128 in FP8: pairs past it, the last in expert-major order, are dropped.

    `precision="fp8"` makes all products, those of the backward too, of e4m3 codes; it wants ffn to be a multiple of 128, and on
    a CPU changes nothing. Weights are quantised in each call, or given as codes too, as `nn.quantize_experts` makes them:
    `data`, `scale` and `data_t`. `keep` is what the backward finds: "all" that it needs; the first "product", whose factors it
    makes again; or the "input" alone. The gradients are the same, bit for bit.
    """
    wide, E = upcast(x), gate_up.shape[0]
    weights = [(upcast(gate_up[e]).t(), upcast(down[e]).t()) for e in range(E)]
    a = SimpleNamespace(x=x, gate_up=gate_up, down=down, routing=routing, precision=precision, keep=keep)
    if routing is None:
        y = glu.reference(wide @ weights[0][0], act=act, limit=limit) @ weights[0][1]
        return y.to(x.dtype), *none(x, torch.int32, torch.int32, torch.int32, torch.float32), *empty_kept(a, x.shape[0])
    found = find_rows(routing, E, None, ALIGN[precision], capacity)
    kept, y = found.rows < found.source.shape[0], torch.zeros_like(wide)
    for e, (first, second) in enumerate(weights):
        chosen = kept & (routing == e)
        there = chosen.any(1, keepdim=True)
        act_e = glu.reference(torch.where(there, wide, 0.0) @ first, act=act, limit=limit)
        act_e = act_e * torch.where(chosen, 1.0 if probs is None else upcast(probs), 0.0).sum(1, keepdim=True)
        y = y + torch.where(there, act_e @ second, 0.0)
    route = found.row_map, found.source, found.offsets, probs_of_rows(routing, probs, found).detach()
    return y.to(x.dtype), *route, *empty_kept(a, found.source.shape[0])


def none(x: Tensor, *dtypes: torch.dtype) -> tuple[Tensor, ...]:
    """Results that a call does not have."""
    return tuple(torch.empty(0, dtype=dtype, device=x.device) for dtype in dtypes)


def empty_kept(a: SimpleNamespace, rows: int) -> tuple[Tensor, ...]:
    """What the forward keeps for the backward, in its shapes and dtypes: h, rows and act with the scales of their codes."""
    (E, width, hidden), x = a.gate_up.shape, a.x
    made = [x.new_zeros(0 if a.keep == "input" else (rows, width))]
    for size in (hidden, width // 2):
        if a.keep != "all" or (a.routing is None and size == hidden and a.precision == "input"):
            made += none(x, x.dtype if a.precision == "input" else torch.float8_e4m3fn, torch.float32)
        elif a.precision == "input":
            made += [x.new_zeros(rows, size), *none(x, torch.float32)]
        else:
            count = (rows + BLOCK - 1) // BLOCK + (0 if a.routing is None else E)
            made.append(torch.zeros(size, rows, dtype=torch.float8_e4m3fn, device=x.device))
            made.append(torch.zeros(count, size, dtype=torch.float32, device=x.device))
    return tuple(made)


def inputs(draw: Draw) -> dict:
    tokens, hidden, ffn = draw.dim("tokens"), draw.dim("hidden"), draw.option("ffn", 16)
    experts, slots = draw.option("experts", 3), draw.option("slots", 2)

    def chosen() -> Tensor:
        if draw.option("best", False):  # as a router chooses: every token as many experts, all different
            return draw.tensor(tokens, experts, dtype=torch.float32).topk(slots).indices
        return draw.integers(tokens, slots, low=-1, high=experts)

    routing = draw.maybe("routing", chosen)
    probs = draw.maybe("probs", lambda: draw.uniform(tokens, slots, low=0.1, dtype=torch.float32))
    experts = experts if routing is not None else 1
    made = {
        "x": draw.tensor(tokens, hidden),
        "gate_up": draw.tensor(experts, 2 * ffn, hidden, scale=draw.option("weight_scale", 0.1)),
        "down": draw.tensor(experts, hidden, ffn, scale=draw.option("weight_scale", 0.1)),
        "routing": routing,
        "probs": None if routing is None else probs,
        "precision": draw.option("precision", "input"),
        "keep": draw.option("keep", "all", "product", "input"),
    }
    if made["precision"] == "fp8":
        made.update(codes_of(made["gate_up"], "gate_up"), **codes_of(made["down"], "down"))
    return made


def codes_of(weight: Tensor, name: str) -> dict[str, Tensor]:
    q = quantised(weight, "both")
    return {f"{name}_codes": q.data, f"{name}_scale": q.scale, f"{name}_codes_t": q.data_t}


# ---- the stages, in either precision ---------------------------------------------------------------------------------


def run(op: Op, **given: Any) -> Any:
    """An op's results for arguments that are right by construction, the others being its defaults."""
    return op.run(op.signature.bind((), given))


class Plain:
    """Stages whose factors are in the dtype of x."""

    def __init__(self, a: SimpleNamespace, route: tuple[Tensor, ...] | None = None) -> None:
        """`route`: where the tokens' rows are, if that is known already."""
        self.a, self.routed = a, a.routing is not None
        self.dtype = name_of(a.x.dtype)
        self.row_map, self.source, self.offsets, self.row_probs = route or (None,) * 4
        if not self.routed:
            self.offsets = torch.full((1,), a.x.shape[0], dtype=torch.int32, device=a.x.device)

    def begin(self, ways: str) -> Any:
        """The rows of x; finds where they are."""
        a = self.a
        if not self.routed:
            return self.take(a.x, ways)
        values = {
            "x": a.x, "routing": a.routing, "probs": a.probs, "experts": a.gate_up.shape[0], "topk": None,
            "align": ALIGN[a.precision], "capacity": a.capacity, "out_format": self.format(ways),
        }  # fmt: skip
        rows, self.row_probs, self.row_map, self.source, self.offsets, _ = moe_permute.run(values)
        return rows

    def finish(self, rows: Tensor) -> Tensor:
        return sum_rows(rows, self.row_map, None) if self.routed else rows

    def format(self, ways: str) -> None:
        return None

    def take(self, x: Tensor, ways: str) -> Any:
        """The rows of x, which may be a gradient."""
        if not self.routed:
            return x
        return spread(x, self.row_map, self.source, self.offsets, None, 0)

    def gated(self, h: Tensor, ways: str) -> Any:
        return glu.run(self.glu_values(h, self.format(ways)))

    def glu_values(self, h: Tensor, out_format: Any) -> dict[str, Any]:
        a = self.a
        return {
            "x": h, "up": None, "act": a.act, "limit": a.limit, "alpha": 1.0,
            "scale": self.row_probs if self.routed else None, "offsets": self.offsets if self.routed else None,
            "out_format": out_format,
        }  # fmt: skip

    def gated_gradient(self, h: Tensor, dact: Tensor, ways: str, needs: frozenset) -> tuple[Any, Tensor | None]:
        """([dgate | dup], gradient of the rows' probabilities)."""
        format = self.format(ways)
        extra = {} if format is None else {"grad_format": format}
        found = glu.run_backward(self.glu_values(h, None), {}, [dact], needs, **extra)
        return found[0], found[2]

    def times(self, rows: Any, name: str, back: bool = False) -> Tensor:
        """Rows times their experts' weights, transposed as a layer has them; `back` as they are."""
        weight = getattr(self.a, name)
        b = weight if back else weight.transpose(1, 2)
        return run(grouped_mm_rows, a=rows, b=b, offsets=self.offsets)

    def weight_gradient(self, dy: Any, rows: Any, name: str) -> Tensor:
        dtype = name_of(getattr(self.a, name).dtype)
        return run(grouped_mm_inner, a=dy.t(), b=rows, offsets=self.offsets, out_dtype=dtype)

    def kept(self, rows: Any, wanted: bool) -> tuple[Tensor, Tensor]:
        """What a weight's gradient needs of these rows, as two tensors."""
        if not wanted or rows is self.a.x:  # a result may not be an argument
            return none(self.a.x, self.a.x.dtype, torch.float32)
        return rows, *none(self.a.x, torch.float32)

    def restored(self, found: Tensor, scale: Tensor, shape: tuple[int, int]) -> Any:
        return found if found.shape == shape else None


class Coded(Plain):
    """Stages whose factors are FP8 codes."""

    def format(self, ways: str) -> Any:
        return CODES[ways]

    def take(self, x: Tensor, ways: str) -> Quantized:
        if not self.routed:
            return quantize.run({"x": x, "out_format": CODES[ways], "offsets": None})
        shape = self.source.shape[0], x.shape[1]
        q = CODES[ways].empty(shape, x.dtype, x.device, self.offsets.shape[0], self.offsets)
        fill(q, produce, (x, self.source, *x.stride()))
        return q

    def times(self, rows: Quantized, name: str, back: bool = False) -> Tensor:
        b, scale_b = self.weight(name, back)
        values = {"a": rows.data, "scale_a": rows.scale, "b": b, "scale_b": scale_b}
        return run(grouped_mm_rows_fp8, **values, offsets=self.offsets, out_dtype=self.dtype)

    def weight(self, name: str, back: bool) -> tuple[Tensor, Tensor]:
        """Codes [experts, inner, columns] of a weight, inner dimension contiguous, and their scales [experts, blocks of columns,
        blocks of the inner dimension]."""
        weight, codes = getattr(self.a, name), getattr(self.a, f"{name}_codes_t" if back else f"{name}_codes")
        scale = getattr(self.a, f"{name}_scale")
        if codes is None:
            q = quantised(weight, "col" if back else "row")
            codes, scale = (q.data_t, q.scale_t.t()) if back else (q.data, q.scale)
        blocks = blocks_of(scale, weight.shape)
        if back:
            return transposed_blocks(codes, weight.shape), blocks.transpose(1, 2)
        return codes.transpose(1, 2), blocks

    def weight_gradient(self, dy: Quantized, rows: Quantized, name: str) -> Tensor:
        values = {"a": dy.data_t, "scale_a": dy.scale_t, "b": rows.data_t.t(), "scale_b": rows.scale_t}
        dtype = name_of(getattr(self.a, name).dtype)
        return run(grouped_mm_inner_fp8, **values, offsets=self.offsets, out_dtype=dtype)

    def kept(self, rows: Quantized, wanted: bool) -> tuple[Tensor, Tensor]:
        if not wanted:
            return none(self.a.x, torch.float8_e4m3fn, torch.float32)
        return rows.data_t, rows.scale_t.contiguous()  # without the padding of odd sizes

    def restored(self, found: Tensor, scale: Tensor, shape: tuple[int, int]) -> Quantized | None:
        if found.shape != shape[::-1]:
            return None
        return Quantized.from_tensors(CODES["col"], self.a.x.dtype, shape, (found, scale))


STAGES = {"input": Plain, "fp8": Coded}


def forward(*, needs: frozenset, **given: Any) -> tuple[Tensor, ...]:
    a = SimpleNamespace(**given)
    do = STAGES[a.precision](a)
    # Of what is known to have frozen weights, no factor of their gradients is kept
    factors = a.keep == "all" and (not needs or bool(needs & {"gate_up", "down"}))
    ways = "both" if factors else "row"
    rows = do.begin(ways)
    h = do.times(rows, "gate_up")
    kept = do.kept(rows, factors)
    del rows
    act = do.gated(h, ways)
    y = do.finish(do.times(act, "down"))
    route = (do.row_map, do.source, do.offsets, do.row_probs)
    if not do.routed:
        route = none(a.x, torch.int32, torch.int32, torch.int32, torch.float32)
    return y, *route, h if a.keep != "input" else h.new_empty(0), *kept, *do.kept(act, factors)


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple:
    a, needs = saved, saved.needs
    do = STAGES[a.precision](a, (a.row_map, a.source, a.offsets, a.row_probs))
    (_, width, hidden), count = a.gate_up.shape, a.source.shape[0] if do.routed else a.x.shape[0]
    ddown = dgate_up = dx = dprobs = None
    rows = do.restored(a.rows, a.rows_scale, (count, hidden)) if "gate_up" in needs else None
    h = a.h
    if a.keep == "input":
        first = do.take(a.x, "both" if "gate_up" in needs else "row")
        h, rows = do.times(first, "gate_up"), first if "gate_up" in needs else None
        del first
    g = do.take(dy, "both" if "down" in needs else "row")
    dact = do.times(g, "down", back=True)
    if "down" in needs:
        act = do.restored(a.act_rows, a.act_scale, (count, width // 2))
        ddown = do.weight_gradient(g, do.gated(h, "col") if act is None else act, "down")
        del act
    del g
    if not needs & {"x", "gate_up", "probs"}:
        return None, None, ddown, None
    wanted = {"x"} if needs & {"x", "gate_up"} else set()
    wanted |= {"scale"} if "probs" in needs else set()
    ways = "both" if {"x", "gate_up"} <= needs else "col" if "gate_up" in needs else "row"
    dh, drow_probs = do.gated_gradient(h, dact, ways, frozenset(wanted))
    del dact, h
    # First what is as large as the rows: the weight's gradient stays
    dx = do.times(dh, "gate_up", back=True) if "x" in needs else None
    if do.routed:
        known = SimpleNamespace(needs=needs, routing=a.routing, row_map=a.row_map, experts=a.gate_up.shape[0])
        dx, dprobs = permute_backward(known, dx, drow_probs)
    if "gate_up" in needs:
        rows = do.take(a.x, "col") if rows is None else rows
        dgate_up = do.weight_gradient(dh, rows, "gate_up")
    return dx, dgate_up, ddown, dprobs


def check(*, x, gate_up, down, routing, probs, precision, capacity, **given) -> None:
    E, width, hidden = gate_up.shape
    if width != 2 * down.shape[2]:
        raise ValueError(
            f"{OP}: gate_up has {width} rows, but must have two for each of the {down.shape[2]} columns of down"
        )
    if routing is None:
        for name, value in (("probs", probs), ("capacity", capacity)):
            if value is not None:
                raise ValueError(f"{OP}: {name} is for tokens with a routing, which must be given too")
        if E != 1:
            raise ValueError(f"{OP}: routing must be given, for gate_up has {E} experts")
    else:
        check_routing(OP, routing, E, None, ALIGN[precision], capacity)
    if precision == "fp8" and width // 2 % BLOCK:
        raise ValueError(f"{OP}: gate_up must have a multiple of {2 * BLOCK} rows in FP8, got {width}")
    for name, weight in (("gate_up", gate_up), ("down", down)):
        check_codes(name, weight, precision, *(given[f"{name}_{part}"] for part in ("codes", "scale", "codes_t")))


def check_codes(name: str, weight: Tensor, precision: str, codes, scale, codes_t) -> None:
    there = [t is not None for t in (codes, scale, codes_t)]
    if not any(there):
        return
    if not all(there) or precision != "fp8":
        raise ValueError(
            f"{OP}: {name}_codes, {name}_scale and {name}_codes_t are given together, with precision='fp8'"
        )
    E, rows, columns = weight.shape
    if tuple(codes_t.shape) != (columns, E * rows):
        raise ValueError(f"{OP}: {name}_codes_t must be {[columns, E * rows]}, got {list(codes_t.shape)}")
    least = E * cdiv(rows, BLOCK), cdiv(columns, BLOCK)
    if scale.shape[0] < least[0] or scale.shape[1] != least[1]:
        raise ValueError(f"{OP}: {name}_scale must be {list(least)} at least, got {list(scale.shape)}")


def flops(x, gate_up, routing=None, **_) -> int:
    pairs = x.shape[0] if routing is None else routing.numel()
    return 3 * pairs * gate_up.shape[1] * gate_up.shape[2]  # a product of 2 * ffn columns and one of as many inner ones


ROUTE = ("row_map", "source", "offsets", "row_probs")
KEPT = ("h", "rows", "rows_scale", "act_rows", "act_scale")
moe_feed_forward = Op(
    OP, reference, inputs, Triton(forward, backward, single), cost=Cost(flops=flops), composite=True, planned=True,
    sibling="grouped_mm_rows",
    where={
        "x": "float[tokens hidden]", "gate_up": "float[experts+ width hidden]", "down": "float[experts+ hidden ffn]",
        "routing": "int[tokens slots]", "probs": "float[tokens slots]", "limit": above(0.0), "capacity": at_least(1),
        "gate_up_codes": "codes[experts+ width hidden]", "gate_up_scale": "float32[up_blocks hidden_blocks]",
        "gate_up_codes_t": "codes[hidden up_rows]", "down_codes": "codes[experts+ hidden ffn]",
        "down_scale": "float32[down_blocks ffn_blocks]", "down_codes_t": "codes[ffn down_rows]",
    },
    results={"y": "x[tokens hidden]"}, hidden=(*ROUTE, *KEPT),
    gradient=Gradient(
        of=("x", "gate_up", "down", "probs"),
        saves=(
            "x", "gate_up", "down", "routing", "probs", "gate_up_codes", "gate_up_scale", "gate_up_codes_t", "down_codes",
            "down_scale", "down_codes_t", *ROUTE, *KEPT,
        ),
    ),
    # A capacity is that of all ranks together
    out=Out(contiguous=("y",)), check=check, sharding=lambda a: Sharding(("tokens",) if a.capacity is None else ()),
    bars=Bars("E", gradient="E", rounds=("y",), coarse=lambda values: values["precision"] == "fp8"),
)  # fmt: skip
