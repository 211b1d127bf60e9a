"""Weights of experts as FP8 codes, and how long they may be kept: until the weight is another.

A weight [experts, out, in] is quantised in blocks of 128x128, which begin anew at each expert, with its codes transposed beside
it: FP8 tensor cores want the inner dimension contiguous, and that is `in` in the forward, `out` in the backward.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..core.format import Quantized
from ..core.tensor import cdiv
from ..formats.fp8 import fp8
from ..ops.quantize import quantize

BLOCK = 128
WEIGHTS = {ways: fp8("128x128", ways=ways) for ways in ("row", "col", "both")}


def quantize_experts(weight: Tensor) -> Quantized:
    """The codes of a weight [experts, out, in] that `moe_feed_forward` takes: `data` and `scale`, and `data_t`."""
    if weight.dim() != 3:
        raise ValueError(f"quantize_experts: weight must be [experts, out, in], got {list(weight.shape)}")
    return quantised(weight.detach(), "both")


def quantize_weight(weight: Tensor) -> Quantized:
    """The codes of a weight [out, in] that `linear_fp8` takes."""
    with torch.no_grad():
        return quantize.run({"x": weight.detach(), "out_format": WEIGHTS["both"], "offsets": None})


def quantised(weight: Tensor, ways: str) -> Quantized:
    E, rows, _ = weight.shape
    offsets = None
    if rows % BLOCK:  # else blocks of all experts together are those of each
        offsets = torch.arange(rows, E * rows + 1, rows, dtype=torch.int32, device=weight.device)
    with torch.no_grad():
        return quantize.run({"x": weight, "out_format": WEIGHTS[ways], "offsets": offsets})


def blocks_of(scale: Tensor, shape: torch.Size) -> Tensor:
    """The scales of a weight of this shape as [experts, blocks of rows, blocks of columns]."""
    E, rows, _ = shape
    count = cdiv(rows, BLOCK)
    return scale[: E * count].unflatten(0, (E, count))


def transposed_blocks(codes_t: Tensor, shape: torch.Size) -> Tensor:
    """Transposed codes [in, experts * out] as [experts, out, in], `out` contiguous."""
    return codes_t.unflatten(1, (shape[0], shape[1])).permute(1, 2, 0)


class KeptCodes:
    """The codes of a module's weights, each as long as its weight is the one that they were made of.

    A weight is another when its version counter or its memory is: optimisers and `load_state_dict` count, writing to
    `weight.data` does not, after which `clear` must be called. Nothing is kept while a CUDA graph is captured: its replays
    would go on with the codes of the first."""

    def __init__(self) -> None:
        self.made: dict[str, tuple[tuple, Quantized]] = {}

    def __getstate__(self) -> dict[str, Any]:
        return {"made": {}}  # copies and files hold no codes

    def clear(self) -> None:
        self.made.clear()

    def of(self, name: str, weight: Tensor) -> Quantized:
        """The codes of a weight [experts, out, in] or [out, in], a parameter or a view of one."""
        make = quantize_experts if weight.dim() == 3 else quantize_weight
        capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if weight.is_inference() or capturing:
            return make(weight)
        now = weight._version, weight.data_ptr(), weight.device, weight.dtype, weight.shape
        known = self.made.get(name)
        if known is None or known[0] != now:
            with torch.inference_mode(False):  # codes made in that mode could not be saved for a backward later on
                self.made[name] = known = now, make(weight)
        return known[1]
