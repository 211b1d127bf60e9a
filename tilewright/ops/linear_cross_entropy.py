"""Cross entropy of a linear layer's results, which are never held whole: x = hidden @ weight.T + bias, in fp32.

    z = x, or softcap * tanh(x / softcap);  loss and dx of z as in `cross_entropy`
    dhidden = dx @ weight;  dweight = dx.T @ hidden;  dbias = sum over tokens of dx

The products are torch's. The vocabulary goes by in chunks, transposed, [chunk, tokens]: then dweight is one product over all
tokens, summed in fp32 and rounded once, and needs no buffer beside itself. Of each block of 512 logits of a token the forward
takes the largest, `top`, and the sum of exp(z - top). Where the weight's gradient is wanted, exp(z - top) itself, the `code`,
rounded to the dtype of the factors, is kept in the memory that the gradient will have: as far as it fits, which is whole if
there are no more tokens than hidden dimensions. The backward makes dx of the codes in place, dhidden of those, and then
dweight of them chunk by chunk. What was not kept is computed anew. A label's p near 1 is the top of its block, whose code is
exactly 1, so that p - 1 does not show the rounding.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Literal

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_labels
from ..core.draw import Draw
from ..core.kernel import kernel
from ..core.op import Op, Triton, last_backward, single, upcast
from ..core.signature import above, at_least, between
from ..core.tensor import cdiv, power_of_two, rows, vector
from ..device.labels import load_if, read_label
from ..device.softmax import LN2, LOG2E, cap, finite_or_zero, tanh
from .cross_entropy import cross_entropy_reduce, losses, numbers, store_row
from .rms_norm import sum_columns


def reference(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    z_loss: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """`cross_entropy(hidden @ weight.T + bias, labels)` without the memory of the logits; see there for the options.

    The logits are fp32, not rounded to the dtype of `hidden` and `weight`, which must be the same. The gradient of `weight`
    is summed over all tokens in fp32, rounded once, and takes no memory beside its own. If it is wanted, an eager forward
    takes that memory already and works in it. Products of fp32 tensors follow `torch.set_float32_matmul_precision`.
    """
    logits = upcast(hidden) @ upcast(weight).t()
    if bias is not None:
        logits = logits + upcast(bias)
    loss, stats, denominator = losses(logits, labels, ignore_index, reduction, label_smoothing, softcap, z_loss, None)
    return loss, stats, denominator, hidden.new_empty(0), stats.new_empty(0)


def inputs(draw: Draw) -> dict:
    tokens, vocab = draw.dim("tokens"), draw.dim("vocab")
    ignore_index = draw.option("ignore_index", -100, 0)
    labels = draw.integers(tokens, high=vocab)
    ignored = draw.uniform(tokens, dtype=torch.float32) < draw.option("ignored", 0.25, 0.0, 1.0)
    return {
        "hidden": draw.tensor(tokens, "hidden"),
        "weight": draw.tensor(vocab, "hidden", scale=draw.option("weight_scale", 0.1, 0.5)),
        "labels": torch.where(ignored, ignore_index, labels).to(draw.option("index", torch.int64, torch.int32)),
        "bias": draw.maybe("bias", lambda: draw.tensor(vocab)),
        "ignore_index": ignore_index,
        "reduction": draw.option("reduction", "none", "mean", "sum"),
        "label_smoothing": draw.option("label_smoothing", 0.0, 0.1),
        "softcap": draw.option("softcap", None, 5.0),
        "z_loss": draw.option("z_loss", 0.0, 1e-2),
    }


# ---------------------------------------------------------------- on the device

BLOCK_V = 512  # rows of the vocabulary with a `top` in common
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
    TOP, TOTAL, OWN, SLANT, Y, LOSS, STATS, BLOCKS, T, N, ignore_index, keep, spill, z_loss, BLOCK: tl.constexpr,
    TOKENS: tl.constexpr, STEP: tl.constexpr,
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
    store_row(m, s, d, own, 1.0, None, LOSS, None, STATS, t, counts, ignored, T, N, keep, spill, z_loss)


@kernel(
    grid=lambda a: (cdiv(a.T, a.TOKENS), cdiv(a.COUNT, a.ROWS)),
    tokens=("FIRST", "COUNT", "T", "stride_s", "stride_g", "ignore_index"),
    default=lambda a: {"ROWS": 32, "num_warps": 4},
)
def linear_cross_entropy_backward(
    X, BIAS, TOP, Y, STATS, DENOMINATOR, G, DX, PART, FIRST, COUNT, T, WIDTH, N, stride_x, stride_d, stride_s, stride_g,
    ignore_index, keep, spill, softcap, z_loss, BLOCK: tl.constexpr, TOKENS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A tile of DX [COUNT, T] from logits X, or from codes X and their TOP, which it may overwrite."""
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
    own = g * keep
    all = g * (2.0 * z_loss) * (largest + spread * LN2)
    if spill is not None:
        all += g * spill * N
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
    if spill is not None:
        dx -= (g * spill)[None, :]
    if softcap is not None:
        dx *= 1.0 - u * u
    dx = tl.where(counts[None, :] & inside[:, None], dx, 0.0)
    tl.store(DX + row.to(tl.int64)[:, None] * stride_d + t[None, :], dx.to(DX.dtype.element_ty), live)
    if PART is not None:
        tl.store(PART + tl.program_id(0).to(tl.int64) * N + FIRST + row, tl.sum(dx, 1), inside)


