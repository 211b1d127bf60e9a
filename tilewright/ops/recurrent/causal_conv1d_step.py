"""One token more for each of many causal convolutions: y = act(bias + sum over j of weight[j] * input[j]), whose inputs are the
last width - 1 of a state and the token; the state then drops its oldest input and takes the token in."""

from __future__ import annotations

from typing import Any, Literal

import torch
import triton.language as tl
from torch import Tensor

from ...core.debug import check_indices
from ...core.draw import Draw
from ...core.tensor import cdiv, power_of_two
from ...device.activation import activate
from ...op import Bars, Cost, Op, Triton, single, upcast
from ...runtime.kernel import kernel
from .causal_conv1d import WIDEST, States, bias_of, states_of, taps, taps_of
from .pool import draw_slots, known_slots, put_slots, slot_of, take_slots


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    state: Tensor,
    slots: Tensor | None = None,
    *,
    act: Literal["silu"] | None = None,
) -> tuple[Tensor, Tensor]:
    """Convolve a token `x` [tokens, hidden] with what `state` [pool, hidden, columns] holds at its slot, and write the token there.

    `weight` is [hidden, width], and a state has at least width - 1 columns, the latest input last, of which those are read; all
    move by one. Token i has slot `slots[i]`, or i. No two tokens may have the same slot; one out of range, of which nothing is read
    or written, gives 0.
    """
    width, columns = weight.shape[1], state.shape[2]
    known = known_slots(state, slots, x.shape[0], x.device)
    before = take_slots(state, slots, known)
    seen = torch.cat([before, x[..., None]], 2)
    taken = upcast(seen[..., columns + 1 - width :]) * upcast(weight)
    z = taken.sum(-1) if bias is None else taken.sum(-1) + upcast(bias)
    y = z * torch.sigmoid(z) if act == "silu" else z
    y = torch.where(known[:, None], y, 0.0).to(x.dtype)
    return y, put_slots(state, slots, known, seen[..., 1:].to(state.dtype))


def inputs(draw: Draw) -> dict[str, Any]:
    tokens, hidden, width = draw.dim("tokens"), draw.dim("hidden"), draw.option("width", 4, 3, 1, 2)
    pool = tokens + draw.option("spare", 1, 0)
    return {
        "x": draw.tensor(tokens, hidden),
        "weight": draw.tensor(hidden, width, scale=0.5),
        "bias": draw.maybe("bias", lambda: draw.tensor(hidden)),
        "state": draw.tensor(pool, hidden, width - 1 + draw.option("more_columns", 0, 1)),
        "slots": draw.maybe("slots", lambda: draw_slots(draw, tokens, pool)),
        "act": draw.option("act", "silu", None),
    }


@kernel(
    grid=lambda a: (a.TOKENS * a.BLOCKS,), tokens=("TOKENS", "POOL"), default=lambda a: {"num_warps": 4},
)  # fmt: skip
def causal_conv1d_step_tokens(
    X, stride_x, stride_xc, TAPS, STATE, Y, stride_y, stride_yc, SLOTS, stride_s, TOKENS, POOL, C, BLOCKS, ACT: tl.constexpr,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, HELD: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Some columns of one token. COLUMNS inputs are held, of which the last WIDTH - 1 are read."""
    token = (tl.program_id(0) // BLOCKS).to(tl.int64)
    c = (tl.program_id(0) % BLOCKS) * BLOCK_C + tl.arange(0, BLOCK_C)
    slot, known = slot_of(SLOTS, token, stride_s, POOL)
    inside = c < C
    wide = c.to(tl.int64)
    x = tl.load(X + token * stride_x + wide * stride_xc, inside, 0.0)
    w = taps_of(TAPS, c, C, WIDTH)
    z = bias_of(TAPS, c, C) + x.to(tl.float32) * w[WIDTH - 1]
    at = STATE.data + slot * STATE.stride_s + wide * STATE.stride_c
    for j in tl.static_range(WIDTH - 1):
        to = at + tl.full([], COLUMNS + 1 - WIDTH + j, tl.int64) * STATE.stride_w
        z += tl.load(to, inside & known, 0.0).to(tl.float32) * w[j]
    y = z
    if ACT is not None:
        y = activate(z, 1.0, ACT)
    y = tl.where(known, y, 0.0)
    tl.store(Y + token * stride_y + wide * stride_yc, y.to(Y.dtype.element_ty), inside)
    if COLUMNS > 0:
        j = tl.arange(0, HELD)
        both = at[:, None] + j.to(tl.int64)[None, :] * STATE.stride_w
        moved = tl.load(both + STATE.stride_w, (inside & known)[:, None] & (j < COLUMNS - 1)[None, :], 0.0)
        tl.debug_barrier()  # another thread's load may be of what this one stores
        moved = tl.where((j == COLUMNS - 1)[None, :], x.to(moved.dtype)[:, None], moved)
        tl.store(both, moved, (inside & known)[:, None] & (j < COLUMNS)[None, :])


def forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, slots: Tensor | None, *, act: str | None
) -> Tensor:
    (tokens, hidden), (pool, _, columns), width = x.shape, state.shape, weight.shape[1]
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if slots is not None:
        check_indices("causal_conv1d_step", "slots", slots, -1, pool)
    if not x.numel():
        return y
    block = min(256, max(16, power_of_two(hidden)))
    causal_conv1d_step_tokens(
        x, *x.stride(), taps(weight, bias), states_of(state) if state.numel() else States(x, 0, 0, 0), y, *y.stride(), slots,
        0 if slots is None else slots.stride(0), tokens, pool, hidden, cdiv(hidden, block), ACT=act, WIDTH=width,
        COLUMNS=columns, HELD=power_of_two(columns), BLOCK_C=block,
    )  # fmt: skip
    return y


def check(x, weight, bias, state, slots, *, act) -> None:
    op, width = "causal_conv1d_step", weight.shape[1]
    if not 1 <= width <= WIDEST:
        raise ValueError(f"{op}: weight must have 1 to {WIDEST} taps for each column, got {width}")
    if not width - 1 <= state.shape[2] <= WIDEST:
        raise ValueError(f"{op}: state must have {width - 1} to {WIDEST} columns, got {state.shape[2]}")
    if slots is None and state.shape[0] < x.shape[0]:
        raise ValueError(
            f"{op}: state has {state.shape[0]} slots, fewer than the {x.shape[0]} tokens of x, and no slots say which"
        )


def moved(x, weight, bias, state, slots, *, act) -> tuple[int, int]:
    """Bytes read and written: of tokens and their states, and of the weight once."""
    each = x.shape[0] * state.shape[1] * state.shape[2] * state.element_size()
    given = sum(t.numel() * t.element_size() for t in (x, weight, bias, slots) if t is not None)
    return given + each, x.numel() * x.element_size() + each


causal_conv1d_step = Op(
    "causal_conv1d_step", reference, inputs, Triton(forward, None, single), check=check, writes=("state",),
    where={
        "x": "float[tokens hidden]", "weight": "float[hidden width]", "bias": "float[hidden]",
        "state": "x[pool hidden columns]", "slots": "int[tokens]",
    },
    results={"y": "x[tokens hidden]"}, cost=Cost(moved), bars=Bars("A"),
)  # fmt: skip
