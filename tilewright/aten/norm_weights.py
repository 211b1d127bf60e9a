"""Weight norm and its gradient: vectors brought to given lengths."""

from __future__ import annotations

import torch
from torch import Tensor

from .norm import Cells, backward, empty_like, floats, forward
from .plans import own
from .row import Declined
from .softmax import contiguous


def vectors_of(v: Tensor, dim: int) -> Cells:
    """A cell of each vector, along all dimensions but the first or the last."""
    if v.dim() < 2 or not v.numel() or dim not in (0, v.dim() - 1):
        raise Declined("no elements, or a dimension in the middle")
    kept = v.shape[dim]
    others = v.numel() // kept
    if dim == 0:
        return Cells(kept, others, 1, kept, (others, 0, 1, 0), 1, "cell")
    return Cells(kept, others, 1, kept, (1, 0, kept, 0), 1, "cell")


def check_weights(v: Tensor, g: Tensor, dim: int) -> None:
    if g.dtype != v.dtype or g.numel() != v.shape[dim] or not g.is_contiguous():
        raise Declined("lengths of another dtype, shape or with gaps")


def weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> tuple[Tensor, Tensor]:
    floats(v, g)
    cells = vectors_of(v, dim)
    check_weights(v, g, dim)
    wide = torch.float32 if v.dtype in (torch.bfloat16, torch.float16) else v.dtype
    seen = contiguous(v)
    w, norms = empty_like(seen), own(torch.empty_strided(g.shape, g.stride(), dtype=wide, device=g.device))
    forward("norm", seen, w, cells, None, g, None, None, norms)
    return w, norms


def weight_norm_backward(
    grad_w: Tensor, saved_v: Tensor, saved_g: Tensor, saved_norms: Tensor, dim: int
) -> tuple[Tensor, Tensor]:
    floats(grad_w, saved_v, saved_g, saved_norms)
    cells = vectors_of(saved_v, dim)
    check_weights(saved_v, saved_g, dim)
    if grad_w.shape != saved_v.shape or grad_w.dtype != saved_v.dtype or saved_norms.numel() != saved_g.numel():
        raise Declined("a gradient that is not like the result")
    grad, v = contiguous(grad_w), contiguous(saved_v)
    dv, dg = (
        empty_like(v),
        own(torch.empty_strided(saved_g.shape, saved_g.stride(), dtype=saved_g.dtype, device=v.device)),
    )
    backward("norm", grad, v, saved_g, None, saved_norms, dv, dg, None, cells)
    return dv, dg


FORMS = {"_weight_norm_interface": weight_norm, "_weight_norm_interface_backward": weight_norm_backward}
