"""Trees of drafted tokens: what each node sees of the others, and which path of them a model's own choices confirm.

    bits[t] = 2**t | bits[parents[t]],  depth[t] = 1 + depth[parents[t]], 0 without a parent
    accepted[t] = no parent, or accepted[parents[t]] and draft[t] == target[parents[t]]

A node comes after its parent, and there are 64 at most: a bit each. Programs hold a whole tree and find ancestors by doubling: in
step i nodes take over what the node 2**i above them has gathered.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.debug import can_read
from ...core.draw import Draw
from ...core.tensor import cdiv, power_of_two, rows
from ...device.dependent import begin_dependent
from ...gemm.tiles import matrix
from ...op import Bars, Op, Triton
from ...runtime.kernel import kernel

NODES = 64
STEPS = 6  # doublings to the root of a chain of 64


def reference(parents: Tensor) -> tuple[Tensor, Tensor]:
    """(bits int64, depth int32), [..., nodes] both, of trees of up to 64 nodes: `bits` is what `cached_attention(tree=)` takes.

    `parents` [..., nodes] has the parent of each node, which comes before it; below 0 there is none, as of the token that the
    drafts come after. Bit s of node t says whether s is t or an ancestor of it. A node at depth d stands d positions after its
    root. A parent that is not before its node is a fault: the node and its descendants see no node (bits 0, depth -1).
    """
    found = ancestors(parents, torch.ones_like(parents, dtype=torch.bool))
    return found.bits, found.depth


def reference_accept(draft: Tensor, target: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    """(count int32 [...], path int64 [..., nodes]): the longest path of drafted tokens that a model itself would have taken.

    `draft` [..., nodes] are the nodes' tokens, `target` what the model chose after each of them; ids below 0 are none. A node is
    accepted if it has no parent, or if its parent is accepted and chose its token. The path leads to the deepest accepted node, of
    several to the first; it is `count` nodes from its root on, and -1 past them. The model's choice after the last is new.
    `parents` are those of `tree_bits`; a node whose parent is not before it is not accepted.
    """
    before = parents.clamp(min=0, max=max(0, parents.shape[-1] - 1)).long()
    chosen = target.gather(-1, before) if parents.shape[-1] else target
    found = ancestors(parents, (parents < 0) | ((draft == chosen) & (draft >= 0)))
    node = torch.arange(parents.shape[-1], device=parents.device)
    rank = torch.where(found.depth >= 0, found.depth * NODES + NODES - node, 0)
    best = rank.amax(-1, keepdim=True) if parents.shape[-1] else rank.sum(-1, keepdim=True)
    last = torch.where(rank == best, found.bits, 0).sum(-1, keepdim=True) * (best > 0)
    on = (last >> node) & 1 == 1
    count = on.sum(-1)
    # Nodes of a path in rising order are in the order of their depths
    path = torch.where(on, node, NODES).sort(-1).values
    return count.to(torch.int32), torch.where(path < NODES, path, -1)


def ancestors(parents: Tensor, good: Tensor) -> SimpleNamespace:
    """`bits` and `depth` of nodes all of whose line is `good` and well formed; 0 and -1 of the others."""
    node = torch.arange(parents.shape[-1], device=parents.device)
    has = (parents >= 0) & (parents < node)
    good = good & (has | (parents < 0))
    up = torch.where(has, parents, -1).long()
    bits, depth = (1 << node).expand(parents.shape), has.to(torch.int32)
    for _ in range(STEPS if parents.shape[-1] else 0):
        there, at = up >= 0, up.clamp(min=0)
        bits = torch.where(there, bits | bits.gather(-1, at), bits)
        depth = torch.where(there, depth + depth.gather(-1, at), depth)
        good = torch.where(there, good & good.gather(-1, at), good)
        up = torch.where(there, up.gather(-1, at), -1)
    return SimpleNamespace(bits=torch.where(good, bits, 0), depth=torch.where(good, depth, -1))


def inputs(draw: Draw) -> dict[str, Any]:
    tokens, nodes = draw.dim("tokens"), min(NODES, draw.dim("length"))
    index = draw.option("index", torch.int64, torch.int32)
    drawn = draw.integers(tokens, nodes, high=1 << 30, dtype=index)
    room = torch.arange(1, nodes + 1, device=drawn.device, dtype=index)
    return {"parents": drawn % room - 1}


def inputs_accept(draw: Draw) -> dict[str, Any]:
    parents = inputs(draw)["parents"]
    index = draw.option("ids", torch.int64, torch.int32)
    return {
        "draft": draw.integers(*parents.shape, high=2, dtype=index),
        "target": draw.integers(*parents.shape, high=2, dtype=index),
        "parents": parents,
    }


# ---------------------------------------------------------------- on the device


@triton.jit
def take(v, up, node):
    """v [rows, nodes] at the places `up` [rows, nodes]; 0 where there is none."""
    hit = up[:, :, None] == node[None, None, :]
    return tl.sum(tl.where(hit, v[:, None, :], 0), 2)


@triton.jit
def climb(up, good, node, STEPS: tl.constexpr):
    """(bits, depth) of nodes whose whole line is good, 0 and -1 of the others. `up` is below 0 where there is no parent."""
    bits = tl.full([], 1, tl.int64) << node.to(tl.int64)
    bits = tl.where(up >= -1, bits[None, :], 0)  # in the shape of all nodes
    depth = (up >= 0).to(tl.int32)
    bad = 1 - good.to(tl.int32)
    for _ in tl.static_range(STEPS):
        above = take(bits, up, node)
        length = take(depth, up, node)
        worse = take(bad, up, node)
        further = take(up + 1, up, node) - 1
        bits = bits | above
        depth = depth + length
        bad = bad | worse
        up = further
    return tl.where(bad == 0, bits, 0), tl.where(bad == 0, depth, -1)


@triton.jit
def load_nodes(P, row, node, inside):
    return tl.load(P.data + row * P.stride_r + node.to(tl.int64)[None, :] * P.stride_c, inside, -1).to(tl.int64)


@triton.jit
def parents_of(P, row, node, inside):
    """(parents, below 0 where there is none; whether each is well formed). Device data, of which nothing else becomes an index."""
    parents = load_nodes(P, row, node, inside)
    before = parents < node[None, :]
    has = (parents >= 0) & before
    return tl.where(has, parents, -1).to(tl.int32), before & inside


TREES = {
    # A tile of [trees, nodes, nodes] has 4096 numbers, 16 a thread: with 32 of 64 bits each, ptxas spilled
    "grid": lambda a: (cdiv(a.M, a.ROWS),),
    "tokens": ("M",),
    "default": lambda a: {"ROWS": max(1, 4096 // a.BLOCK**2), "num_warps": 8},
    "dependent": True,
}


@kernel(**TREES)
def tree_bits_rows(
    P, BITS, DEPTH, M, N, STEPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, DEPENDENT: tl.constexpr
):
    begin_dependent(DEPENDENT)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    node = tl.arange(0, BLOCK)
    inside = (row < M) & (node[None, :] < N)
    up, good = parents_of(P, row, node, inside)
    bits, depth = climb(up, good, node, STEPS)
    tl.store(BITS.data + row * BITS.stride_r + node.to(tl.int64)[None, :] * BITS.stride_c, bits, inside)
    tl.store(DEPTH.data + row * DEPTH.stride_r + node.to(tl.int64)[None, :] * DEPTH.stride_c, depth, inside)


@kernel(**TREES)
def tree_accept_rows(
    DRAFT, TARGET, P, COUNT, PATH, M, N, stride_count, STEPS: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    begin_dependent(DEPENDENT)
    r = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row = r[:, None]
    node = tl.arange(0, BLOCK)
    inside = (row < M) & (node[None, :] < N)
    up, good = parents_of(P, row, node, inside)
    draft = load_nodes(DRAFT, row, node, inside)
    chosen = take(load_nodes(TARGET, row, node, inside), up, node)
    good = good & ((up < 0) | ((draft == chosen) & (draft >= 0)))
    bits, depth = climb(up, good, node, STEPS)
    rank = tl.where((depth >= 0) & inside, depth * 64 + 64 - node[None, :], 0)
    best = tl.max(rank, 1, keep_dims=True)
    last = tl.sum(tl.where((rank == best) & (best > 0), bits, 0), 1, keep_dims=True)
    on = ((last >> node.to(tl.int64)[None, :]) & 1) == 1
    count = tl.sum(on.to(tl.int32), 1)
    # Every node on the path has its depth for its place there
    here = on[:, None, :] & (depth[:, None, :] == node[None, :, None])
    path = tl.sum(tl.where(here, node[None, None, :] + 1, 0), 2) - 1
    tl.store(COUNT + r * stride_count, count, r < M)
    tl.store(PATH.data + row * PATH.stride_r + node.to(tl.int64)[None, :] * PATH.stride_c, path.to(tl.int64), inside)


# ---------------------------------------------------------------- host


def stored(t: Tensor, there: Tensor) -> Tensor:
    """A result, whose rows were written `there`: in its own memory, or, where no one stride describes them, beside it."""
    return t if there.data_ptr() == t.data_ptr() else t.copy_(there.view(t.shape))


def check_parents(op: str, parents: Tensor) -> None:
    """With TILEWRIGHT_DEBUG=1: raise if a parent is not before its node."""
    if not can_read(parents):
        return
    wrong = parents >= torch.arange(parents.shape[-1], device=parents.device)
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(f"{op}: parents must be before their nodes, got {int(parents[at])} for node {at[-1]}")


def forward(parents: Tensor) -> tuple[Tensor, Tensor]:
    check_parents("tree_bits", parents)
    bits, depth = (torch.empty(parents.shape, dtype=d, device=parents.device) for d in (torch.int64, torch.int32))
    P, B, D = rows(parents), rows(bits), rows(depth)
    tree_bits_rows(matrix(P), matrix(B), matrix(D), *P.shape, STEPS=STEPS, BLOCK=power_of_two(P.shape[1]))
    return stored(bits, B), stored(depth, D)


def forward_accept(draft: Tensor, target: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
    check_parents("tree_accept", parents)
    count = torch.empty(parents.shape[:-1], dtype=torch.int32, device=parents.device)
    path = torch.empty(parents.shape, dtype=torch.int64, device=parents.device)
    operands, C, P = [rows(t) for t in (draft, target, parents)], count.reshape(-1), rows(path)
    shape = {"STEPS": STEPS, "BLOCK": power_of_two(P.shape[1])}
    tree_accept_rows(*map(matrix, operands), C, matrix(P), *P.shape, C.stride(0), **shape)
    return stored(count, C), stored(path, P)


def check(parents: Tensor, op: str = "tree_bits") -> None:
    if parents.shape[-1] > NODES:
        raise ValueError(f"{op}: parents must have at most {NODES} nodes, got {parents.shape[-1]}")


def check_accept(draft: Tensor, target: Tensor, parents: Tensor) -> None:
    check(parents, "tree_accept")


tree_bits = Op(
    "tree_bits", reference, inputs, Triton(forward), where={"parents": "int[... nodes]"},
    results={"bits": "int64[... nodes]", "depth": "int32[... nodes]"}, check=check, bars=Bars("G"),
)  # fmt: skip

tree_accept = Op(
    "tree_accept", reference_accept, inputs_accept, Triton(forward_accept),
    where={"draft": "int[... nodes]", "target": "draft[... nodes]", "parents": "int[... nodes]"},
    results={"count": "int32[...]", "path": "int64[... nodes]"}, check=check_accept, bars=Bars("G"),
)  # fmt: skip
