"""Some tokens of `linear_cross_entropy`: its kernels, and how their logits go by in chunks of the vocabulary.

Chunks are transposed, [chunk, tokens]: then the weight's gradient is a product of one with all tokens, summed in fp32. Of each
block of logits of a token `encode` takes the largest, `top`, the sum of exp(z - top), and exp(z - top) itself, the `code`,
rounded to the dtype of the factors; `slopes` makes the gradient of the logits of codes, in place, or of the logits. A label's
p near 1 is the top of its block, whose code is exactly 1, so that p - 1 does not show the rounding. On Hopper one launch,
`gemm/hopper/logits.py`, makes the codes of the whole vocabulary, and logits are in memory never.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...core.tensor import cdiv, power_of_two
from ...device.labels import load_if, read_label
from ...device.softmax import LN2, LOG2E, cap, finite_or_zero, tanh
from ...gemm.hopper import logits as hopper_logits
from ...gemm.summed import product
from ...runtime.kernel import kernel
from .cross_entropy import Terms, store_row

# ---------------------------------------------------------------- on the device

BLOCK_V = 512  # rows of the vocabulary with a `top` in common, where `encode` makes it
BLOCK_T = 128  # tokens of a program of the backward, whose part of the bias's gradient is one row

# Tiles are [rows of the vocabulary, tokens]. WIDTH is T rounded up to 16, and so are the rows in memory: a mask that may end
# anywhere would make every load one of two bytes. What lies between T and WIDTH is read and written, and means nothing.


@triton.jit
def add_bias(x, BIAS, row, inside):
    if BIAS is not None:
        x += tl.load(BIAS + row, inside, 0.0).to(tl.float32)[:, None]
    return x


@kernel(
    grid=lambda a: (cdiv(a.T, a.TOKENS), cdiv(a.COUNT, a.BLOCK)),
    tokens=("FIRST", "COUNT", "T", "ignore_index"),
    default=lambda a: {"TOKENS": 32, "num_warps": 8},
)
def linear_cross_entropy_encode(
    X, BIAS, Y, TOP, CODE, TOTAL, OWN, SLANT, FIRST, COUNT, T, WIDTH, N, stride_x, stride_c, ignore_index, softcap,
    BLOCK: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """A block of the logits X [COUNT, T] of the vocabulary from FIRST on: its sums, its codes, z of the labels in it."""
    row = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = row < COUNT
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = inside[:, None] & (t < WIDTH)[None, :]
    block = FIRST // BLOCK + tl.program_id(1)
    if BIAS is not None:
        BIAS += FIRST
    x = tl.load(X + row.to(tl.int64)[:, None] * stride_x + t[None, :], live, 0.0)
    z = tl.where(inside[:, None], cap(add_bias(x, BIAS, row, inside), softcap), -float("inf"))
    top = tl.max(z, 0)
    base = finite_or_zero(top)
    code = tl.exp2((z - base[None, :]) * LOG2E)
    if CODE is not None:
        C = CODE + row.to(tl.int64)[:, None] * stride_c + t[None, :]
        tl.store(C, code.to(CODE.dtype.element_ty), live)
    at = block.to(tl.int64) * T + t
    tl.store(TOP + at, top, t < T)
    if TOTAL is not None:
        tl.store(TOTAL + at, tl.sum(code, 0), t < T)
        y, counts, _ = read_label(Y, t, T, T, N, 0, 1, ignore_index)
        mine = counts & (y // BLOCK == block)
        own = load_if(X + (y - FIRST) * stride_x + t, mine)
        if BIAS is not None:
            own += load_if(BIAS + (y - FIRST), mine)
        tl.store(OWN + t, cap(own, softcap), mine)
    if SLANT is not None:
        tl.store(SLANT + at, tl.sum(tl.where(inside[:, None], z - base[None, :], 0.0), 0), t < T)


@kernel(
    grid=lambda a: (cdiv(a.T, a.TOKENS),),
    tokens=("BLOCKS", "T", "ignore_index"),
    default=lambda a: {"TOKENS": 32, "STEP": 32, "num_warps": 4},
)
def linear_cross_entropy_merge(
    TOP, TOTAL, OWN, SLANT, Y, LOSS, STATS, BLOCKS, T, N, ignore_index, TERMS, BLOCK: tl.constexpr, TOKENS: tl.constexpr,
    STEP: tl.constexpr,
):  # fmt: skip
    """The losses of a few tokens from the sums of their blocks and OWN, z of their labels."""
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)[None, :]
    _, counts, ignored = read_label(Y, t, T, T, N, 0, 1, ignore_index)
    own = load_if(OWN + t, counts)
    anchor = finite_or_zero(own)
    m = tl.full([1, TOKENS], -float("inf"), tl.float32)
    s = tl.zeros([1, TOKENS], tl.float32)
    d = tl.zeros([1, TOKENS], tl.float32)
    for start in range(0, BLOCKS, STEP):
        block = start + tl.arange(0, STEP)[:, None]
        inside = (block < BLOCKS) & (t < T)
        at = block.to(tl.int64) * T + t
        top = tl.load(TOP + at, inside, -float("inf"))
        new = tl.maximum(m, tl.max(top, 0, keep_dims=True))
        base = finite_or_zero(new)
        terms = tl.load(TOTAL + at, inside, 0.0) * tl.exp2((top - base) * LOG2E)
        s = s * tl.exp2((m - base) * LOG2E) + tl.sum(terms, 0, keep_dims=True)
        m = new
        if SLANT is not None:
            size = tl.minimum(N - block * BLOCK, BLOCK).to(tl.float32)
            slant = tl.load(SLANT + at, inside, 0.0) + size * (finite_or_zero(top) - anchor)
            d += tl.sum(tl.where(inside, slant, 0.0), 0, keep_dims=True)
    store_row(m, s, d, own, 1.0, None, LOSS, None, STATS, t, counts, ignored, T, N, TERMS)


@kernel(
    grid=lambda a: (cdiv(a.T, a.TOKENS), cdiv(a.COUNT, a.ROWS)),
    tokens=("FIRST", "COUNT", "T", "stride_s", "stride_g", "ignore_index"),
    default=lambda a: {"ROWS": 32, "num_warps": 4},
)
def linear_cross_entropy_backward(
    X, BIAS, TOP, Y, STATS, DENOMINATOR, G, DX, PART, FIRST, COUNT, T, WIDTH, N, stride_x, stride_d, stride_s, stride_g,
    ignore_index, TERMS, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of DX [COUNT, T] from logits X, or from codes X and their TOP, which it may overwrite."""
    softcap = TERMS.softcap
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    inside = row < COUNT
    t = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = inside[:, None] & (t < WIDTH)[None, :]
    y, counts, _ = read_label(Y, t, T, T, N, 0, 1, ignore_index)
    largest = load_if(STATS + t, counts)
    spread = load_if(STATS + stride_s.to(tl.int64) + t, counts)
    g = load_if(G + t.to(tl.int64) * stride_g, counts)
    if DENOMINATOR is not None:
        g = tl.where(counts, tl.div_rn(g, tl.zeros_like(g) + tl.load(DENOMINATOR)), 0.0)
    own = g * TERMS.label_share
    all = g * (2.0 * TERMS.z_loss) * (largest + spread * LN2)
    if TERMS.class_share is not None:
        all += g * TERMS.class_share * N
    mine = row[:, None] == (y - FIRST).to(tl.int32)[None, :]
    x = tl.load(X + row.to(tl.int64)[:, None] * stride_x + t[None, :], live, 0.0).to(tl.float32)
    if TOP is not None:
        block = (FIRST + tl.program_id(1) * ROWS) // BLOCK
        top = load_if(TOP + block.to(tl.int64) * T + t, counts)
        dx = x * ((own + all) * tl.exp2((top - largest) * LOG2E - spread))[None, :]
        dx = tl.where(mine, dx - own[None, :], dx)
    else:
        if BIAS is not None:
            BIAS += FIRST
        x = add_bias(x, BIAS, row, inside)
        u = x
        if softcap is not None:
            u = tanh(x * (1.0 / softcap))
            x = softcap * u
        p = tl.exp2((x - largest[None, :]) * LOG2E - spread[None, :])
        dx = own[None, :] * tl.where(mine, p - 1.0, p) + all[None, :] * p
    if TERMS.class_share is not None:
        dx -= (g * TERMS.class_share)[None, :]
    if softcap is not None:
        dx *= 1.0 - u * u
    dx = tl.where(counts[None, :] & inside[:, None], dx, 0.0)
    tl.store(DX + row.to(tl.int64)[:, None] * stride_d + t[None, :], dx.to(DX.dtype.element_ty), live)
    if PART is not None:
        tl.store(PART + tl.program_id(0).to(tl.int64) * N + FIRST + row, tl.sum(dx, 1), inside)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), default=lambda a: {"BLOCK": 2048, "num_warps": 4})
