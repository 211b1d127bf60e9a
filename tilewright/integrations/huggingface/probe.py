"""A tiny input for someone else's code, to see whether it computes what an op of ours does.

A module's class is run on a twin: the module's own attributes with small parameters. So nothing is written to the module, and one
whose parameters are sharded, quantised, wrapped or on the meta device can be probed as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.activation.glu import ACTIVATIONS

EXACT = 1e-5  # of the largest value, where both sides do the same few operations in fp32
PRODUCTS = 2e-3  # where matrix products lie between, which on a GPU may round factors to 11 bits
UNRUN = "its code does not run on a probe"
# What libraries call activations, by the name of the function or of its class.
NAMES = {
    "silu": "silu", "SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh", "PytorchGELUTanh": "gelu_tanh",
    "NewGELUActivation": "gelu_tanh", "GELUActivation": "gelu_erf", "GELU": "gelu_erf", "gelu": "gelu_erf", "ReLU": "relu",
    "Sigmoid": "sigmoid",
}  # fmt: skip


class Source:
    """Random numbers, always the same, which take none from torch's own generators."""

    def __init__(self, device: torch.device, dtype: torch.dtype = torch.float32) -> None:
        self.made, self.device, self.dtype = torch.Generator().manual_seed(7), device, dtype

    def tensor(self, *shape: int, scale: float = 1.0) -> Tensor:
        drawn = torch.randn(shape, generator=self.made, dtype=torch.float32) * scale
        return drawn.to(self.device, self.dtype)

    def tokens(self, count: int, width: int) -> Tensor:
        """[1, count, width]; the later half is large, so that clamps show."""
        x = self.tensor(1, count, width)
        x[:, count // 2 :] *= 30
        return x

    def integers(self, *shape: int, high: int) -> Tensor:
        return torch.randint(high, shape, generator=self.made).to(self.device)

    def linear(self, inputs: int, outputs: int, bias: bool) -> nn.Linear:
        made = nn.Linear(inputs, outputs, bias, device="meta")
        made.weight = nn.Parameter(self.tensor(outputs, inputs, scale=inputs**-0.5))
        if bias:
            made.bias = nn.Parameter(self.tensor(outputs))
        return made


def device_of(module: nn.Module) -> torch.device:
    """Where to probe: with the module's parameters, or on the CPU if they are nowhere."""
    found = next((p.device for p in module.parameters()), torch.device("cpu"))
    return torch.device("cpu") if found.type == "meta" else found


def shallow(module: nn.Module) -> nn.Module:
    """An instance of the same class with the same attributes. `copy.copy` calls `__new__`, of which sharded modules have their
    own."""
    made = object.__new__(type(module))
    made.__dict__.update(module.__dict__)
    return made


def twin(module: nn.Module, parameters: dict[str, Tensor], children: dict[str, nn.Module], **more: Any) -> nn.Module:
    """A module of the same class and attributes, but with these parameters, children and further attributes."""
    made = shallow(module)
    made.__dict__["_parameters"] = {name: nn.Parameter(value) for name, value in parameters.items()}
    made.__dict__["_modules"] = dict(children)
    made.__dict__.update(more)
    return made


def differ(ours: Any, theirs: Any, bar: float) -> str | None:
    """How two results differ by more than `bar` of the largest value, in words."""
    if isinstance(theirs, tuple):
        return next((words for a, b in zip(ours, theirs, strict=True) if (words := differ(a, b, bar))), None)
    if ours.shape != theirs.shape:
        return f"its result is {list(theirs.shape)}, ours {list(ours.shape)}"
    if not theirs.numel():
        return None
    most = theirs.float().abs().max().item()
    error = (ours.float() - theirs.float()).abs().max().item()
    return None if error <= bar * max(most, 1e-30) else f"results differ by {error:.2g} where the largest is {most:.2g}"


def compared(ours: Callable[..., Any], theirs: Callable[..., Any], bar: float, *given: Any) -> str | None:
    """Why `ours` does not stand for `theirs`, or None. Their code may fail on what it does not expect."""
    kind = next((g.device.type for g in given if isinstance(g, Tensor)), "cpu")
    with torch.no_grad(), torch.autocast(kind, enabled=False):
        try:
            expected = theirs(*given)
        except Exception as error:
            return f"{UNRUN}: {type(error).__name__}: {error}"
        try:
            made = ours(*given)
        except Exception as error:
            return f"what should stand for it does not run on a probe: {type(error).__name__}: {error}"
        return differ(made, expected, bar)


def activation(function: Any) -> str | None:
    """The name that `glu` has for an activation function, if it has one."""
    known = NAMES.get(getattr(function, "__name__", type(function).__name__))
    if known is None or (isinstance(function, nn.Module) and next(function.parameters(), None) is not None):
        return None
    x = torch.linspace(-9, 9, 73, dtype=torch.float32)
    return known if compared(lambda a: ACTIVATIONS[known](a, 1.0), function, EXACT / 5, x) is None else None
