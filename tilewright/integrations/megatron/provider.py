"""Which modules Megatron builds a model of: RMS norms, grouped experts and, if asked for, core attention of ours, the rest
TransformerEngine's or its own."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.extensions import transformer_engine
from megatron.core.models.backends import LocalSpecProvider
from torch import Tensor, nn

from ...ops.norm.rms_norm import rms_norm
from ..huggingface.roles import ignore
from .attention import CoreAttention
from .experts import GroupedMLP

if transformer_engine.HAVE_TE:
    from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider as Base
else:
    Base = LocalSpecProvider


class RMSNorm(nn.Module):
    """An RMS norm whose `weight` [hidden] begins at 1, or at 0 where the config centres it there."""

    def __init__(self, config: Any, hidden_size: int, eps: float, count: Callable[[str], None]) -> None:
        super().__init__()
        self.eps, self.offset, self.count = eps, 1.0 if config.layernorm_zero_centered_gamma else 0.0, count
        device = "cpu" if config.use_cpu_initialization else torch.cuda.current_device()
        fill = torch.zeros if self.offset else torch.ones
        self.weight = nn.Parameter(fill(hidden_size, dtype=config.params_dtype, device=device))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        self.count("rms_norm")
        return rms_norm.function(x, self.weight, self.eps, weight_offset=self.offset)


def norm_over(base: Any, count: Callable[[str], None] = ignore) -> type:
    """A class that makes our RMS norm where the config wants one, and what `base` makes otherwise."""

    class Norm:
        def __new__(cls, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> nn.Module:
            if config.normalization == "RMSNorm" and not options:
                return RMSNorm(config, hidden_size, eps, count)
            return base(config=config, hidden_size=hidden_size, eps=eps, **options)

    return Norm


def provider_over(base: type = Base, count: Callable[[str], None] = ignore, attention: bool = False) -> type:
    """A spec provider: `base` but for norms that stand alone and, with `moe_grouped_gemm`, experts; with `attention`, for the
    core of attention too.

    TransformerEngine's column-parallel linear layer has its norm inside, and keeps it.
    """

    class CountedAttention(CoreAttention):
        def forward(self, *args: Any, **kwargs: Any) -> Tensor:
            count("attention")
            return super().forward(*args, **kwargs)

    class CountedMLP(GroupedMLP):
        def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
            count("moe_feed_forward" if self.coded else "grouped_mm")
            return super().forward(*args, **kwargs)

    class Provider(base):
        def layer_norm(self, rms_norm: bool = False, for_qk: bool = False, **options: Any) -> Any:
            found = super().layer_norm(rms_norm=rms_norm, for_qk=for_qk, **options)
            fused = options.get("has_residual") and not issubclass(base, LocalSpecProvider)
            return found if fused else norm_over(found, count)

        def core_attention(self) -> type:
            return CountedAttention if attention else super().core_attention()

        def grouped_mlp_modules(self, moe_use_grouped_gemm: bool, *legacy: bool, **named: bool) -> Any:
            before = super().grouped_mlp_modules
            if not moe_use_grouped_gemm:
                return before(moe_use_grouped_gemm, *legacy, **named)
            # Until 0.16 a class and its submodules, later what builds the module
            return CountedMLP if len(inspect.signature(before).parameters) == 1 else (CountedMLP, None)

    return Provider
