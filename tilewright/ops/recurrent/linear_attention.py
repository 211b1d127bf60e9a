"""Linear attention over sequences: of every token and head

    S = decay * S + k v^T,  o = scale * q S;   delta rule: v becomes beta * (v - k (decay * S)) first;
    with a bonus: o = scale * (q S + (q . (bonus * k)) v) of the state before.

`linear.py` has it token by token. Of kernels, `linear_tokens.py` has it so for short sequences; `linear_chunks.py` and
`linear_backward.py` by chunks, with the formulas of both directions, and `linear_columns.py` forward with a decay of each column.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ...core.debug import check_ends
from ...core.declaration import Part
from ...core.draw import Draw
from ...op import Bars, Cost, Gradient, Op, Triton, single
from . import linear_tokens
from .linear import by_column, check_bonus, check_heads, run, scale_of
from .linear_backward import backward
from .linear_chunks import forward as by_chunks
from .linear_columns import forward as by_columns
from .places import check_marks, draw_marks, sequence_count


def reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor | None = None,
    beta: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear attention of `q`, `k` [batch, length, key_heads, key_dim] and `v` [batch, length, heads, value_dim]; (o, last state).

    A head's state S, fp32, has a row for each column of k and a column for each of v. Token by token S = e**log_decay * S + k v^T,
    and o = scale * q S. `log_decay`, at most 0, is [heads] (lightning attention) or [batch, length, heads] (Mamba-2, whose q, k, v
    are C, B and dt * x); without it nothing decays. `beta` [batch, length, heads] makes it the delta rule: v becomes
    beta * (v - k (e**log_decay * S)), which is the gated delta net. Heads share key heads evenly: head h takes
    `h // (heads // key_heads)`. `scale` is 1 / sqrt(key_dim) if not given; `normalize` divides rows of q and k by their lengths.

    A `log_decay` of each column, [batch, length, heads, key_dim], is GLA's and, with beta, Kimi's delta attention; `bonus`
    [heads, key_dim] goes with it, without beta, and is RWKV-6's: o = scale * (q S + (q . (bonus * k)) v) of the state before the
    token. These have no gradient: give them detached tensors, or use `torch.no_grad()`.

    `state` [batch, heads, key_dim, value_dim] is what a sequence begins with, 0 if not given, and the last state goes on from there
    in the next call, or in `linear_attention_step`. Packed sequences lie one after the other in a batch of 1, sequence s from
    `cu_seqlens[s]` to `cu_seqlens[s + 1]`, and states are then [sequences, ...]. An empty sequence keeps its state; tokens in no
    sequence give 0. Any strides; key_dim up to 256. An infinity counts as NaN, and of 16-bit numbers may show as either. Gradients
    of q, k, v, log_decay, beta and state, of both results, bitwise repeatable.

    Sequences of up to 8 tokens, and packed ones of up to 4 on average, are walked through token by token, others by chunks. Shapes
    alone decide: a call gives the same bits every time. Where a sequence is cut may change how it is rounded, in fp32 before the
    one rounding of o.
    """
    return run(q, k, v, log_decay, beta, bonus, state, scale, normalize, cu_seqlens)


