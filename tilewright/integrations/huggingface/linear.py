"""Linear layers in FP8, by `linear_fp8`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ...nn.expert_codes import KeptCodes
from ...nn.linear import Linear
from .projections import autocast_dtype
from .roles import Count, Found, Skip

LEAST, MULTIPLE = 1024, 128  # sizes from which FP8 products gain more than the casts cost, and the block of a scale
OUTSIDE = ("lm_head", "embed_out", "score", "classifier", "router", "gate")  # too sensitive, or too narrow


class Fp8Linear(Linear):
    """A `torch.nn.Linear` whose class was changed to this one."""

    def forward(self, x: Tensor) -> Tensor:
        self.count("linear_fp8")
        return super().forward(x.to(autocast_dtype(x) or x.dtype))  # the weight keeps its dtype


def linear(name: str, module: nn.Module) -> Found | Skip | None:
    """A plain linear layer of the middle of the model, large enough in both directions."""
    if not isinstance(module, nn.Linear):
        return None
    if type(module) is not nn.Linear:
        return Skip(f"it is a {type(module).__name__}")
    if name.removesuffix(".base_layer").rpartition(".")[2] in OUTSIDE:  # adapters keep what they adapt under that name
        return Skip("the head and routers stay as they are")
    sizes = module.out_features, module.in_features
    if min(sizes) < LEAST or any(size % MULTIPLE for size in sizes):
        return Skip(f"sizes are not both multiples of {MULTIPLE} from {LEAST} on")
    # The input lies there anyway: projections of attention share theirs, and attention keeps its result. Codes of each are more
    attributes = {"__class__": Fp8Linear, "keep": "input", "main_grad": False}

    def changes(count: Count) -> list[tuple[nn.Module, str, Any]]:
        given = {**attributes, "codes": KeptCodes(counted=False), "count": count}
        return [(module, attribute, value) for attribute, value in given.items()]

    return Found("linear_fp8", changes)
