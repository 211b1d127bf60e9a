"""`attention` and `attention_lse` as one calls them: by numbers, which is the op itself, or with `math` by codes.

Codes are made here, or come as `Quantized` operands, and are taken apart; `coded.py` has the kernels.
"""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple, get_args

import torch
from torch import Tensor

from ..core.format import Quantized
from ..core.target import Target
from ..core.tensor import name_of
from ..op import Op
from .attention import Backend
from .attention import attention as attention_op
from .attention import attention_lse as attention_lse_op
from .coded import attention_codes, attention_codes_pv
from .coded_rows import Scaled, attention_blocks, attention_mean, attention_rows, dtype_of
from .hopper import coded as hopper_coded
from .preference import LIBRARY
from .seen import keys_there

Math = Literal["auto", "int8", "fp8", "int8_pv", "fp8_pv"]
MATHS = ("auto", "int8", "fp8", "int8_pv", "fp8_pv")
LENGTHS = ("kv_len", "cu_seqlens_q", "cu_seqlens_k")  # what says which keys there are
SEEN = ("causal", "left", "right", *LENGTHS)  # and which of them are seen


class Rows(NamedTuple):
    """Codes, their scales [batch, tokens, heads] and the mean that was taken off; numbers have neither."""

    codes: Tensor
    scale: Tensor | None = None
    mean: Tensor | None = None


