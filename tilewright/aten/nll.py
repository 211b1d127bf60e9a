"""The index engine, losses by label: of each place the element that its label names, times that label's weight.

Places are summed by blocks, and where there are several, a launch of one program adds up these sums in their order. A label outside
the classes gives NaN for its place and has no gradient; `ignore_index` counts for nothing.
"""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..core.debug import check_labels
from ..core.tensor import cdiv
from ..runtime.kernel import kernel
from . import plans
from .plans import own
from .pointwise import over
from .reduction import loops_of, offset
from .row import Declined, taken

NONE, MEAN, SUM = 0, 1, 2  # reductions
BLOCK = 1024
PLACES = (
    "E",
    "K0",
    "K1",
    *(f"{t}{i}" for t in "xt" for i in range(3)),
    "CLASSES",
    "step",
    "weight_step",
    "ignored",
    "reduction",
)


@triton.jit
def label_and_weight(T, W, at, inside, CLASSES, weight_step, ignored):
    """(whether a label counts, whether it is a class, the class or else 0, its weight)."""
    label = tl.load(T + at, inside, 0).to(tl.int64)
    known = inside & (label >= 0) & (label < CLASSES)
    counts = inside & (label != ignored)
    label = tl.where(known, label, 0)
    weight = tl.full(label.shape, 1.0, tl.float64)
    if W is not None:
        weight = tl.load(W + label * weight_step, known & counts, 0.0).to(tl.float64)
    return counts, known, label, weight


