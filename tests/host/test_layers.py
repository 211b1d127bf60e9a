"""Layers for the `kernels` package: what it asks of a class, and modules whose forward is theirs."""

from __future__ import annotations

import copy
import inspect
from types import MethodType

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tilewright.integrations.huggingface.layers import LAYERS, Here, kernel_mapping


class Norm(nn.Module):
    kernel_layer_name = "RMSNorm"

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 2, 8))
        self.variance_epsilon = 1e-5

    def forward(self, hidden_states: Tensor) -> Tensor:
        return F.rms_norm(hidden_states, (8,), self.weight, self.variance_epsilon)


class Mlp(nn.Module):
    kernel_layer_name = "SwiGLUMLP"

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = nn.Linear(8, 12), nn.Linear(8, 12), nn.Linear(12, 8)
        self.act_fn = nn.SiLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def gate(name: str, act) -> type[nn.Module]:
    class Gate(nn.Module):
        kernel_layer_name = name

        def forward(self, x: Tensor) -> Tensor:
            first, second = x.chunk(2, -1)
            return act(first) * second

    return Gate


class Rotary(nn.Module):
    kernel_layer_name = "rotary_pos_emb"

    def forward(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, unsqueeze_dim: int = 1) -> tuple[Tensor, Tensor]:
        def turned(t: Tensor) -> Tensor:
            first, second = t.chunk(2, -1)
            return t * cos.unsqueeze(unsqueeze_dim) + torch.cat([-second, first], -1) * sin.unsqueeze(unsqueeze_dim)

        return turned(q), turned(k)


MODULES = [
    Norm, Mlp, Rotary, gate("SiluAndMul", F.silu), gate("GeluAndMul", F.gelu),
    gate("GeluTanhAndMul", lambda x: F.gelu(x, approximate="tanh")),
]  # fmt: skip


def arguments(module: nn.Module) -> list[tuple]:
    if isinstance(module, Rotary):
        q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 1, 5, 8)
        angles = torch.randn(2, 5, 4).repeat(1, 1, 2)
        tables = angles.cos(), angles.sin()
        return [(q, k, *tables), (q.transpose(1, 2), k.transpose(1, 2), *tables, 2)]
    return [(torch.randn(3, 8),)]


def outcome(module: nn.Module, given: tuple) -> list[Tensor]:
    leaves = [t.clone().requires_grad_(i < 2) if isinstance(t, Tensor) else t for i, t in enumerate(given)]
    made = module(*leaves)
    made = made if isinstance(made, tuple) else (made,)
    sum((r * torch.linspace(-1, 2, r.numel()).view(r.shape)).sum() for r in made).backward()
    return [*made, *(t.grad for t in leaves[:2] if isinstance(t, Tensor)), *(p.grad for p in module.parameters())]


@pytest.mark.parametrize("kind", MODULES, ids=lambda kind: kind.kernel_layer_name)
def test_a_forward_of_ours_is_the_modules_own(kind):
    torch.manual_seed(0)
    own = kind()
    layer = LAYERS[kind.kernel_layer_name]
    ours = copy.deepcopy(own)
    ours.forward = MethodType(layer.forward, ours)
    for given in arguments(own):
        for a, b in zip(outcome(ours, given), outcome(own, given), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_layers_hold_nothing(layer):
    assert layer.__init__ is nn.Module.__init__
    more = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert more == {"can_torch_compile", "has_backward"}


def test_another_activation_is_refused():
    module = Mlp()
    module.act_fn = nn.ReLU()
    with pytest.raises(ValueError, match="SwiGLUMLP: act_fn must be silu, is ReLU"):
        LAYERS["SwiGLUMLP"].forward(module, torch.randn(3, 8))


def test_mapping_names_devices():
    assert set(kernel_mapping()["RMSNorm"]) == {"cuda"}
    assert kernel_mapping("cpu", "rocm")["RMSNorm"] == dict.fromkeys(("cpu", "rocm"), Here(LAYERS["RMSNorm"]))


def test_kernels_takes_them():
    kernels = pytest.importorskip("kernels", reason="kernels is not installed: pip install kernels")
    model = nn.ModuleList(kind() for kind in MODULES)
    with kernels.use_kernel_mapping(kernel_mapping("cpu")):
        kernels.kernelize(
            model, mode=kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE, device="cpu", use_fallback=False
        )
    for module in model:
        assert module.forward.__func__ is LAYERS[module.kernel_layer_name].forward