def attention(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    scale: float | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: Backend = "auto",
    math: Math = "auto",
    smooth: bool = False,
    out: Any = None,
) -> Tensor:
    """`softmax(scale * q @ k.T) @ v` of each head, as the op `attention` has it, whose arguments and rules these are.

    `math` other than "auto" multiplies codes, forward only: "int8" and "fp8" (e4m3) those of q and k, made in one pass over k and
    where q is read; "int8_pv" and "fp8_pv" those of weights and v too. Each token and head has a scale; e4m3 of k and v has one for
    each 128 tokens of a sequence, where there is no mask and no `kv_len` of rows. `smooth` takes the
    mean over the keys that there are off k before it is quantised, which changes no score but for the rounding: what all keys share
    costs nothing. `backend="hopper"` has kernels for all of these but "int8_pv"; "auto" takes them where they were measured to be
    the faster.

    q, k and v may be `Quantized`, `int8("row")` or `fp8("row")`, and `math="auto"` is then what they are. `mx("e4m3")` is emulated:
    widened to its dtype, which holds it, and multiplied in that.
    """
    return attend(
        attention_op, q, k, v, math, smooth, backend, out, scale=scale, causal=causal, left=left, right=right, softcap=softcap,
        sink=sink, slopes=slopes, mask=mask, kv_len=kv_len, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip


def attention_lse(
    q: Tensor | Quantized,
    k: Tensor | Quantized,
    v: Tensor | Quantized,
    *,
    scale: float | None = None,
    causal: bool = False,
    left: int | None = None,
    right: int | None = None,
    softcap: float = 0.0,
    sink: Tensor | None = None,
    slopes: Tensor | None = None,
    mask: Tensor | None = None,
    kv_len: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    backend: Backend = "auto",
    math: Math = "auto",
    smooth: bool = False,
    out: Any = None,
) -> tuple[Tensor, Tensor]:
    """(o, lse): `attention`, and the logarithm of the sum of what enters each softmax, which has whole keys, smoothed or not."""
    return attend(
        attention_lse_op, q, k, v, math, smooth, backend, out, scale=scale, causal=causal, left=left, right=right, softcap=softcap,
        sink=sink, slopes=slopes, mask=mask, kv_len=kv_len, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k,
    )  # fmt: skip


def attend(
    op: Op, q: Any, k: Any, v: Any, math: Math, smooth: bool, backend: Backend, out: Any, **given: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """What `op`, one of the two, gives: by its own kernels, or by those of codes where there are any or some are asked for."""
    if math == "auto" and not smooth and not any(isinstance(t, Quantized) for t in (q, k, v)):
        return op.function(q, k, v, **given, backend=backend, out=out)
    both = op is attention_lse_op
    made = by_codes(op.name, q, k, v, math, smooth, backend, given, out if both or out is None else (out, None))
    return made if both else made[0]


def by_codes(
    op: str, q: Any, k: Any, v: Any, math: str, smooth: bool, backend: str, given: dict[str, Any], out: Any
) -> tuple[Tensor, Tensor]:
    """(o, lse) of a call that has codes, or asks for them."""
    if math not in MATHS:
        raise ValueError(f"{op}: math must be one of {', '.join(MATHS)}, got {math!r}")
    if backend not in get_args(Backend):
        raise ValueError(f"{op}: backend must be one of {', '.join(get_args(Backend))}, got {backend!r}")
    for name, t in (("q", q), ("k", k), ("v", v)):
        if torch.is_grad_enabled() and t.requires_grad:
            raise ValueError(f"{op}: codes have no gradient for {name}: pass {name}.detach()")
    if any(isinstance(t, Quantized) and t.format.name == "mx" for t in (q, k, v)):
        return widened(op, q, k, v, math, smooth, backend, given, out)
    if backend == LIBRARY:
        raise ValueError(
            f"{op}: backend {LIBRARY} multiplies no codes: math must be auto, smooth False, and q, k and v numbers"
        )
    rows = {name: taken_apart(op, name, t) for name, t in (("q", q), ("k", k), ("v", v))}
    found = {kind_of(r) for r in rows.values()} - {None}
    kind, _, pv = math.partition("_")
    if math == "auto":
        if not found:
            raise ValueError(f"{op}: smooth is for keys that are quantised: give math")
        kind, pv = found.pop(), "pv" if rows["v"].scale is not None else ""
    if found - {kind}:
        raise ValueError(f"{op}: operands in {' and '.join(sorted(found))} cannot be multiplied in {math}")
    if rows["v"].scale is not None and not pv:
        raise ValueError(f"{op}: v is codes, which math={math!r} does not multiply: that is {kind}_pv")
    if smooth and rows["k"].scale is not None:
        raise ValueError(f"{op}: smooth takes the mean off k before it is quantised, and k is codes")
    own = {"out_dtype": name_of(q.dtype)} if rows["q"].scale is not None and rows["v"].scale is not None else {}
    own["scaled"] = scaled_by(kind, [rows["k"], *([rows["v"]] if pv else [])], given)
    last = attention_codes_pv if pv else attention_codes
    if not torch.compiler.is_compiling():  # before anything is launched, as the last op would say it
        made = {name: expected(r, kind, name == "k" or name == "v" and bool(pv)) for name, r in rows.items()}
        values = last.signature.bind(operands(made), {**own, **given, "backend": backend})
        last.validate(values)
        if backend == "hopper" and not taken_by_hopper(values):
            raise ValueError(f"{op}: backend hopper does not take these arguments with math {math!r}")
    if own["scaled"] == "block":
        coded = partial(blocks_of, length=q.shape[1], **{name: given[name] for name in SEEN})
    else:
        coded = partial(attention_rows.function, kind=kind)
    if rows["k"].scale is None:
        there = keys_there(q, k, *(given[name] for name in LENGTHS)) if smooth else None
        mean = attention_mean.function(rows["k"].codes, there) if smooth else None
        rows["k"] = Rows(*coded(rows["k"].codes, mean), mean)
    if pv and rows["v"].scale is None:
        rows["v"] = Rows(*coded(rows["v"].codes, None))
    return last.function(*operands(rows), **own, **given, backend=backend, out=out)


def scaled_by(kind: str, coded: list[Rows], given: dict[str, Any]) -> Scaled:
    """What has a scale of its own: blocks of keys, where codes in e4m3 are made here and it is known before which keys are seen."""
    by_row = torch.is_tensor(given["kv_len"]) and given["kv_len"].dim() == 2
    told = given["mask"] is None and not by_row
    return "block" if kind == "fp8" and told and all(rows.scale is None for rows in coded) else "key"


def blocks_of(x: Tensor, mean: Tensor | None, length: int, **given: Any) -> tuple[Tensor, Tensor]:
    return attention_blocks.function(x, length, mean, **given)


def taken_by_hopper(values: dict[str, Any]) -> bool:
    """Whether Hopper's kernels take a call whose keys are codes of which there is one, which will lie side by side."""
    a = SimpleNamespace(**values)
    if a.k.stride(-1) == 0:
        a.k = torch.empty(a.k.shape, dtype=a.k.dtype, device="meta")
    return hopper_coded.fits(Target.at(a.q.device), a)


def operands(rows: dict[str, Rows]) -> tuple:
    """What the ops of codes take by position."""
    q, k, v = rows["q"], rows["k"], rows["v"]
    return q.codes, k.codes, v.codes, k.scale, q.scale, v.scale, k.mean


def expected(rows: Rows, kind: str, coded: bool) -> Rows:
    """Rows as they are multiplied: numbers that will be `coded` by codes of their shape, of which there is one."""
    if rows.scale is not None or not coded:
        return rows
    codes, scale = (rows.codes.new_empty(1, dtype=dtype) for dtype in (dtype_of(kind), torch.float32))
    return Rows(codes.expand(rows.codes.shape), scale.expand(rows.codes.shape[:-1]))


def widened(
    op: str, q: Any, k: Any, v: Any, math: str, smooth: bool, backend: str, given: dict[str, Any], out: Any
) -> tuple[Tensor, Tensor]:
    """MXFP8 storage, math in the dtype that it stands for."""
    if math != "auto" or smooth:
        raise ValueError(
            f"{op}: mx operands are widened: math must be auto, and smooth False, got {math!r} and {smooth}"
        )
    wide = [t.dequantize() if isinstance(t, Quantized) else t for t in (q, k, v)]
    return attention_lse_op.function(*wide, **given, backend=backend, out=out)


def taken_apart(op: str, name: str, t: Any) -> Rows:
    if not isinstance(t, Quantized):
        return Rows(t)
    format = t.format
    by_row = getattr(format, "granularity", None) == "row" and format.ways == "row"
    if not by_row or format.name not in ("int8", "fp8") or t.data.dtype not in (torch.int8, torch.float8_e4m3fn):
        raise ValueError(f'{op}: {name} must be int8("row"), fp8("row") or mx("e4m3"), got {format}')
    return Rows(t.data, t.scale.reshape(t.shape[:-1]))


def kind_of(rows: Rows) -> str | None:
    return None if rows.scale is None else "int8" if rows.codes.dtype == torch.int8 else "fp8"


attention.op, attention_lse.op = attention_op, attention_lse_op
