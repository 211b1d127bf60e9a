"""The keys of RWKV-7, of the rows k of a projection and the learning rates a of each column in context:

    keys = k * (1 + (a - 1) * ka);  removal = u / max(|u|, 1e-12) with u = k * kk and |u| the length of each head;
    removal_a = removal * a

What is learned is written at `keys`; what was known is read at `removal` and taken away at `removal_a`. Backward, with
g = dremoval + dremoval_a * a, s the sum over a head of g * removal, and n = max(|u|, 1e-12):

    du = (g - removal * s) / n, without s where |u| < 1e-12;  dk = dkeys * (1 + (a - 1) * ka) + du * kk
    da = dkeys * k * ka + dremoval_a * removal;  dkk = sum over rows of du * k;  dka = sum over rows of dkeys * k * (a - 1)
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...core.draw import Draw
from ...core.signature import at_least
from ...core.target import Target
from ...core.tensor import cdiv, power_of_two, rows, vector
from ...device.dependent import begin_dependent
from ...device.groups import columns, load_weight, sum_group
from ...device.matrices import Matrix
from ...gemm.tiles import matrix
from ...op import Bars, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.kernel import kernel
from ..norm.modulated_norm_backward import sum_norm_shares

LEAST = tl.constexpr(1e-12)  # the length that a head is divided by at least, as `torch.nn.functional.normalize` has it


def reference(k: Tensor, kk: Tensor, a: Tensor, ka: Tensor, *, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """RWKV-7's (keys, removal, removal_a): `k * (1 + (a - 1) * ka)`, `k * kk` of each head brought to length 1, that times `a`.

    `k` and `a` are [..., hidden], `kk` and `ka` [hidden], and hidden is `heads` equal parts. All in fp32, each result rounded once
    to the dtype of `k`. A head shorter than 1e-12 is divided by that.
    """
    wide, rate = upcast(k), upcast(a)  # once: autograd would round a gradient for each use of k itself
    each = (wide * upcast(kk)).unflatten(-1, (heads, k.shape[-1] // heads))
    removal = F.normalize(each, dim=-1, eps=LEAST.value).flatten(-2)
    made = wide * (1 + (rate - 1) * upcast(ka)), removal, removal * rate
    return made[0].to(k.dtype), made[1].to(k.dtype), made[2].to(k.dtype)


def inputs(draw: Draw) -> dict[str, Any]:
    heads = draw.option("heads", 1, 4, 3)
    tokens, hidden = draw.dim("tokens"), cdiv(draw.dim("hidden"), heads) * heads
    return {
        "k": draw.tensor(tokens, hidden),
        "kk": draw.tensor(hidden, scale=0.5, shift=1.0),
        "a": draw.uniform(tokens, hidden),
        "ka": draw.tensor(hidden, scale=0.5, shift=1.0),
        "heads": heads,
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------

WIDEST = 4096  # columns of a head that one program holds in registers; a wider head is read twice
RUN = 512  # columns of whole heads that a program has side by side, and bytes that a load of a warp covers
SIZE = 1024  # elements of the backward's tiles
ON_SM = 16  # warps of the backward on one SM: at 128 registers a thread
REDUCING = 1024  # bytes of shared memory that the backward's sums take beside its stages, at most
MOST_ROWS = 2**30  # row numbers and those of a last, partial block are 32-bit


class Given(NamedTuple):
    """What a pass of its own found of heads too wide for one program, [rows, heads]: 1 / n and, backward, the sum of g * u;
    `Given()` is nothing, where a program finds it by itself."""

    inverse: Any = None
    cross: Any = None


class Upstream(NamedTuple):
    """The gradients of results, as matrices; each none where the result was not used."""

    keys: Matrix = Matrix()
    removal: Matrix = Matrix()
    removal_a: Matrix = Matrix()


class Gradients(NamedTuple):
    """Where gradients go, None where one is not wanted: dense rows, and shares [bands, hidden] of what is summed over rows."""

    k: Any = None
    kk: Any = None
    a: Any = None
    ka: Any = None


def across_of(a) -> int:
    """How many programs all heads of a block of rows take, of the widest ones several each."""
    return cdiv(a.HEADS, a.GB) * (cdiv(a.D, a.BLOCK) if a.GIVEN.inverse is not None else 1)


def _default(a) -> dict:
    size = a.GB * a.BLOCK
    # 16 elements a thread
    return {"ROWS": max(1, 2048 // size), "num_warps": min(16, max(4, size // 512))}


def rows_backward(across: int) -> tuple[int, int]:
    """(ROWS, warps) of the backward's programs, whose tiles have so many columns: 8 elements a thread."""
    ROWS = max(1, SIZE // across)
    return ROWS, min(16, max(4, ROWS * across // 256))


def _default_backward(a) -> dict:
    ROWS, warps = rows_backward(a.GB * a.BLOCK)
    read = (a.K, a.A, *(t for t in a.UPSTREAM if t.data is not None))
    stage = ROWS * a.GB * a.BLOCK * sum(t.data.element_size() for t in read)
    room = Target.at(a.K.data.device).shared_memory // max(1, ON_SM // warps)
    # All stages but one are in shared memory
    return {"ROWS": ROWS, "STAGES": 3 if 2 * stage + REDUCING <= room else 1, "num_warps": warps}


@triton.jit
def load_rows(X, row, col, inside):
    """Columns `col` of rows of X, in fp32; 0 where X is none."""
    x = tl.zeros(inside.shape, tl.float32)
    if X.data is not None:
        at = row.to(tl.int64)[:, None, None] * X.stride_r + col.to(tl.int64) * X.stride_c
        x = tl.load(X.data + at, inside, 0.0).to(tl.float32)
    return x


@triton.jit
def store_rows(Y, y, row, col, inside, HIDDEN):
    """Columns `col` of rows of Y, which lie one after the other."""
    if Y is not None:
        at = row.to(tl.int64)[:, None, None] * HIDDEN + col
        tl.store(Y + at, y.to(Y.dtype.element_ty), inside)


@triton.jit
def inverse_of(square):
    """1 / max(length, LEAST) of the sum of squares, NaN where that is."""
    return tl.minimum(tl.rsqrt(square), 1.0 / LEAST, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def place_of(program, HEADS, D, GIVEN, BLOCK: tl.constexpr, GB: tl.constexpr, ROWS: tl.constexpr):
    """(block of rows, first head of a program, heads [n] and the first of its columns in each of them)."""
    parts = tl.cdiv(D, BLOCK) if GIVEN.inverse is not None else 1
    across = tl.cdiv(HEADS, GB) * parts
    unit = program % across
    first = unit // parts * GB
    return program // across, first, first + tl.arange(0, ROWS * GB) % GB, unit % parts * BLOCK


@kernel(grid=lambda a: (cdiv(a.M, a.ROWS) * across_of(a),), tokens=("M",), default=_default, dependent=True)
def rwkv_keys_forward(
    M, HEADS, D, K, KK, A, KA, GIVEN, KEYS, REMOVAL, REMOVAL_A, BLOCK: tl.constexpr, LINE: tl.constexpr, GB: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """A program has GB heads of ROWS rows, a tile [heads, BLOCK / LINE, LINE]; of heads whose lengths are GIVEN, BLOCK columns."""
    begin_dependent(DEPENDENT)
    block, _, head, start = place_of(tl.program_id(0), HEADS, D, GIVEN, BLOCK, GB, ROWS)
    row = block * ROWS + tl.arange(0, ROWS * GB) // GB
    c = columns(start, BLOCK, LINE)
    col = (head * D)[:, None, None] + c
    live = (row < M) & (head < HEADS)
    inside = live[:, None, None] & (c < D)
    # All loads before the sum, which everything after it waits for
    k = load_rows(K, row, col, inside)
    a = load_rows(A, row, col, inside)
    kk = load_weight(KK, c, col, inside, False)
    ka = load_weight(KA, c, col, inside, False)
    u = k * kk
    if GIVEN.inverse is not None:
        inverse = tl.load(GIVEN.inverse + row.to(tl.int64) * HEADS + head, live, 0.0)
    else:
        inverse = inverse_of(sum_group(u * u))
    removal = u * inverse[:, None, None]
    store_rows(KEYS, k * (1.0 + (a - 1.0) * ka), row, col, inside, HEADS * D)
    store_rows(REMOVAL, removal, row, col, inside, HEADS * D)
    store_rows(REMOVAL_A, removal * a, row, col, inside, HEADS * D)


@kernel(grid=lambda a: (a.BANDS * across_of(a),), tokens=("M", "BANDS"), default=_default_backward)
def rwkv_keys_backward(
    M, HEADS, D, K, KK, A, KA, GIVEN, UPSTREAM, GRADIENTS, BANDS, PDL: tl.constexpr, BLOCK: tl.constexpr, LINE: tl.constexpr,
    GB: tl.constexpr, ROWS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """A program takes GB heads of every BANDS-th block of rows and keeps its shares of dkk and dka in registers. PDL: the launch
    that sums the shares may begin, and waits by itself."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    band, first, head, start = place_of(tl.program_id(0), HEADS, D, GIVEN, BLOCK, GB, ROWS)
    c = columns(start, BLOCK, LINE)
    col = (head * D)[:, None, None] + c
    there = (head < HEADS)[:, None, None] & (c < D)
    kk = load_weight(KK, c, col, there, False)
    ka = load_weight(KA, c, col, there, False)
    dkk = tl.zeros(there.shape, tl.float32)
    dka = tl.zeros(there.shape, tl.float32)
    for block in tl.range(band, tl.cdiv(M, ROWS), BANDS, num_stages=STAGES):
        row = block * ROWS + tl.arange(0, ROWS * GB) // GB
        live = (row < M) & (head < HEADS)
        inside = live[:, None, None] & (c < D)
        k = load_rows(K, row, col, inside)
        a = load_rows(A, row, col, inside)
        dkeys = load_rows(UPSTREAM.keys, row, col, inside)
        dremoval_a = load_rows(UPSTREAM.removal_a, row, col, inside)
        g = load_rows(UPSTREAM.removal, row, col, inside) + dremoval_a * a
        u = k * kk
        if GIVEN.inverse is not None:
            at = row.to(tl.int64) * HEADS + head
            inverse = tl.load(GIVEN.inverse + at, live, 0.0)
            cross = tl.load(GIVEN.cross + at, live, 0.0)
        else:
            inverse = inverse_of(sum_group(u * u))
            cross = sum_group(g * u)
        # A head that is divided by LEAST is not divided by its length: nothing of the gradient goes through that
        s = tl.where(inverse == 1.0 / LEAST, 0.0, cross * inverse)[:, None, None]
        removal = u * inverse[:, None, None]
        du = (g - removal * s) * inverse[:, None, None]
        dkk += du * k
        dka += dkeys * (k * (a - 1.0))
        store_rows(GRADIENTS.k, dkeys * (1.0 + (a - 1.0) * ka) + du * kk, row, col, inside, HEADS * D)
        store_rows(GRADIENTS.a, dkeys * (k * ka) + dremoval_a * removal, row, col, inside, HEADS * D)
    own = first + tl.arange(0, GB)
    to = own[:, None, None] * D + c
    shares = (own < HEADS)[:, None, None] & (c < D)
    at_once: tl.constexpr = (ROWS, GB, BLOCK // LINE, LINE)
    if GRADIENTS.kk is not None:
        tl.store(GRADIENTS.kk + band.to(tl.int64) * (HEADS * D) + to, tl.sum(tl.reshape(dkk, at_once), axis=0), shares)
    if GRADIENTS.ka is not None:
        tl.store(GRADIENTS.ka + band.to(tl.int64) * (HEADS * D) + to, tl.sum(tl.reshape(dka, at_once), axis=0), shares)


@kernel(grid=lambda a: (a.M * a.HEADS,), tokens=("M",), default=lambda a: {"BLOCK": 2048, "num_warps": 8})
def rwkv_keys_lengths(M, HEADS, D, K, KK, A, UPSTREAM, GIVEN, BLOCK: tl.constexpr):
    """What is GIVEN of each head, that is too wide for one program; the second number unless it is None."""
    row = tl.program_id(0) // HEADS + tl.arange(0, 1)
    head = tl.program_id(0) % HEADS + tl.arange(0, 1)
    square = tl.zeros([1, 1, BLOCK], tl.float32)
    cross = tl.zeros([1, 1, BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        c = columns(start, BLOCK, BLOCK)
        col = (head * D)[:, None, None] + c
        u = load_rows(K, row, col, c < D) * load_weight(KK, c, col, c < D, False)
        square += u * u
        if GIVEN.cross is not None:
            g = load_rows(UPSTREAM.removal, row, col, c < D)
            if UPSTREAM.removal_a.data is not None:
                g += load_rows(UPSTREAM.removal_a, row, col, c < D) * load_rows(A, row, col, c < D)
            cross += g * u
    at = row.to(tl.int64) * HEADS + head
    tl.store(GIVEN.inverse + at, inverse_of(sum_group(square)))
    if GIVEN.cross is not None:
        tl.store(GIVEN.cross + at, sum_group(cross))


# ---- host ------------------------------------------------------------------------------------------------------------


class Split(NamedTuple):
    """How programs share the columns: of GB heads each BLOCK, in lines of LINE that a load of a warp covers."""

    BLOCK: int
    LINE: int
    GB: int


def split_columns(k: Tensor, heads: int) -> Split:
    D = k.shape[-1] // heads
    BLOCK = 2048 if D > WIDEST else power_of_two(D)
    GB = 1 if D > WIDEST else max(1, min(heads & -heads, RUN // BLOCK))  # no more heads than divide them all
    return Split(BLOCK, min(BLOCK, RUN // k.element_size()), GB)


def lengths(k: Tensor, kk: Tensor, a: Tensor, heads: int, upstream: Upstream | None = None) -> Given:
    """What programs must be given: nothing, but of heads too wide for one."""
    M, D = k.shape[0], k.shape[1] // heads
    if D <= WIDEST:
        return Given()
    made = (torch.empty(M, heads, dtype=torch.float32, device=k.device) for _ in range(1 if upstream is None else 2))
    given = Given(*made)
    rwkv_keys_lengths(M, heads, D, matrix(k), kk, matrix(a), upstream or Upstream(), given)
    return given


def forward(k: Tensor, kk: Tensor, a: Tensor, ka: Tensor, *, heads: int) -> tuple[Tensor, Tensor, Tensor]:
    keys, removal, removal_a = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(3))
    if k.numel():
        K, A, KK, KA = rows(k), rows(a), vector(kk), vector(ka)
        given = lengths(K, KK, A, heads)
        rwkv_keys_forward(
            K.shape[0], heads, K.shape[1] // heads, matrix(K), KK, matrix(A), KA, given, keys, removal, removal_a,
            **split_columns(K, heads)._asdict(),
        )  # fmt: skip
    return keys, removal, removal_a


def backward(saved: SimpleNamespace, dkeys: Tensor | None, dremoval: Tensor | None, dremoval_a: Tensor | None) -> tuple:
    """All gradients. dkk and dka are summed in fp32, per program and then over programs, without atomics."""
    k, a, heads = saved.k, saved.a, saved.heads
    like = {"k": k, "kk": saved.kk, "a": a, "ka": saved.ka}
    made = {n: torch.empty(t.shape, dtype=t.dtype, device=t.device) for n, t in like.items() if n in saved.needs}
    sums = [n for n in ("kk", "ka") if n in made]
    if not k.numel():
        for n in sums:
            made[n].zero_()
        return tuple(made.get(n) for n in like)
    K, A, KK, KA = rows(k), rows(a), vector(saved.kk), vector(saved.ka)
    (M, hidden), split, target = K.shape, split_columns(K, heads), Target.at(k.device)
    upstream = Upstream(*(matrix(None if d is None else rows(d)) for d in (dkeys, dremoval, dremoval_a)))
    given = lengths(K, KK, A, heads, upstream)
    ROWS, warps = rows_backward(split.GB * split.BLOCK)
    across = cdiv(heads, split.GB) * cdiv(hidden // heads, split.BLOCK)
    bands = min(
        ON_SM // warps * target.sms // across, cdiv(M, ROWS)
    )  # what runs at once: one more would be a second wave
    bands = max(4, bands // 4 * 4)  # so that the shares of each sum begin at whole words; some may be of no rows
    shares = torch.empty(len(sums), bands, hidden, dtype=torch.float32, device=k.device) if sums else ()
    to = Gradients(**{**made, **dict(zip(sums, shares))})
    PDL = bool(sums) and target.early_launch
    rwkv_keys_backward(
        M, heads, hidden // heads, matrix(K), KK, matrix(A), KA, given, upstream, to, bands, PDL=PDL, **split._asdict()
    )  # fmt: skip
    if sums:
        sum_norm_shares(shares, tuple(made[n] for n in sums), 1, bands, hidden, PDL=PDL)
    return tuple(made.get(n) for n in like)


def check(k, kk, a, ka, heads) -> None:
    hidden, count = k.shape[-1], math.prod(k.shape[:-1])
    if hidden % heads:
        raise ValueError(f"rwkv_keys: heads must divide the {hidden} columns of k, got {heads}")
    if count > MOST_ROWS:
        raise ValueError(f"rwkv_keys: k has {count} rows, but a launch takes at most {MOST_ROWS}")


rwkv_keys = Op(
    "rwkv_keys", reference, inputs, Triton(forward, backward, single), check=check,
    where={"k": "float[... hidden]", "kk": "float[hidden]", "a": "float[... hidden]", "ka": "float[hidden]", "heads": at_least(1)},
    results=dict.fromkeys(("keys", "removal", "removal_a"), "k[... hidden]"), out=Out(contiguous=("keys", "removal", "removal_a")),
    gradient=Gradient(of=("k", "kk", "a", "ka"), through=("keys", "removal", "removal_a")), bars=Bars("B"), sharding=Sharding(),
)  # fmt: skip
