"""`moe_permute` of what is quantised already: rows[r] = codes[source[r]], row_scale[r] = scale[source[r]]."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.tensor import cdiv, power_of_two
from ...op import Bars, Op, Out, Triton, single
from ...runtime.kernel import kernel
from .moe_map import LIVE, MAP_ROWS, NUMBERS, check_routing, draw_routing, find_rows, named_sizes
from .moe_permute import build_rows, check_tokens, probs_of_rows, row_probs_row, spread, unused_rows


def reference(
    codes: Tensor,
    scale: Tensor,
    routing: Tensor,
    probs: Tensor | None = None,
    *,
    experts: int | None = None,
    topk: int | None = None,
    align: int = 16,
    capacity: int | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(rows, row_scale [capacity, blocks], row_probs, row_map, source, offsets, overflow): as `moe_permute`, of bytes `codes`
    with their scales [tokens, blocks]. Padding rows and their scales are 0. No gradient."""
    found = find_rows(routing, experts, topk, align, capacity)
    token = torch.where(found.source < 0, codes.shape[0], found.source)
    rows, row_scale = (F.pad(t, (0, 0, 0, 1))[token] for t in (codes, scale))
    return rows, row_scale, probs_of_rows(routing, probs, found), *found[:4]


def inputs(draw: Draw) -> dict:
    tokens, hidden = draw.dim("tokens"), draw.dim("hidden")
    drawn = draw_routing(draw, tokens)
    probs = draw.maybe("probs", lambda: draw.uniform(tokens, drawn["routing"].shape[1], low=0.1))
    codes = draw.integers(tokens, hidden, high=256, dtype=torch.uint8)
    scale = draw.uniform(tokens, cdiv(hidden, 4), low=0.1, dtype=torch.float32)
    return {"codes": codes, "scale": scale, "probs": probs, **drawn}


def _shape(a) -> dict:
    BLOCK = min(64, power_of_two(a.N))
    return {"ROWS": 1024 // BLOCK, "BLOCK": BLOCK, "num_warps": 4}


@kernel(grid=lambda a: (cdiv(a.R, a.ROWS) * cdiv(a.N, a.BLOCK),), tokens=("R",), default=_shape)
def moe_take_scales(S, SOURCE, OFFSETS, OUT, N, R, E, stride_t, stride_n, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """OUT[row] = S[token of the row], 0 for padding: few bytes, so that reading them once for each row costs little."""
    across = tl.cdiv(N, BLOCK)
    first = tl.program_id(0) // across * ROWS
    col = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    r, unused = unused_rows(SOURCE, OFFSETS, first, R, E, 0, ROWS)
    token = tl.load(SOURCE + r, r < R, -1)
    at = S + tl.maximum(token, 0).to(tl.int64) * stride_t + col.to(tl.int64) * stride_n
    s = tl.load(at, (token >= 0) & (col < N), 0.0)
    tl.store(OUT + r * N + col, s, ((token >= 0) | unused) & (r < R) & (col < N))


def forward(codes, scale, routing, probs, *, experts, topk, align, capacity) -> tuple:
    found, row_probs = build_rows("moe_permute_codes", routing, probs, experts, topk, align, capacity)
    (capacity,), (E,) = found.source.shape, found.offsets.shape
    rows = spread(codes, found.row_map, found.source, found.offsets, None, 0, early=True)
    row_scale = torch.empty((capacity, scale.shape[1]), dtype=torch.float32, device=scale.device)
    moe_take_scales(scale, found.source, found.offsets, row_scale, scale.shape[1], capacity, E, *scale.stride())
    return rows, row_scale, row_probs, *found[:4]


def check(codes, scale, routing, probs, *, experts, topk, align, capacity) -> None:
    check_tokens("moe_permute_codes", "codes", codes, routing)
    check_routing("moe_permute_codes", routing, experts, topk, align, capacity)


RESULTS = {
    "rows": "codes[capacity hidden]", "row_scale": "scale[capacity blocks]", "row_probs": row_probs_row, **MAP_ROWS,
}  # fmt: skip
moe_permute_codes = Op(
    "moe_permute_codes", reference, inputs, Triton(forward, None, single),
    groups="offsets", where={
        "codes": "uint8[tokens hidden]", "scale": "float32[tokens blocks]", "routing": "int_or_bool[rows slots]",
        "probs": "float[tokens slots]", **NUMBERS,
    },
    results=RESULTS, sizes=named_sizes, out=Out(contiguous=tuple(RESULTS), live=LIVE), check=check, bars=Bars("G"),
)  # fmt: skip
