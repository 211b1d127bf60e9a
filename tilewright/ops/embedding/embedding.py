"""Rows of a table by number: y[t] = weight[ids[t]]; dweight[v] = sum over t with ids[t] = v, ascending, of dy[t], in fp32.

The backward sorts the tokens by id, equal ids in the order of the tokens. Up to COUNTED tokens one launch does it by counting:
a token's place is the number of those that come before it. Every run of equal ids is then one sum, but that runs are cut
where a slice of 64 sorted tokens ends, so that one hot id does not hold up the launch; a second launch adds up the pieces of
such runs, in their order. The sums become a new gradient, or are added to `main_grad`, of which only their rows are touched.
"""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import check_indices
from ...core.draw import Draw
from ...core.tensor import cdiv, power_of_two, rows
from ...op import Bars, Cost, Gradient, Op, Out, Sharding, Triton, single, upcast
from ...runtime.accumulate import Accumulating
from ...runtime.kernel import kernel

COUNTED = 16384  # tokens; the work of counting grows with their square, and beyond this torch's sort is faster
SLICE = 64


def reference(ids: Tensor, weight: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """The rows of `weight` [vocab, hidden] that `ids` name: [..., hidden].

    An id outside the table gives a row of NaN and has no gradient. Nor has `padding_idx`, whose row is looked up all the same.
    The gradient of `weight` is summed in fp32 in the order of the tokens and rounded once.
    """
    count = weight.shape[0]
    known = (ids >= 0) & (ids < count)
    table = upcast(weight) if count else F.pad(upcast(weight), (0, 0, 0, 1))
    y = table[torch.where(known, ids, 0)]
    if padding_idx is not None:
        y = torch.where((ids == padding_idx).unsqueeze(-1), y.detach(), y)
    return y.masked_fill(~known.unsqueeze(-1), float("nan")).to(weight.dtype)


def inputs(draw: Draw) -> dict:
    weight = draw.tensor("vocab", "hidden")
    count = weight.shape[0]
    used = min(count, draw.option("used", 1 << 30, 2))  # few ids, each many times, or all of them
    return {
        "ids": draw.integers("tokens", high=used, dtype=draw.option("index", torch.int64, torch.int32)),
        "weight": weight,
        "padding_idx": 1 if count > 1 and draw.option("padding", False, True) else None,
    }


# ---- kernels ---------------------------------------------------------------------------------------------------------


def _shape(a, size: int = 2048, warps: int = 4) -> dict:
    """A tile of several rows while they are short, so that each thread has two 16-byte accesses of bf16."""
    BLOCK = max(16, min(size, power_of_two(a.N)))
    return {"ROWS": max(1, min(32, size // BLOCK)), "BLOCK": BLOCK, "num_warps": warps}


@kernel(
    grid=lambda a: (cdiv(a.T, a.ROWS) * cdiv(a.N, a.BLOCK),), tokens=("T", "V"), tune_by=("N",), default=_shape,
    candidates=lambda a: [_shape(a, *each) for each in ((2048, 4), (4096, 8), (4096, 4))],
)  # fmt: skip
def embedding_forward(
    IDS, W, Y, T, N, V, stride_i, stride_wv, stride_wn, ROWS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    across = tl.cdiv(N, BLOCK)
    t = (tl.program_id(0) // across).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.program_id(0) % across * BLOCK + tl.arange(0, BLOCK)[None, :]
    id = tl.load(IDS + t * stride_i, t < T, -1).to(tl.int64)
    known = (id >= 0) & (id < V)
    at = W + tl.where(known, id, 0) * stride_wv + col.to(tl.int64) * stride_wn
    v = tl.load(at, known & (col < N), 0.0)
    tl.store(Y + t * N + col, tl.where(known, v, float("nan")), (t < T) & (col < N))


@triton.jit
def key_of(IDS, t, T, V, padding, stride_i):
    """What a token is sorted by: its id, V if there is no gradient for it, and more than that for none."""
    id = tl.load(IDS + t.to(tl.int64) * stride_i, t < T, -1).to(tl.int64)
    key = tl.where((id >= 0) & (id < V) & (id != padding), id, V).to(tl.int32)
    return tl.where(t < T, key, 0x7FFFFFFF)


@kernel(
    grid=lambda a: (cdiv(a.T, a.ROWS),), tokens=("T", "V", "padding"),
    default=lambda a: {"ROWS": 16, "BLOCK": 256, "num_warps": 4},
)  # fmt: skip
def embedding_order(IDS, KEYS, ORDER, T, V, padding, stride_i, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """KEYS sorted, and the token of each, by counting those before it. BLOCK is a multiple of ROWS: of equal keys, those of
    whole blocks before count, those of blocks after do not, and those of one block are left, which comes last."""
    first = tl.program_id(0) * ROWS
    t = first + tl.arange(0, ROWS)[:, None]
    own = key_of(IDS, t, T, V, padding, stride_i)
    before = tl.zeros([ROWS, BLOCK], tl.int32)
    for start in range(0, T, BLOCK):
        other = key_of(IDS, start + tl.arange(0, BLOCK)[None, :], T, V, padding, stride_i)
        before += (other < own + (start + BLOCK <= first).to(tl.int32)).to(tl.int32)
    u = first // BLOCK * BLOCK + tl.arange(0, BLOCK)[None, :]
    before += ((key_of(IDS, u, T, V, padding, stride_i) == own) & (u < t)).to(tl.int32)
    at = tl.sum(before, 1)[:, None]
    tl.store(KEYS + at, own, t < T)
    tl.store(ORDER + at, t, t < T)


SUMS = {
    "tokens": ("T", "V"),
    "default": lambda a: {"BLOCK": max(16, min(2048, power_of_two(a.N))), "num_warps": 4},
}


@kernel(grid=lambda a: (a.T * cdiv(a.N, a.BLOCK),), **SUMS)
def embedding_sum(
    DY, KEYS, ORDER, G, PARTS, T, N, V, stride_dt, stride_dn, stride_gv, stride_gn, ADD: tl.constexpr, LENGTH: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """A program for each sorted token; that of the first of a run, or of a run's part in a slice, sums it. A whole run goes to
    its row of G. Of the others a slice has at most two: PARTS has the one that it begins with, then the one it ends with.
    What says which rows to read is loaded first, and at once: most runs are one token, and then nothing else takes time."""
    across = tl.cdiv(N, BLOCK)
    p = tl.program_id(0) // across
    col = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    slice = p // LENGTH
    stop = slice * LENGTH + tl.minimum(T - slice * LENGTH, LENGTH)
    place = p + tl.arange(0, LENGTH)
    key = tl.load(KEYS + p)
    token = tl.load(ORDER + p).to(tl.int64)
    before = tl.load(KEYS + tl.maximum(p - 1, 0))
    after = tl.load(KEYS + tl.minimum(stop, T - 1))
    end = p + tl.sum((tl.load(KEYS + place, place < stop, 0x7FFFFFFF) == key).to(tl.int32), 0)
    begins = (p == 0) | (before != key)
    whole = begins & ((end < stop) | (stop == T) | (after != key))
    if (key < V) & (begins | (p % LENGTH == 0)):
        total = tl.load(DY + token * stride_dt + col * stride_dn, col < N, 0.0).to(tl.float32)
        row = G + key.to(tl.int64) * stride_gv + col * stride_gn
        if ADD:
            kept = tl.load(row, whole & (col < N), 0.0).to(tl.float32)
        for i in range(p + 1, end, 4):
            for k in tl.static_range(4):  # so many rows are under way at once
                token = tl.load(ORDER + tl.minimum(i + k, end - 1)).to(tl.int64)
                at = DY + token * stride_dt + col * stride_dn
                total += tl.load(at, (i + k < end) & (col < N), 0.0).to(tl.float32)
        if whole:
            if ADD:
                total += kept
            tl.store(row, total.to(G.dtype.element_ty), col < N)
        else:
            part = slice.to(tl.int64) * 2 + (p % LENGTH != 0).to(tl.int64)
            tl.store(PARTS + part * N + col, total, col < N)


@kernel(grid=lambda a: (cdiv(a.T, a.LENGTH) * cdiv(a.N, a.BLOCK),), **SUMS)
def embedding_combine(
    KEYS, G, PARTS, T, N, V, stride_gv, stride_gn, ADD: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """A program for each slice sums the run that begins in it and goes on in the next, if there is one."""
    across = tl.cdiv(N, BLOCK)
    slice = tl.program_id(0) // across
    slices = tl.cdiv(T, LENGTH)
    col = (tl.program_id(0) % across).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    if slice + 1 < slices:
        start = slice * LENGTH
        key = tl.load(KEYS + start + LENGTH)
        begins = (slice == 0) | (tl.load(KEYS + tl.maximum(start - 1, 0)) != key)
        if (key < V) & (tl.load(KEYS + start + LENGTH - 1) == key) & begins:
            last = slice
            found = LENGTH
            while found == LENGTH:
                next = last + 1 + tl.arange(0, LENGTH)
                same = tl.load(KEYS + next.to(tl.int64) * LENGTH, next < slices, V) == key
                found = tl.sum(same.to(tl.int32), 0)
                last += found
            first = slice.to(tl.int64) * 2 + (tl.load(KEYS + start) != key).to(tl.int64)
            total = tl.load(PARTS + first * N + col, col < N, 0.0)
            for i in range(slice + 1, last + 1, 8):
                for k in tl.static_range(8):
                    at = PARTS + (i + k).to(tl.int64) * 2 * N + col
                    total += tl.load(at, (i + k <= last) & (col < N), 0.0)
            row = G + key.to(tl.int64) * stride_gv + col * stride_gn
            if ADD:
                total += tl.load(row, col < N, 0.0).to(tl.float32)
            tl.store(row, total.to(G.dtype.element_ty), col < N)


# ---- host ------------------------------------------------------------------------------------------------------------


def forward(ids: Tensor, weight: Tensor, *, padding_idx: int | None) -> Tensor:
    V, N = weight.shape
    check_indices("embedding", "ids", ids, 0, V)
    y = torch.empty((*ids.shape, N), dtype=weight.dtype, device=weight.device)
    flat = ids.reshape(-1)
    embedding_forward(flat, weight, y, flat.shape[0], N, V, flat.stride(0), *weight.stride())
    return y


def sort_ids(ids: Tensor, V: int, padding: int) -> tuple[Tensor, Tensor]:
    """(keys ascending, the token of each): ids that have a gradient as they are, others as V, at the end."""
    T = ids.shape[0]
    if T > COUNTED:
        live = (ids >= 0) & (ids < V) & (ids != padding)
        return torch.sort(torch.where(live, ids, V).to(torch.int32), stable=True)
    keys = torch.empty(T, dtype=torch.int32, device=ids.device)
    order = torch.empty(T, dtype=torch.int32, device=ids.device)
    embedding_order(ids, keys, order, T, V, padding, ids.stride(0))
    return keys, order


def sum_into(grad: Tensor, ids: Tensor, dy: Tensor, padding_idx: int | None, add: bool) -> None:
    """Store each id's sum of rows of `dy` in its row of `grad`, or add it there; other rows are not touched."""
    (V, N), ids, dy = grad.shape, ids.reshape(-1), rows(dy)
    T = ids.shape[0]
    if T == 0 or N == 0:
        return
    keys, order = sort_ids(ids, V, -1 if padding_idx is None else padding_idx)
    parts = torch.empty(2 * cdiv(T, SLICE), N, dtype=torch.float32, device=grad.device)
    embedding_sum(
        dy, keys, order, grad, parts, T, N, V, *dy.stride(), *grad.stride(), ADD=add, LENGTH=SLICE
    )  # fmt: skip
    embedding_combine(keys, grad, parts, T, N, V, *grad.stride(), ADD=add, LENGTH=SLICE)


def backward(saved: SimpleNamespace, dy: Tensor) -> tuple[Tensor]:
    weight = saved.weight  # its shape and dtype alone
    dweight = torch.zeros(weight.shape, dtype=weight.dtype, device=dy.device)
    sum_into(dweight, saved.ids, dy, saved.padding_idx, add=False)
    return (dweight,)


def check(ids: Tensor, weight: Tensor, *, padding_idx: int | None) -> None:
    if padding_idx is not None and not 0 <= padding_idx < weight.shape[0]:
        raise ValueError(f"embedding: padding_idx must be in [0, {weight.shape[0]}), got {padding_idx}")
    for name, count in (("ids", ids.numel()), ("weight", weight.shape[0])):
        if count > 2**31 - 2 * SLICE:  # places in a slice past the end are numbers too
            raise ValueError(f"embedding: {name} has {count} rows, more than {2**31 - 2 * SLICE}")


def cost(ids: Tensor, weight: Tensor, *, padding_idx: int | None) -> tuple[int, int]:
    """Bytes read and written: of the ids, and of the rows that are looked up, each as often as it is looked up."""
    moved = ids.numel() * weight.shape[1] * weight.element_size()
    return moved + ids.numel() * ids.element_size(), moved


# ---- a gradient that is added to a buffer ----------------------------------------------------------------------------


def embedding_main_grad(ids: Tensor, weight: Tensor, main_grad: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """`embedding(ids, weight)` whose backward adds the gradient of `weight` to `main_grad` in place.

    `main_grad` has the shape of `weight`, in any float dtype; only the rows of ids that were looked up are read and written,
    summed in fp32 and rounded once. `weight` itself gets no gradient. But if it has an attribute `grad_added_to_main_grad`, as
    Megatron's parameters do, that becomes True and its gradient is a placeholder that hooks may wait for: uninitialised, or
    zeros if its `zero_out_wgrad` is true. Under `torch.compile` the backward adds as well but sees no attributes; if several
    forwards come before their backwards, pass it `main_grad.data`, for torch lets no saved tensor change in between.
    """
    return accumulating(main_grad, {"ids": ids, "weight": weight, "padding_idx": padding_idx})


def add_gradient(saved: SimpleNamespace, dy: Tensor, main_grad: Tensor, needs: frozenset) -> dict:
    embedding_accumulate(saved.ids, dy.resolve_neg(), main_grad, padding_idx=saved.padding_idx)
    return {}


def reference_accumulate(ids: Tensor, dy: Tensor, main_grad: Tensor, *, padding_idx: int | None = None) -> Tensor:
    """Add the gradient of an embedding to `main_grad` [vocab, hidden]: each row of `dy` to the row that its id names.

    An id outside the table adds nothing, nor does `padding_idx`. Rows are summed in fp32 in the order of the tokens, and rounded
    once with what was there; rows that no id names are not touched.
    """
    V, wide = main_grad.shape[0], upcast(main_grad)
    padded = torch.where(ids == (-1 if padding_idx is None else padding_idx), V, ids).reshape(-1)
    at = torch.where((padded >= 0) & (padded < V), padded, V)
    flat = upcast(dy).reshape(ids.numel(), dy.shape[-1]).to(wide.dtype)
    return (wide + wide.new_zeros(V + 1, wide.shape[1]).index_add(0, at, flat)[:V]).to(main_grad.dtype)


def inputs_accumulate(draw: Draw) -> dict:
    drawn = inputs(draw)
    return {
        "ids": drawn["ids"],
        "dy": draw.tensor("tokens", "hidden"),
        "main_grad": drawn["weight"].to(draw.option("main_dtype", torch.float32, draw.dtype)),
        "padding_idx": drawn["padding_idx"],
    }


def forward_accumulate(ids: Tensor, dy: Tensor, main_grad: Tensor, *, padding_idx: int | None) -> None:
    sum_into(main_grad, ids, dy, padding_idx, add=True)


def check_accumulate(ids: Tensor, dy: Tensor, main_grad: Tensor, *, padding_idx: int | None) -> None:
    check(ids, main_grad, padding_idx=padding_idx)


def cost_accumulate(ids: Tensor, dy: Tensor, main_grad: Tensor, *, padding_idx: int | None) -> tuple[int, int]:
    """Bytes read and written, every id being another: of the ids, of their rows of dy, and of as many rows of main_grad."""
    rows_there = ids.numel() * dy.shape[-1] * main_grad.element_size()
    return ids.numel() * (ids.element_size() + dy.shape[-1] * dy.element_size()) + rows_there, rows_there


embedding_accumulate = Op(
    "embedding_accumulate", reference_accumulate, inputs_accumulate, Triton(forward_accumulate, None, single),
    sibling="embedding", internal=True, results={}, writes=("main_grad",), cost=Cost(cost_accumulate), bars=Bars("C"),
    where={"ids": "int[...]", "dy": "float[... hidden]", "main_grad": "float[vocab hidden]"}, check=check_accumulate,
)  # fmt: skip
embedding = Op(
    "embedding", reference, inputs, Triton(forward, backward, single), cost=Cost(cost),
    where={"ids": "int[...]", "weight": "float[vocab hidden]"}, results={"out": "weight[... hidden]"},
    out=Out(contiguous=("out",)), gradient=Gradient(of=("weight",), shape_only=lambda values: ("weight",)), check=check,
    sharding=Sharding(("...", "hidden")), bars=Bars("A"),
)  # fmt: skip
accumulating = Accumulating(
    embedding, "weight", add_gradient, saves=("ids",), kinds=("float32", "bfloat16", "float16", "float64")
)
