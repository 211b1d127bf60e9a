"""Layers for the `kernels` package of Hugging Face: classes whose `forward` takes the place of a module's own.

    from kernels import Mode, kernelize, use_kernel_mapping
    with use_kernel_mapping(kernel_mapping()):
        kernelize(model, mode=Mode.TRAINING, device="cuda")

They hold nothing, as `kernels` wants it: parameters and sizes are those of the module that `forward` is called with.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

from ...ops.activation.glu import glu
from ...ops.norm.rms_norm import rms_norm
from ...ops.rotary.rope import rope
from .probe import NAMES


class Layer(nn.Module):
    """What `kernels` asks of a layer before it takes it."""

    can_torch_compile = True
    has_backward = True


class RMSNorm(Layer):
    """`weight` and `variance_epsilon`, as transformers has them. The result has the dtype of `hidden_states`."""

    def forward(self, hidden_states: Tensor) -> Tensor:
        return rms_norm.function(hidden_states, self.weight, self.variance_epsilon)


def gated(name: str, act: str) -> type[Layer]:
    """act(gate) * up of [gate | up]."""

    def forward(self: nn.Module, x: Tensor) -> Tensor:
        return glu.function(x, act=act)

    return type(name, (Layer,), {"forward": forward, "__doc__": gated.__doc__, "__module__": __name__})


class SwiGLUMLP(Layer):
    """`gate_proj`, `up_proj`, `down_proj`, and silu as `act_fn`."""

    def forward(self, x: Tensor) -> Tensor:
        act = type(self.act_fn).__name__
        if NAMES.get(act) != "silu":
            raise ValueError(f"SwiGLUMLP: act_fn must be silu, is {act}")
        return self.down_proj(glu.function(self.gate_proj(x), self.up_proj(x)))


class RotaryEmbedding(Layer):
    """`apply_rotary_pos_emb` of transformers: `cos` and `sin` [batch, length, head_dim], heads in dimension `unsqueeze_dim`."""

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        return rope.function(q, k, cos, sin, layout="bhsd" if unsqueeze_dim == 1 else "bshd")


UNITS = {"SiluAndMul": "silu", "GeluAndMul": "gelu_erf", "GeluTanhAndMul": "gelu_tanh"}
LAYERS = {
    "RMSNorm": RMSNorm, "SwiGLUMLP": SwiGLUMLP, "rotary_pos_emb": RotaryEmbedding,
    **{name: gated(name, act) for name, act in UNITS.items()},
}  # fmt: skip


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
