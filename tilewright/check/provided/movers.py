"""The calls behind the later rows of the training lists: movers, transforms, fused routers, losses over several processes.

Truth is the published formula written out in float64, never the op's reference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import tilewright as tw

from ..agreement import agrees, end_rows, normal


def embedding(device: str) -> None:
    """Lookups, and gradients of three of them, one with ids outside the table, added to a buffer that was not empty."""
    weight, main_grad = normal(device, 40, 72).requires_grad_(), normal(device, 40, 72, dtype=torch.float32, seed=1)
    wide, before = weight.detach().double().requires_grad_(), main_grad.double()
    for seed in range(3):
        ids = torch.randint(0, 40, (5, 30), generator=torch.Generator().manual_seed(seed)).to(device)
        ids[seed, ::7] = 3  # a hot one
        if seed == 2:
            ids[0, :2] = torch.tensor([-1, 40])
        y = tw.embedding_main_grad(ids, weight, main_grad)
        known = (ids >= 0) & (ids < 40)
        exact = F.embedding(ids[known], wide)
        agrees("result", y[known], exact.detach(), "G")
        assert bool(y[~known].isnan().all()), "a row of no id is not NaN"
        dy = normal(device, 5, 30, 72, seed=10 + seed)
        y.backward(dy)
        exact.backward(dy[known].double())
    assert weight.grad is None, "there is a gradient beside the one in main_grad"
    agrees("main_grad", main_grad, before + wide.grad, "C")
    plain = weight.detach().clone().requires_grad_()
    tw.embedding(ids, plain).backward(dy)
    exact = torch.zeros_like(before).index_add(0, ids[known], dy[known].double())
    agrees("gradient", plain.grad, exact, "C")


def sorted_chunks(device: str) -> None:
    """Chunks as slices of the rows, put one after another; their gradients are sent back to where they came from."""
    sizes, order = [5, 0, 11, 2, 7], [3, 2, 0, 4, 1]
    starts = [sum(sizes[:c]) for c in range(len(sizes))]
    at = torch.tensor([starts[c] + r for c in order for r in range(sizes[c])], device=device)
    x, probs = normal(device, 25, 72).requires_grad_(), normal(device, 25, dtype=torch.float32, seed=1).requires_grad_()
    given = torch.tensor(sizes, device=device), torch.tensor(order, device=device)
    made = tw.sort_chunks(x, *given, probs)
    dy = normal(device, 25, 72, seed=2), normal(device, 25, dtype=torch.float32, seed=3)
    found = torch.autograd.grad(made, (x, probs), dy)
    back = torch.empty_like(at).scatter(0, at, torch.arange(25, device=device))
    for name, y, there in zip(("rows", "row_probs"), made, (x, probs), strict=True):
        agrees(name, y.detach(), there.detach().double()[at], "G")
    for name, grad, there in zip(("dx", "dprobs"), found, dy, strict=True):
        agrees(name, grad, there.double()[back], "G")


def transposed(device: str) -> None:
    """Column by column, 30 of them padded to 32."""
    x = normal(device, 3, 30, 72).requires_grad_()
    y = tw.transpose_pad(x, multiple=32)
    exact = torch.zeros(3, 72, 32, dtype=torch.float64, device=device)
    for i in range(30):
        exact[:, :, i] = x.detach()[:, i].double()
    agrees("result", y.detach(), exact, "G")
    dy = normal(device, 3, 72, 32, seed=1)
    (dx,) = torch.autograd.grad(y, x, dy)
    agrees("gradient", dx, torch.stack([dy[:, :, i].double() for i in range(30)], 1), "G")


def split_loss(device: str) -> None:
    """The whole in one process, its gradient over the logits; and in two shards, joined as two ranks would join them."""
    whole = normal(device, 7, 1003, scale=3.0)
    labels = torch.arange(7, device=device) * 160
    labels[2] = -100
    wide = whole.double().requires_grad_()
    exact = F.cross_entropy(wide, labels, reduction="none")
    exact.backward(torch.ones_like(exact))
    leaf = whole.clone().requires_grad_()
    loss = tw.parallel_cross_entropy(leaf * 1.0, labels, inplace_backward=True)
    loss.backward(torch.ones_like(loss))
    agrees("the loss", loss.detach(), exact.detach(), "D")
    agrees("its gradient", leaf.grad, wide.grad, "H")
    leaves = [shard.clone().requires_grad_() for shard in whole.split([603, 400], -1)]
    parts = [tw.cross_entropy_parts(x, labels, start=603 * r, classes=1003) for r, x in enumerate(leaves)]
    gathered = torch.stack([p.detach() for p in parts])
    for rank in range(2):
        loss = tw.cross_entropy_join(parts[rank], gathered, labels, classes=1003, rank=rank)
        loss.backward(torch.ones_like(loss))
        agrees(f"the loss on rank {rank}", loss.detach(), exact.detach(), "D")
    agrees("the gradient of both shards", torch.cat([x.grad for x in leaves], -1), wide.grad, "H")


def rotated(device: str) -> None:
    """Codes of x H and of H x, H being Sylvester's matrix written out."""
    for block in (32, 64):
        h = torch.ones(1, 1, dtype=torch.float64)
        while h.shape[0] < block:
            h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
        x = normal(device, 2 * block, 3 * block)
        along, down = (torch.block_diag(*[h / block**0.5] * n).to(device) for n in (3, 2))
        q = tw.hadamard_quantize(x, tw.fp8("row", ways="both"), block=block)
        for way, exact in (("row", x.double() @ along), ("col", down @ x.double())):
            tensors = q.tensors()[:2] if way == "row" else q.tensors()[2:]
            one = tw.Quantized.from_tensors(tw.fp8("row", ways=way), x.dtype, x.shape, tensors)
            agrees(f"block {block}", one, exact, "A")
        agrees("plain", tw.hadamard(x, block=block), x.double() @ along, "A")


