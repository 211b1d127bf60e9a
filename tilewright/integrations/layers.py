"""Layers for the `kernels` package of Hugging Face: classes whose `forward` takes the place of a module's own.

    from kernels import Mode, kernelize, use_kernel_mapping
    with use_kernel_mapping(kernel_mapping()):
        kernelize(model, mode=Mode.TRAINING, device="cuda")

They hold nothing, as `kernels` wants it: parameters and sizes are those of the module that `forward` is called with.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ..ops.glu import glu
from ..ops.rms_norm import rms_norm
from ..ops.rope import rope
from .probe import NAMES


class RMSNorm(nn.Module):
    """`weight` and `variance_epsilon`, as transformers has them. The result has the dtype of `hidden_states`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm.function(hidden_states, self.weight, self.variance_epsilon)


class SiluAndMul(nn.Module):
    """silu(gate) * up of [gate | up]."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return glu.function(x)


class GeluAndMul(nn.Module):
    """gelu(gate) * up of [gate | up], by the error function."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return glu.function(x, act="gelu_erf")


class GeluTanhAndMul(nn.Module):
    """gelu(gate) * up of [gate | up], by the hyperbolic tangent."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        return glu.function(x, act="gelu_tanh")


class SwiGLUMLP(nn.Module):
    """`gate_proj`, `up_proj`, `down_proj`, and silu as `act_fn`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, x: Tensor) -> Tensor:
        act = type(self.act_fn).__name__
        if NAMES.get(act) != "silu":
            raise ValueError(f"SwiGLUMLP: act_fn must be silu, is {act}")
        return self.down_proj(glu.function(self.gate_proj(x), self.up_proj(x)))


class RotaryEmbedding(nn.Module):
    """`apply_rotary_pos_emb` of transformers: `cos` and `sin` [batch, length, head_dim], heads in dimension `unsqueeze_dim`."""

    can_torch_compile = True
    has_backward = True

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return rope.function(q, k, cos, sin, layout="bhsd" if unsqueeze_dim == 1 else "bshd")


LAYERS = {
    "RMSNorm": RMSNorm,
    "SiluAndMul": SiluAndMul,
    "GeluAndMul": GeluAndMul,
    "GeluTanhAndMul": GeluTanhAndMul,
    "SwiGLUMLP": SwiGLUMLP,
    "rotary_pos_emb": RotaryEmbedding,
}


@dataclass(frozen=True)
class Here:
    """What `kernels` calls a repository, of one layer that needs no download."""

    layer: type[nn.Module]

    @property
    def layer_name(self) -> str:
        return self.layer.__name__

    def load(self) -> type[nn.Module]:
        return self.layer

    def __str__(self) -> str:
        return f"tilewright (layer `{self.layer_name}`)"


def kernel_mapping(*devices: str) -> dict[str, dict[str, Here]]:
    """For `kernels.use_kernel_mapping` and `register_kernel_mapping`: every layer by the name that modules ask for, on these
    kinds of device, "cuda" if none is named."""
    return {name: dict.fromkeys(devices or ("cuda",), Here(layer)) for name, layer in LAYERS.items()}