def linear_cross_entropy_scale(X, G, DENOMINATOR, Y, N, BLOCK: tl.constexpr):
    """Y = X * G / DENOMINATOR, but 0 where X is: an ignored token has no part in an infinite gradient."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(G).to(tl.float32)
    if DENOMINATOR is not None:
        g = tl.div_rn(g, tl.load(DENOMINATOR))
    x = tl.load(X + at, at < N, 0.0)
    tl.store(Y + at, tl.where(x == 0.0, 0.0, x * g).to(Y.dtype.element_ty), at < N)


# ---------------------------------------------------------------- on the host

SCRATCH = 32 * 2**20  # bytes of fp32 logits at a time: most of them stay in a Hopper's L2 until they are read
FEWEST, MOST = 1024, 16384  # rows of a chunk: fewer would leave a product without tiles for all processors
MOST_CODES = 256 * 2**20  # bytes of codes that may always be there, beside those in the memory of dweight
# Bytes of fp32 gradients of weight and codes of a group: with more, logits are rather computed twice
AHEAD = 32 * 10**8


def padded_count(tokens: int) -> int:
    """How many tokens a row has in memory, where it is whole 16-byte words."""
    return 16 * cdiv(tokens, 16)


def widened(hidden: Tensor) -> Tensor:
    """The tokens, followed by as many rows of zeros as `padded_count` adds."""
    more = padded_count(hidden.shape[0]) - hidden.shape[0]
    return F.pad(hidden, (0, 0, 0, more)) if more else hidden


def chunk_of(tokens: int) -> int:
    """How many rows of the vocabulary go by at a time, a multiple of BLOCK_V."""
    most = SCRATCH // (4 * max(1, padded_count(tokens)))
    return min(MOST, max(FEWEST, power_of_two(most + 1) // 2))


def chunks(tokens: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    step = chunk_of(tokens)
    return ((at, min(at + step, stop)) for at in range(start, stop, step))


def codes_in(memory: Tensor, tokens: int) -> Tensor:
    """The memory of weight's gradient seen as codes [rows, padded tokens]. It has all rows or, if there are more tokens than
    hidden dimensions, as many whole chunks as that memory takes.

    Codes of a row begin no earlier than its gradient does: gradients that are written in order leave the codes of later rows alone.
    """
    vocab, width = memory.shape
    stride = max(width, padded_count(tokens))
    count = vocab * width // max(1, stride)
    if count < vocab:
        count -= count % chunk_of(tokens)
    return memory.view(-1)[: count * stride].view(count, stride)[:, : padded_count(tokens)]


def tokens_within(vocab: int, size: int) -> int:
    """How many tokens have codes, of `size` bytes each, that take MOST_CODES bytes at most; a multiple of BLOCK_T."""
    return BLOCK_T * max(1, MOST_CODES // max(1, vocab * size) // BLOCK_T)


def group_size(tokens: int, vocab: int, hidden: int, size: int) -> int:
    """How many tokens a group has: their codes take no more memory than a gradient of the weight, or MOST_CODES. It is a multiple
    of BLOCK_T."""
    most = max(hidden, tokens_within(vocab, size))
    return BLOCK_T * cdiv(cdiv(tokens, cdiv(tokens, most)), BLOCK_T)


def affordable(tokens: int, vocab: int, hidden: int, size: int) -> bool:
    """Whether gradients may be made with the losses: what they take beside their results is AHEAD bytes at most."""
    return vocab * (4 * hidden + size * group_size(tokens, vocab, hidden, size)) <= AHEAD


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call, or some of them, and what their gradients depend on."""

    hidden: Tensor  # [tokens, hidden]
    weight: Tensor
    bias: Tensor | None
    labels: Tensor  # [tokens]
    stats: Tensor  # [2, tokens]
    ignore_index: int
    terms: Terms
    grad: Tensor | None = None  # one number, or one per token
    denominator: Tensor | None = None
    part: Tensor | None = None  # of the bias's gradient: a row for BLOCK_T tokens
    wide: Tensor | None = None  # hidden and rows of zeros: odd sizes would cost products several times as much
    at_once: bool = False  # codes of the whole vocabulary by one launch of `hopper_logits`

    def __len__(self) -> int:
        return self.hidden.shape[0]

    @property
    def block(self) -> int:
        """Rows of the vocabulary with a top in common."""
        return hopper_logits.BLOCK if self.at_once else BLOCK_V

    def some(self, start: int, stop: int) -> Tokens:
        """The tokens from `start` to `stop`; `start` is a multiple of BLOCK_T."""
        grad = self.grad if self.grad.dim() == 0 else self.grad[start:stop]
        part = None if self.part is None else self.part[start // BLOCK_T :]
        stats, labels = self.stats[:, start:stop], self.labels[start:stop]
        hidden, wide = self.hidden[start:stop], self.wide[start : start + padded_count(stop - start)]
        return replace(self, hidden=hidden, labels=labels, stats=stats, grad=grad, part=part, wide=wide)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.hidden.device)

    def scratch(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Uninitialised memory for one chunk, of `count` rows at most."""
        return self.empty(min(count, chunk_of(len(self))), padded_count(len(self)), dtype=dtype)

    def logits(self, start: int, stop: int, scratch: Tensor) -> Tensor:
        out = scratch[: stop - start]
        product(self.weight[start:stop], self.wide.t(), out)
        return out

    def encode(self, first: int, x: Tensor, tops: Tensor, codes: Tensor | None, *sums: Tensor | None) -> None:
        """The tops and codes of the logits x and, if wanted, the `sums` over them: totals, z of the labels, slants."""
        linear_cross_entropy_encode(
            x, self.bias, self.labels, tops, codes, *(sums or (None,) * 3), first, x.shape[0], len(self), x.shape[1],
            self.weight.shape[0], x.stride(0), 0 if codes is None else codes.stride(0), self.ignore_index,
            self.terms.softcap, BLOCK=BLOCK_V,
        )  # fmt: skip

    def encode_all(self, count: int, codes: Tensor, tops: Tensor, *sums: Tensor | None) -> None:
        """Fill the tops of the first `count` rows of the vocabulary, their codes as far as `codes` has rows, and sums if wanted."""
        if self.at_once:
            rows = self.weight[:count]
            hopper_logits.encode(self.wide, rows, self.bias, self.labels, self.ignore_index, codes, tops, *sums)
            return
        scratch = self.scratch(count)
        for start, stop in chunks(len(self), 0, count):
            kept = codes[start:stop] if start < codes.shape[0] else None
            self.encode(start, self.logits(start, stop, scratch), tops, kept, *sums)

    def losses(self, loss: Tensor, codes: Tensor) -> Tensor:
        """Fill `loss`, the stats, and `codes` with those of the first rows of the vocabulary. Returns the tops of all blocks."""
        count = self.weight.shape[0]
        blocks = cdiv(count, self.block)
        tops, total = (self.empty(blocks, len(self)) for _ in range(2))
        own, slant = self.empty(len(self)), None if self.terms.class_share is None else self.empty(blocks, len(self))
        self.encode_all(count, codes, tops, total, own, slant)
        linear_cross_entropy_merge(
            tops, total, own, slant, self.labels, loss, self.stats, blocks, len(self), count, self.ignore_index, self.terms,
            BLOCK=self.block,
        )  # fmt: skip
        return tops

    def slopes(self, first: int, x: Tensor, tops: Tensor | None, out: Tensor) -> None:
        """out = the gradient of the logits of rows from `first` on, from them or from codes; `out` may be x."""
        linear_cross_entropy_backward(
            x, None if tops is not None else self.bias, tops, self.labels, self.stats, self.denominator, self.grad, out,
            self.part, first, x.shape[0], len(self), x.shape[1], self.weight.shape[0], x.stride(0), out.stride(0),
            self.stats.stride(0), self.grad.dim(), self.ignore_index, self.terms, BLOCK=self.block, TOKENS=BLOCK_T,
        )  # fmt: skip

    def fill(self, first: int, out: Tensor) -> None:
        """out = the gradient of the logits of rows from `first` on, from logits."""
        scratch = self.scratch(out.shape[0])
        for start, stop in chunks(len(self), first, first + out.shape[0]):
            self.slopes(start, self.logits(start, stop, scratch), None, out[start - first : stop - first])

    def fill_first(self, out: Tensor, tops: Tensor | None = None) -> None:
        """out = the gradient of the logits of the first rows; `tops`: they are there as codes already. They come by codes in any
        case, so that the bits are the same, but for a softcap, whose slope codes do not tell."""
        if self.terms.softcap is not None:
            self.fill(0, out)
            return
        if tops is None:
            tops = self.empty(cdiv(out.shape[0], self.block), len(self))
            self.encode_all(out.shape[0], out, tops)
        self.slopes(0, out, tops, out)