# ---------------------------------------------------------------- on the host

SCRATCH = 32 * 2**20  # bytes of fp32 logits at a time: most of them stay in a Hopper's L2 until they are read
FEWEST, MOST = 1024, 16384  # rows of a chunk: fewer would leave a product without tiles for all processors
HELD = 256 * 2**20  # bytes of codes at a time where there is no memory of dweight to keep them in
FULL = 132 * 128 * 256  # elements of a product that has a tile for every processor of a Hopper


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or out + a @ b, summed in fp32 and rounded once."""
    if a.is_meta:
        return
    if not a.is_cuda or torch.version.hip:  # there torch has no fp32 result of low-precision factors
        made = upcast(a).contiguous() @ upcast(b).contiguous()
        out.add_(made) if add else out.copy_(made)
    elif out.dtype == torch.float32 == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif out.dtype == a.dtype:
        if out.numel() < FULL:  # cuBLAS may split such a sum and, by torch's default, add the parts in low precision
            out.copy_(torch.mm(a, b, out_dtype=torch.float32))
        else:
            torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)


def padded(tokens: int) -> int:
    """The tokens of a row in memory: whole 16-byte words."""
    return 16 * cdiv(tokens, 16)


def widened(hidden: Tensor) -> Tensor:
    """Tokens and rows of zeros after them, as many as are in memory."""
    more = padded(hidden.shape[0]) - hidden.shape[0]
    return F.pad(hidden, (0, 0, 0, more)) if more else hidden


def chunk_of(tokens: int) -> int:
    """Rows of the vocabulary that go by at a time, a multiple of BLOCK_V."""
    room = SCRATCH // (4 * max(1, padded(tokens)))
    return min(MOST, max(FEWEST, power_of_two(room + 1) // 2))


def chunks(tokens: int, start: int, stop: int) -> Iterator[tuple[int, int]]:
    step = chunk_of(tokens)
    return ((at, min(at + step, stop)) for at in range(start, stop, step))


def held_in(memory: Tensor, tokens: int) -> Tensor:
    """The memory of weight's gradient as codes [rows, padded tokens]: all rows or, if there are more tokens than hidden
    dimensions, as many chunks as fit. Codes of a row begin no earlier than its gradient does: gradients written in order spare
    the codes of later rows."""
    vocab, width = memory.shape
    stride = max(width, padded(tokens))
    count = vocab * width // max(1, stride)
    if count < vocab:
        count -= count % chunk_of(tokens)
    return memory.view(-1)[: count * stride].view(count, stride)[:, : padded(tokens)]


@dataclass(frozen=True)
class Tokens:
    """The tokens of a call, or some of them, and what their gradients depend on."""

    hidden: Tensor  # [tokens, hidden]
    weight: Tensor
    bias: Tensor | None
    labels: Tensor  # [tokens]
    stats: Tensor  # [2, tokens]
    numbers: tuple  # of cross_entropy
    grad: Tensor | None = None  # one number, or one per token
    denominator: Tensor | None = None
    part: Tensor | None = None  # of the bias's gradient: a row for BLOCK_T tokens
    wide: Tensor | None = (
        None  # hidden and rows of zeros, which products take: odd sizes would cost them several times as much
    )

    def __len__(self) -> int:
        return self.hidden.shape[0]

    def some(self, start: int, stop: int) -> Tokens:
        """A range that begins at a multiple of BLOCK_T."""
        grad = self.grad if self.grad.dim() == 0 else self.grad[start:stop]
        part = None if self.part is None else self.part[start // BLOCK_T :]
        stats, labels = self.stats[:, start:stop], self.labels[start:stop]
        hidden, wide = self.hidden[start:stop], self.wide[start : start + padded(stop - start)]
        return replace(self, hidden=hidden, labels=labels, stats=stats, grad=grad, part=part, wide=wide)

    def empty(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.hidden.device)

    def scratch(self, count: int, dtype: torch.dtype = torch.float32) -> Tensor:
        """Memory for a chunk of `count` rows at most."""
        return self.empty(min(count, chunk_of(len(self))), padded(len(self)), dtype=dtype)

    def logits(self, start: int, stop: int, scratch: Tensor) -> Tensor:
        out = scratch[: stop - start]
        product(self.weight[start:stop], self.wide.t(), out)
        return out

    def encode(self, first: int, x: Tensor, tops: Tensor, codes: Tensor | None, *sums: Tensor | None) -> None:
        """The tops and codes of the logits x and, if wanted, the `sums` over them: totals, z of the labels, slants."""
        ignore_index, _, _, softcap, _ = self.numbers
        linear_cross_entropy_encode(
            x, self.bias, self.labels, tops, codes, *(sums or (None,) * 3), first, x.shape[0], len(self), x.shape[1],
            self.weight.shape[0], x.stride(0), 0 if codes is None else codes.stride(0), ignore_index, softcap,
            BLOCK=BLOCK_V,
        )  # fmt: skip

    def slopes(self, first: int, x: Tensor, tops: Tensor | None, out: Tensor) -> None:
        """out = the gradient of the logits of rows from `first` on, from them or from codes; `out` may be x."""
        linear_cross_entropy_backward(
            x, None if tops is not None else self.bias, tops, self.labels, self.stats, self.denominator, self.grad, out,
            self.part, first, x.shape[0], len(self), x.shape[1], self.weight.shape[0], x.stride(0), out.stride(0),
            self.stats.stride(0), self.grad.dim(), *self.numbers, BLOCK=BLOCK_V, TOKENS=BLOCK_T,
        )  # fmt: skip

    def fill(self, first: int, out: Tensor, tops: Tensor | None = None, coded: bool = True) -> None:
        """out = the gradient of the logits of rows from `first` on; `tops`: they are there as codes already. With `coded` they
        come by codes in any case, so that the bits are the same."""
        if tops is None:
            tops = self.empty(cdiv(first + out.shape[0], BLOCK_V), len(self)) if coded else None
            scratch = self.scratch(out.shape[0])
            for start, stop in chunks(len(self), first, first + out.shape[0]):
                x, there = self.logits(start, stop, scratch), out[start - first : stop - first]
                if coded:
                    self.encode(start, x, tops, there)
                else:
                    self.slopes(start, x, None, there)
        if coded:
            self.slopes(first, out, tops, out)


def forward(hidden, weight, labels, bias, *, needs: frozenset, **options) -> tuple[Tensor, ...]:
    a = SimpleNamespace(**options)
    stats = torch.empty(2, *labels.shape, dtype=torch.float32, device=hidden.device)
    M, N = labels.numel(), weight.shape[0]
    check_labels("linear_cross_entropy", labels, N, a.ignore_index)
    x, y = rows(hidden).contiguous(), vector(labels)
    tokens = Tokens(x, weight, vector(bias), y, stats.view(2, M), numbers(a, N), wide=widened(x))
    ignore_index, keep, spill, softcap, z_loss = tokens.numbers
    codes = held = tokens.empty(0, dtype=hidden.dtype)
    if "weight" in needs and softcap is None:
        codes = tokens.empty(*weight.shape, dtype=weight.dtype)
        held = held_in(codes, M)
    blocks = cdiv(N, BLOCK_V)
    tops, total = (tokens.empty(blocks, M) for _ in range(2))
    own, slant = tokens.empty(M), None if spill is None else tokens.empty(blocks, M)
    scratch = tokens.scratch(N)
    for start, stop in chunks(M, 0, N):
        kept = held[start:stop] if start < held.shape[0] else None
        tokens.encode(start, tokens.logits(start, stop, scratch), tops, kept, total, own, slant)
    loss = tokens.empty(*labels.shape)
    linear_cross_entropy_merge(
        tops, total, own, slant, y, loss, stats, blocks, M, N, ignore_index, keep, spill, z_loss, BLOCK=BLOCK_V
    )
    tops = tops if codes.numel() else tokens.empty(0)
    if a.reduction == "none":
        return loss, stats, tokens.empty(0), codes, tops
    reduced, denominator = tokens.empty(), tokens.empty() if a.reduction == "mean" else None
    cross_entropy_reduce(loss, y, None, reduced, denominator, M, max(M, 1), N, 0, 1, 0, ignore_index)
    return reduced, stats, tokens.empty(0) if denominator is None else denominator, codes, tops


def both(tokens: Tokens, codes: Tensor, tops: Tensor, dhidden: Tensor | None) -> Tensor:
    """dweight, in the memory of the codes if there is any; `dhidden` filled if given."""
    weight, count = tokens.weight, tokens.weight.shape[0]
    coded = tokens.numbers[3] is None
    there = codes.numel() > 0
    dweight = codes if there else tokens.empty(*weight.shape, dtype=weight.dtype)
    held = held_in(dweight, len(tokens))
    tokens.fill(0, held, tops if there else None, coded)
    whole, total = held.shape[0] == count, dhidden
    if dhidden is not None:
        if not whole or len(tokens.wide) > len(tokens):
            total = tokens.empty(*tokens.wide.shape, dtype=dhidden.dtype if whole else torch.float32)
        product(held.t(), weight[: held.shape[0]], total)
    scratch = tokens.scratch(count, weight.dtype)
    for start, stop in chunks(len(tokens), 0, held.shape[0]):
        dx = scratch[: stop - start].copy_(held[start:stop])
        product(dx, tokens.wide, dweight[start:stop])
    for start, stop in chunks(len(tokens), held.shape[0], count):
        dx = scratch[: stop - start]
        tokens.fill(start, dx, coded=False)
        if total is not None:
            product(dx.t(), weight[start:stop], total, add=True)
        product(dx, tokens.wide, dweight[start:stop])
    if total is not dhidden:
        dhidden.copy_(total[: len(tokens)])
    return dweight


def frozen(tokens: Tokens, dhidden: Tensor | None) -> None:
    """`dhidden` filled, if given, and the bias's part, a few tokens at a time: each row of dhidden is one sum over the whole
    vocabulary."""
    weight, count = tokens.weight, tokens.weight.shape[0]
    row = max(1, count * weight.element_size())
    group = max(BLOCK_T, HELD // row // BLOCK_T * BLOCK_T)
    # Of few tokens the products are those that `both` makes, strides included: then the bits are the same
    width = max(weight.shape[1], padded(len(tokens)))
    stride = width if row * width <= HELD else padded(min(group, len(tokens)))
    held = tokens.empty(count, stride, dtype=weight.dtype)
    for start in range(0, len(tokens), group):
        some = tokens.some(start, min(start + group, len(tokens)))
        there = held[:, : len(some.wide)]
        some.fill(0, there, coded=some.numbers[3] is None)
        if dhidden is not None:
            out = dhidden[start : start + len(some)]
            made = out if len(some.wide) == len(some) else some.empty(*some.wide.shape, dtype=out.dtype)
            product(there.t(), weight, made)
            if made is not out:
                out.copy_(made[: len(some)])


def backward(saved: SimpleNamespace, dloss: Tensor) -> tuple:
    hidden, weight, needs = saved.hidden, saved.weight, saved.needs
    M, N = saved.labels.numel(), weight.shape[0]
    part = dbias = dhidden = dweight = None
    if "bias" in needs:
        part = torch.empty(cdiv(M, BLOCK_T), N, dtype=torch.float32, device=hidden.device)
    if "hidden" in needs:
        dhidden = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    x = rows(hidden).contiguous()
    tokens = Tokens(
        x, weight, vector(saved.bias), vector(saved.labels), saved.stats.reshape(2, M), numbers(saved, N),
        dloss if dloss.dim() == 0 else vector(dloss), saved.denominator if saved.reduction == "mean" else None, part,
        widened(x),
    )  # fmt: skip
    flat = None if dhidden is None else dhidden.view(M, hidden.shape[-1])
    if "weight" in needs:
        codes = saved.codes if last_backward() else saved.codes.clone()
        dweight = both(tokens, codes.detach(), saved.tops, flat)
    else:
        frozen(tokens, flat)
    if part is not None:
        dbias = torch.empty(N, dtype=saved.bias.dtype, device=hidden.device)
        sum_columns(part, dbias, part.shape[0], N)
    return dhidden, dweight, dbias


linear_cross_entropy = Op(
    "linear_cross_entropy", reference, inputs, Triton(forward, backward, single),
    flops=lambda hidden, weight, **_: 2 * hidden.numel() * weight.shape[0],
    where={
        "hidden": "float[... hidden]", "weight": "hidden[vocab hidden]", "labels": "int[...]", "bias": "float[vocab]",
        "label_smoothing": between(0.0, 1.0), "softcap": above(0.0), "z_loss": at_least(0.0),
    },
    results=("loss", "stats", "denominator", "codes", "tops"), aux=4, differentiable=("hidden", "weight", "bias"),
    saves=("hidden", "weight", "labels", "bias", "stats", "denominator", "codes", "tops"), composite=True,
    bars={"class": "E", "gradient": "E", "rounds": True},
)  # fmt: skip
