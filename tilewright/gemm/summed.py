"""Products by torch's library whose sums are fp32 and rounded once."""

from __future__ import annotations

import torch
from torch import Tensor

from ..op import upcast

FULL = 132 * 128 * 256  # elements of a product that has a tile for every processor of a Hopper


def product(a: Tensor, b: Tensor, out: Tensor, add: bool = False) -> None:
    """out = a @ b, or out + a @ b, summed in fp32 and rounded once."""
    if a.is_meta:
        return
    if not a.is_cuda or torch.version.hip:  # there torch has no fp32 result of low-precision factors
        with torch.autocast(a.device.type, enabled=False):
            made = upcast(a).contiguous() @ upcast(b).contiguous()
        out.add_(made) if add else out.copy_(made)
    elif out.dtype == torch.float32 == a.dtype:
        torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif out.dtype == a.dtype:
        if out.numel() < FULL:  # cuBLAS may split such a sum and, by torch's default, add the parts in low precision
            made = torch.mm(a, b, out_dtype=torch.float32)
            out.copy_(made.add_(out) if add else made)
        else:
            torch.addmm(out, a, b, out=out) if add else torch.mm(a, b, out=out)
    elif add:
        torch.addmm(out, a, b, out_dtype=out.dtype, out=out)
    else:
        torch.mm(a, b, out_dtype=out.dtype, out=out)
