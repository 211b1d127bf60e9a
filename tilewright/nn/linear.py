"""`torch.nn.Linear` in blockwise FP8."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .expert_codes import KeepsCodes, KeptCodes
from .linear_fp8 import linear_fp8, linear_fp8_main_grad

KEPT = ("codes", "input")


class Linear(KeepsCodes, nn.Linear):
    """y = x @ weight.T + bias with FP8 products, forward and backward (`linear_fp8`); parameters and names are torch's.

    A weight that learns is quantised in each forward and each backward, another once (`KeptCodes`). `keep` is what is kept of
    the input for the weight's gradient: its "codes", a byte an element, or the "input". With `main_grad=True` that gradient is
    added to `weight.main_grad`, a float32 buffer, in the product's own launch; compiled, each call's backward must then come
    before the next call.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        keep: str = "codes",
        main_grad: bool = False,
    ) -> None:
        if keep not in KEPT:
            raise ValueError(f"Linear: keep must be one of {', '.join(KEPT)}, got {keep!r}")
        super().__init__(in_features, out_features, bias, device, dtype)
        self.keep, self.main_grad = keep, main_grad
        self.codes = KeptCodes()

    def forward(self, x: Tensor) -> Tensor:
        """y of x [..., in_features], in its dtype."""
        weight = self.weight
        codes = self.codes_of("weight", weight, hold=False)
        learns = torch.is_grad_enabled() and weight.requires_grad
        if self.main_grad and learns:
            buffer = getattr(weight, "main_grad", None)
            if buffer is None:
                raise ValueError("Linear: main_grad=True wants a float32 buffer at weight.main_grad")
            return linear_fp8_main_grad(x, weight, buffer, self.bias, *codes)
        return linear_fp8.function(x, weight, self.bias, *codes, keep=self.keep if learns else "input")

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, keep={self.keep}, main_grad={self.main_grad}"