@kernel(grid=lambda a: (max(1, cdiv(a.E, a.BLOCK)),), tokens=PLACES, default=lambda a: {"num_warps": 8})
def nll_places(
    X, T, W, OUT, TOTAL, PARTS, E, K0, K1, x0, x1, x2, t0, t1, t2, CLASSES, step, weight_step, ignored, reduction,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Losses of E places, each to OUT, and 0 to TOTAL, if the reduction is 0; else their mean (1) or sum (2) to OUT, and their
    weight to TOTAL. Of several programs the sums of a block and of its weights go to PARTS [blocks, 2]."""
    e = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = e < E
    counts, known, label, weight = label_and_weight(
        T, W, offset(e, E, K0, K1, t0, t1, t2), inside, CLASSES, weight_step, ignored
    )
    x = tl.load(X + offset(e, E, K0, K1, x0, x1, x2) + label * step, known & counts, 0.0).to(tl.float64)
    loss = tl.where(counts, tl.where(known, -x * weight, float("nan")), 0.0)
    each = reduction == 0
    total = tl.sum(tl.where(counts, weight, 0.0), 0)
    if PARTS is None:
        tl.store(OUT + e, loss.to(OUT.dtype.element_ty), inside & each)
        store_total(OUT, TOTAL, tl.sum(loss, 0), tl.where(each, 0.0, total), reduction, tl.program_id(0) == 0)
    else:
        at = PARTS + tl.program_id(0).to(tl.int64) * 2
        tl.store(at, tl.sum(loss, 0))
        tl.store(at + 1, total)


@triton.jit
def store_total(OUT, TOTAL, loss, weight, reduction, first):
    """The loss of all places, if it is asked for, and their weight, by the first program."""
    if reduction == 1:
        loss = loss / weight
    tl.store(OUT, loss.to(OUT.dtype.element_ty), first & (reduction != 0))
    tl.store(TOTAL, weight.to(TOTAL.dtype.element_ty), first)


@kernel(grid=lambda a: (1,), tokens=("BLOCKS", "reduction"), default=lambda a: {"BLOCK": 1024, "num_warps": 4})
def nll_total(OUT, TOTAL, PARTS, BLOCKS, reduction, BLOCK: tl.constexpr):
    loss = tl.zeros([BLOCK], tl.float64)
    weight = tl.zeros([BLOCK], tl.float64)
    for start in range(0, BLOCKS, BLOCK):
        i = start + tl.arange(0, BLOCK)
        loss += tl.load(PARTS + i * 2, i < BLOCKS, 0.0)
        weight += tl.load(PARTS + i * 2 + 1, i < BLOCKS, 0.0)
    store_total(OUT, TOTAL, tl.sum(loss, 0), tl.sum(weight, 0), reduction, True)


@kernel(
    grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N", "INNER", "CLASSES", "K0", "K1", "t0", "t1", "t2", "g0", "g1", "g2",
    "weight_step", "ignored"), default=lambda a: {"num_warps": 4},
)  # fmt: skip
def nll_gradient(
    OUT, T, W, G, TOTAL, N, INNER, CLASSES, K0, K1, t0, t1, t2, g0, g1, g2, weight_step, ignored, BLOCK: tl.constexpr
):  # fmt: skip
    """OUT [places outside, CLASSES, INNER places]: of each place, the gradient at its label, and 0 elsewhere. TOTAL, if there is
    one, divides it."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    row, inner = over(at, INNER, N)
    outer, c = over(row, CLASSES, N)
    e = outer * INNER + inner
    places = N // CLASSES
    counts, known, label, weight = label_and_weight(
        T, W, offset(e, places, K0, K1, t0, t1, t2), inside, CLASSES, weight_step, ignored
    )
    here = counts & known & (c == label)
    grad = -weight * tl.load(G + offset(e, places, K0, K1, g0, g1, g2), here, 0.0).to(tl.float64)
    if TOTAL is not None:
        grad = grad / tl.load(TOTAL).to(tl.float64)
    tl.store(OUT + at, tl.where(here, grad, 0.0).to(OUT.dtype.element_ty), inside)


# ---- host ------------------------------------------------------------------------------------------------------------


def checked(self: Tensor, target: Tensor, weight: Tensor | None, rank: int) -> int:
    """The dimension of classes, of arguments that aten does not refuse."""
    taken(self, target, *(() if weight is None else (weight,)))
    if self.dim() not in ((1, 2) if rank == 2 else (4,)) or not self.is_floating_point():
        raise Declined("scores that are refused")
    if target.dtype not in (torch.int64, torch.uint8):
        raise Declined("labels of another dtype")
    classes = 0 if self.dim() == 1 else 1
    places = (*self.shape[:classes], *self.shape[classes + 1 :])
    if tuple(target.shape) != tuple(places):
        raise Declined("labels of another shape")
    if weight is not None and (
        weight.dim() != 1 or weight.shape[0] != self.shape[classes] or weight.dtype != self.dtype
    ):
        raise Declined("weights that are refused")
    return classes


def nll_forward(rank: int):
    def form(
        self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
    ) -> tuple[Tensor, Tensor]:
        classes = checked(self, target, weight, rank)
        shape = tuple(target.shape)
        plans.look_at(target, lambda: check_labels("nll_loss", target, self.shape[classes], ignore_index))
        E, whole = math.prod(shape), reduction != NONE
        out = own(torch.empty(() if whole else shape, dtype=self.dtype, device=self.device))
        total = own(torch.empty((), dtype=self.dtype, device=self.device))
        blocks, parts = cdiv(E, BLOCK), None
        if whole and blocks > 1:
            parts = own(torch.empty((blocks, 2), dtype=torch.float64, device=self.device))
        x_strides = tuple(s for d, s in enumerate(self.stride()) if d != classes)
        sizes, steps = loops_of(shape, [x_strides, target.stride()])
        numbers = (
            E,
            sizes[0],
            sizes[1],
            *steps[0],
            *steps[1],
            self.shape[classes],
            self.stride(classes),
            step(weight),
            ignore_index,
            reduction,
        )
        plans.launch(nll_places, (self, target, weight, out, total, parts), numbers, BLOCK=BLOCK)
        if parts is not None:
            plans.launch(nll_total, (out, total, parts), (blocks, reduction))
        return out, total

    return form


def step(weight: Tensor | None) -> int:
    return 0 if weight is None else weight.stride(0)


def nll_backward(rank: int):
    def form(
        grad_output: Tensor, self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int,
        total_weight: Tensor,
    ) -> Tensor:  # fmt: skip
        classes = checked(self, target, weight, rank)
        taken(self, grad_output, total_weight)
        shape = tuple(target.shape)
        if grad_output.dtype != self.dtype or tuple(grad_output.shape) != (shape if reduction == NONE else ()):
            raise Declined("a gradient that is not like the result")
        if total_weight.numel() != 1:
            raise Declined("no total of weights")
        if rank == 4 and not self.is_contiguous():
            raise Declined("scores with other strides")
        plans.look_at(target, lambda: check_labels("nll_loss_backward", target, self.shape[classes], ignore_index))
        out = own(torch.empty(self.shape, dtype=self.dtype, device=self.device))
        grads = grad_output.stride() if reduction == NONE else (0,) * len(shape)
        sizes, steps = loops_of(shape, [target.stride(), grads])
        if out.numel():
            INNER = math.prod(self.shape[classes + 1 :])
            numbers = (
                out.numel(),
                INNER,
                self.shape[classes],
                sizes[0],
                sizes[1],
                *steps[0],
                *steps[1],
                step(weight),
                ignore_index,
            )
            tensors = out, target, weight, grad_output, total_weight if reduction == MEAN else None
            plans.launch(nll_gradient, tensors, numbers, BLOCK=BLOCK)
        return out

    return form


FORMS = {
    "nll_loss_forward": nll_forward(2), "nll_loss_backward": nll_backward(2), "nll_loss2d_forward": nll_forward(4),
    "nll_loss2d_backward": nll_backward(4),
}  # fmt: skip