def reference_columns(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    beta: Tensor | None = None,
    *,
    bonus: Tensor | None = None,
    state: Tensor | None = None,
    scale: float | None = None,
    normalize: bool = False,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`linear_attention` with a `log_decay` of each column, [batch, length, heads, key_dim], which has no gradient."""
    return run(q, k, v, log_decay, beta, bonus, state, scale, normalize, cu_seqlens)


def options(names: str, *rows: tuple[Any, ...]) -> tuple[dict[str, Any], ...]:
    return tuple(dict(zip(names.split(), row)) for row in rows)


# Options in which every two choices meet. Sizes go with them, since each row makes binaries of its own: by columns and heads it is
# decided which strides are multiples of 16. Decays are fp32, as models have them; nets keep parameters in other precisions as well.
SINGLE = torch.float32
TOGETHER = options(
    "decay beta state cu_seqlens normalize width wider batch_drawn heads_drawn shared marks decay_dtype",
    (None, False, False, False, False, 32, 1, 1, 2, 2, 3, None),
    ("head", False, False, True, True, 20, 1, 1, 1, 1, 4, SINGLE),
    ("token", True, False, True, False, 20, 2, 1, 2, 2, 3, SINGLE),
    (None, True, True, True, True, 16, 2, 1, 2, 1, 3, None),
    ("head", True, True, False, False, 32, 2, 2, 1, 1, 3, SINGLE),
    ("token", False, True, False, True, 16, 1, 1, 3, 1, 3, SINGLE),
)
COLUMNS_TOGETHER = options(
    "with_bonus beta state cu_seqlens normalize width wider batch_drawn heads_drawn shared marks decay_dtype",
    (False, False, False, False, False, 32, 1, 1, 2, 2, 3, SINGLE),
    (False, True, False, True, True, 20, 1, 1, 1, 1, 4, SINGLE),
    (True, False, True, False, True, 16, 1, 1, 2, 2, 3, SINGLE),
    (False, False, True, True, True, 16, 2, 1, 2, 1, 3, SINGLE),
    (True, False, False, True, False, 20, 2, 1, 1, 1, 3, SINGLE),
    (False, True, True, False, False, 32, 2, 1, 3, 1, 3, SINGLE),
)
FEW = 8  # tokens that are all in the last sequence, the others empty: the interpreter takes as long for one as for 64


def some_of(rows: tuple[dict[str, Any], ...], dtype: torch.dtype) -> tuple[dict[str, Any], ...]:
    """All rows in bf16. In fp16 and in fp32, by which numbers are multiplied otherwise, half of them each."""
    half = len(rows) // 2
    return {torch.float16: rows[:half], torch.float32: rows[half:]}.get(dtype, rows)


def inputs(draw: Draw) -> dict[str, Any]:
    draw.together(*some_of(TOGETHER, draw.dtype))
    return arguments(draw, draw.option("decay", "head", "token", None))


def inputs_columns(draw: Draw) -> dict[str, Any]:
    draw.together(*some_of(COLUMNS_TOGETHER, draw.dtype))
    return arguments(draw, "column")


def arguments(draw: Draw, kind: str | None) -> dict[str, Any]:
    packed = draw.option("cu_seqlens", False, True)
    # Few, unless they are named: the interpreter takes 200 ms for a head of a sequence and its gradients
    batch, heads = (
        draw.dims.get(n, draw.option(f"{n}_drawn", *few)) for n, few in (("batch", (1, 2)), ("heads", (2, 1, 3)))
    )
    batch = 1 if packed else batch
    length, width = (
        draw.dim("length", (5, 1, 17, 33, 64, 66)),
        draw.dim("head_dim", (draw.option("width", 16, 32, 20),)),
    )
    width = 8 if width == 16 else width  # of which rows far apart are still within a CPU's address space
    values = draw.dims.get("value_dim", max(1, width * draw.option("wider", 1, 2, 1)))
    shared = draw.option("shared", 1, 2)
    key_heads = math.gcd(heads, draw.dims.get("key_heads", heads // math.gcd(heads, shared) if heads else 0))
    marks = draw_marks(draw, length) if packed else None
    if packed and length < FEW:
        marks[:-1] = 0
    kind = "token" if kind is None and draw.options.get("log_decay") else kind
    rows = (batch, length, heads)
    shape = {"head": (heads,), "token": rows, "column": (*rows, width)}.get(kind)
    extra = kind == "column" and draw.option("with_bonus", False, True)
    states = (sequence_count(batch, marks), heads, width, values)
    return {
        "q": draw.tensor(batch, length, key_heads, width),
        "k": draw.tensor(
            batch, length, key_heads, width, scale=0.7 * max(1, width) ** -0.5
        ),  # shorter than 1: longer ones make the delta rule grow
        "v": draw.tensor(batch, length, heads, values),
        "log_decay": None
        if shape is None
        else draw.uniform(*shape, low=-1.0, high=0.0, dtype=draw.options.get("decay_dtype")),
        "beta": None if extra else draw.maybe("beta", lambda: draw.uniform(*rows)),
        "bonus": draw.tensor(heads, width) if extra else None,
        "state": draw.maybe("state", lambda: draw.tensor(*states, dtype=torch.float32)),
        "scale": draw.option("scale", None, 0.5),
        "normalize": draw.option("normalize", False, True),
        "cu_seqlens": marks,
    }


def forward(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, *, bonus: Tensor | None, **options: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    check_ends("linear_attention", "cu_seqlens", options["cu_seqlens"], q.shape[1])
    options["scale"] = scale_of(q) if options["scale"] is None else float(options["scale"])
    if linear_tokens.is_short(v, options["cu_seqlens"]):
        return linear_tokens.forward(q, k, v, log_decay, beta, bonus=bonus, **options)
    if by_column(log_decay):
        return by_columns(q, k, v, log_decay, beta, bonus=bonus, **options)
    return by_chunks(q, k, v, log_decay, beta, **options)


def check(q, k, v, log_decay, beta, *, bonus, state, cu_seqlens, **_) -> None:
    op = "linear_attention"
    check_all(op, q, k, v, log_decay, beta, bonus, state, cu_seqlens)
    given = (q, k, v, log_decay, beta, bonus, state)
    if by_column(log_decay) and torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given):
        raise ValueError(
            f"{op}: a log_decay of each column has no gradient: pass detached tensors, or use torch.no_grad()"
        )


def check_columns(q, k, v, log_decay, beta, *, bonus, state, cu_seqlens, **_) -> None:
    op = "linear_attention_columns"
    check_all(op, q, k, v, log_decay, beta, bonus, state, cu_seqlens)
    if not by_column(log_decay):
        raise ValueError(f"{op}: log_decay must be {[*v.shape[:3], k.shape[-1]]}, got {list(log_decay.shape)}")


def check_all(
    op: str, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, bonus: Tensor | None,
    state: Tensor | None, cu_seqlens: Tensor | None,
) -> None:  # fmt: skip
    check_marks(op, "q", q.shape[0], cu_seqlens)
    check_heads(op, k, v, log_decay, v.shape[:2], columns=True)
    check_bonus(op, log_decay, beta, bonus, 4)
    if state is not None and state.shape[0] != sequence_count(q.shape[0], cu_seqlens):
        raise ValueError(
            f"{op}: state must be of {sequence_count(q.shape[0], cu_seqlens)} sequences, got {state.shape[0]}"
        )


def sensible(a: SimpleNamespace) -> dict[str, Tensor]:
    """Of the delta rule, betas from 0 to 1, which are what these have after the point, and keys no longer than 1, which `normalize`
    sees to: by others a state grows without bound, and of what overflows a rounding decides the sign."""
    if a.beta is None:
        return {}
    long = torch.linalg.vector_norm(a.k.float(), dim=-1, keepdim=True)
    k = a.k if a.normalize else (a.k / long.clamp(min=1.0)).to(a.k.dtype)
    return {"beta": a.beta.remainder(1.0), "k": k}


def flops(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor | None, beta: Tensor | None, **_) -> int:
    """Multiplications and additions of the recurrence itself: a state is read and changed, and of the delta rule read once more."""
    return 2 * v.shape[0] * v.shape[1] * v.shape[2] * q.shape[-1] * v.shape[-1] * (2 if beta is None else 3)


def parts(a: SimpleNamespace, gradients: bool) -> Iterator[Part]:
    """The heads of the first key head and of the last: gradients of decays are sums over the batch, but not over heads."""
    group = a.v.shape[2] // max(1, a.k.shape[2])
    for head in {0, a.k.shape[2] - 1} if a.v.numel() else ():
        key, own = slice(head, head + 1), slice(head * group, (head + 1) * group)
        every = slice(None)
        of_key, of_head, of_state = (every, every, key), (every, every, own), (every, own)
        decay = None if a.log_decay is None else (own,) if a.log_decay.dim() == 1 else of_head
        at = {
            "q": of_key,
            "k": of_key,
            "v": of_head,
            "o": of_head,
            "beta": of_head,
            "bonus": (own,),
            "state": of_state,
            "final": of_state,
        }
        at = {**at, "log_decay": decay}
        cut = {
            n: getattr(a, n)[at[n]]
            for n in ("q", "k", "v", "log_decay", "beta", "bonus", "state")
            if getattr(a, n) is not None
        }
        yield Part({**vars(a), **cut}, {n: place for n, place in at.items() if place is not None})


ROW = "q[batch length key_heads key_dim]"
WHERE = {
    "q": "float[batch length key_heads key_dim]", "k": ROW, "v": "q[batch length heads value_dim]", "log_decay": "float[...?]",
    "beta": "float[batch length heads]", "bonus": "float[heads key_dim]",
    "state": "float32|float64[sequences heads key_dim value_dim]", "cu_seqlens": "int[marks]",
}  # fmt: skip
RESULTS = {"o": "q[batch length heads value_dim]", "final": "wide(q)[sequences heads key_dim value_dim]"}


def sizes(a: SimpleNamespace) -> dict[str, int]:
    return {"sequences": sequence_count(a.q.shape[0], a.cu_seqlens)}


linear_attention = Op(
    "linear_attention", reference, inputs, Triton(forward, backward, single), check=check, where=WHERE,
    results=RESULTS, sizes=sizes, cost=Cost(flops=flops, backward=2.5),
    gradient=Gradient(of=("q", "k", "v", "log_decay", "beta", "state"), through=("o", "final")),
    bars=Bars("I", gradient="M", rounds=True, felt=("length",), parts=parts, sensible=sensible),
)  # fmt: skip

linear_attention_columns = Op(
    "linear_attention_columns", reference_columns, inputs_columns, Triton(forward, None, single), check=check_columns,
    where=WHERE, results=RESULTS, sizes=sizes, cost=Cost(flops=flops),
    bars=Bars("I", rounds=True, felt=("length",), parts=parts, sensible=sensible), internal=True,
)  # fmt: skip
