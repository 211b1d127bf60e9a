"""Weights of experts as FP8 codes, and how long these may be kept: until the weight changes.

A weight [experts, out, in] is quantised in blocks of 128x128, which begin anew at each expert, with its codes transposed beside
it: FP8 tensor cores want the inner dimension contiguous, and that is `in` in the forward, `out` in the backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..core.format import Quantized
from ..core.tensor import cdiv
from ..formats.fp8 import fp8
from ..ops.quantise.quantize import quantize

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

    A weight has changed when its version counter or its memory has. Fused optimisers write past that counter, so codes of a
    weight that learns are made anew for each forward, and none are kept while a gradient waits. `until_cleared` keeps them over
    the forwards of several micro-batches as well: then, and after writing to `weight.data`, `clear` must be called. Not `counted`
    are the writes to weights of someone else's model: adapters merge and averages are taken through `weight.data`. Then every
    weight is one that learns, and none of their codes are kept but `until_cleared`. Nothing is kept while a CUDA graph is
    captured: its replays would go on with the codes of the first."""

    def __init__(self, counted: bool = True) -> None:
        self.made: dict[str, tuple[tuple, Quantized]] = {}
        self.counted = counted
        self.until_cleared = False
        self.gathered = False  # for each use, from shards

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "made": {}}  # copies and files hold no codes

    def clear(self) -> None:
        self.made.clear()

    def of(self, name: str, weight: Tensor, learns: bool = False) -> Quantized:
        """The codes of a weight [experts, out, in] or [out, in], a parameter or a view of one."""
        make = quantize_experts if weight.dim() == 3 else quantize_weight
        capturing = weight.is_cuda and torch.cuda.is_current_stream_capturing()
        if weight.is_inference() or capturing or (learns and not self.until_cleared):
            self.made.pop(name, None)
            return make(weight)
        now = weight._version, weight.data_ptr(), weight.device, weight.dtype, weight.shape
        known = self.made.get(name)
        if known is None or known[0] != now:
            with torch.inference_mode(False):  # codes made in that mode could not be saved for a backward later on
                self.made[name] = known = now, make(weight)
        return known[1]


def learning(parameter: nn.Parameter) -> bool:
    """Whether an optimiser may change the parameter between this forward and the next."""
    waits = parameter.grad is not None or getattr(parameter, "main_grad", None) is not None
    return waits or (torch.is_grad_enabled() and parameter.requires_grad)


class KeepsCodes(nn.Module):
    """A layer that keeps the codes of its weights in `codes`."""

    codes: KeptCodes

    def codes_of(
        self, name: str, weight: Tensor, hold: bool = True
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        """(data, scale, data_t) of the parameter of this name, or of `weight`, a view of it. Without them the op quantises the
        weight itself, in the forward and again in the backward, and so it does with a weight that learns if not `hold`: until
        the backward its codes, both ways, would take as much memory as the weight."""
        # torch.compile traces no cache. What stands in for a parameter, as a parametrization does, may come to lie where the
        # last one lay. Codes that a backward holds on to are as large as the weight that FSDP wanted to be rid of
        plain = type(self._parameters.get(name)) is nn.Parameter
        if torch.compiler.is_compiling() or self.codes.gathered or not plain:
            return None, None, None
        learns = not self.codes.counted or learning(self._parameters[name])
        if learns and not (hold or self.codes.until_cleared):
            self.codes.made.pop(name, None)  # an optimiser may not show that it wrote
            return None, None, None
        q = self.codes.of(name, weight, learns)
        return q.data, q.scale, q.data_t

    def __setattr__(self, name: str, value: Any) -> None:
        """Forget the codes when a parameter is set. FSDP gathers a weight into the memory it had before, past its version counter;
        only the setting shows."""
        if isinstance(value, nn.Parameter) and "codes" in self.__dict__:
            self.codes.clear()
            self.codes.gathered |= hasattr(value, "device_mesh")
        super().__setattr__(name, value)

    def _apply(self, fn: Callable, recurse: bool = True) -> nn.Module:
        self.codes.clear()
        return super()._apply(fn, recurse)

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        self.codes.clear()
        super()._load_from_state_dict(*args, **kwargs)