def smoothed(device: str) -> None:
    """Calibrated on the data, then quantised; groups with a row of scales each."""
    x, ends = normal(device, 9, 200, scale=3.0), [4, 4, 7]
    amax = tw.column_amax(x)
    agrees("amax", amax, x.double().abs().amax(0, keepdim=True), "G")
    smooth = tw.smooth_scale(amax)
    form = tw.fp8("row", ways="both")
    agrees("over", tw.smooth_quantize(x, smooth, form), x.double() / smooth.double(), "A")
    agrees("times", tw.smooth_quantize(x, smooth, form, reverse=True), x.double() * smooth.double(), "A")
    offsets = end_rows(device, ends)
    by_group = tw.column_amax(x, offsets=offsets).clamp(min=0.5)
    each = by_group.double()[[0, 0, 0, 0, 2, 2, 2, 2, 2]]
    q = tw.smooth_quantize(x, by_group, tw.fp8("row"), offsets=offsets)
    agrees("groups", q, x.double() / each, "A", ends)


def smoothed_rows(device: str) -> None:
    """Some rows of a tensor alone, of which codes both ways are the codes and those of the transposed."""
    x, smooth = normal(device, 40, 200, scale=3.0), 0.5 + normal(device, 1, 200, seed=1).abs().float()
    part = x[8:24]
    agrees("rows", tw.smooth_quantize(part, smooth, tw.fp8("row", ways="both")), part.double() / smooth.double(), "A")


def normed_router(device: str) -> None:
    """Logits are those of the rows as they were rounded; what follows a rounding in the backward is no better than that."""
    leaves = [normal(device, 9, 200), 1 + 0.5 * normal(device, 200, seed=1), normal(device, 33, 200, seed=2, scale=0.1)]
    noise = torch.finfo(torch.bfloat16).eps / 6
    ours = [t.detach().requires_grad_() for t in leaves]
    wide = [t.detach().double().requires_grad_() for t in leaves]
    exact = F.rms_norm(wide[0], (200,), wide[1], 1e-6)
    exact = exact, exact @ wide[2].t()
    made = tw.rms_norm_router(*ours)
    agrees("y", made[0].detach(), exact[0].detach(), "B")
    agrees("logits", made[1].detach(), made[0].detach().double() @ leaves[2].double().t(), "E")
    q, logits = tw.rms_norm_router(*leaves, out_format=tw.fp8("1x128", ways="both"))
    agrees("codes", q, exact[0].detach(), "B")
    agrees("logits beside codes", logits, exact[1].detach(), "E", noise=noise)
    dy = [normal(device, *y.shape, dtype=y.dtype, seed=3) for y in made]
    found = torch.autograd.grad(made, ours, dy)
    there = torch.autograd.grad(exact, wide, [g.double() for g in dy])
    for i, (grad, truth) in enumerate(zip(found, there, strict=True)):
        agrees(f"gradient {i}", grad, truth, "F", noise=noise)
