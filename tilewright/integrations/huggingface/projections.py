"""Linear layers of one input, in training: in the backward each adds its part of the input's gradient to what the others made,
where autograd would have each write a matrix, and then add those."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.module import _has_any_global_hook

from ...core.declaration import PLAIN

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def unhooked(module: nn.Module) -> bool:
    """Whether calling a module does no more than its forward; accelerate's hooks bring weights from elsewhere."""
    hooked = "_hf_hook" in module.__dict__ or any(getattr(module, hooks) for hooks in HOOKS)
    return not (hooked or _has_any_global_hook())


def plain_linear(module: nn.Module, kind: type[nn.Linear] = nn.Linear) -> bool:
    """Whether calling a module is a product of this kind, of plain tensors, and nothing else: no adapter, code, shard or hook would
    be missed."""
    if type(module) is not kind or "forward" in module.__dict__ or type(module.weight) not in PLAIN:
        return False
    return unhooked(module)


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None


class Projected(torch.autograd.Function):
    """x @ weight.T + bias of some weights and as many biases, of which there may be none. The products are those of torch's own
    linear layers."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
        weights, biases = given[: len(given) // 2], given[len(given) // 2 :]
        ctx.save_for_backward(x, *weights)
        ctx.set_materialize_grads(False)
        return tuple(F.linear(x, weight, bias) for weight, bias in zip(weights, biases))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        needs, count = ctx.needs_input_grad, len(weights)
        flat, dx, dweights, dbiases = x.reshape(-1, x.shape[-1]), None, [None] * count, [None] * count
        for i, (dy, weight) in enumerate(zip(grads, weights)):
            if dy is None:
                continue
            dy = dy.reshape(-1, dy.shape[-1])
            if needs[0]:
                dx = dy @ weight if dx is None else dx.addmm_(dy, weight)
            if needs[1 + i]:
                dweights[i] = dy.t() @ flat
            if needs[1 + count + i]:
                dbiases[i] = dy.sum(0)
        return None if dx is None else dx.view(x.shape), *dweights, *dbiases


def projected(x: Tensor, *layers: nn.Module) -> tuple[Tensor, ...]:
    """What the layers give for x: together, where all of them are plain products and a gradient of x is wanted."""
    wanted = torch.is_grad_enabled() and x.requires_grad and type(x) in PLAIN and autocast_dtype(x) is None
    if wanted and not torch.compiler.is_compiling() and all(map(plain_linear, layers)):
        weights = [layer.weight for layer in layers]
        if all(weight.dtype == x.dtype for weight in weights):
            return Projected.apply(x, *weights, *(layer.bias for layer in layers))
    return tuple(layer(x) for layer in layers)


class Together:
    """Layers that a module asks for one after the other, for the same input: the first that is asked makes the results of all.
    Each thread has its own, and one that has not begun calls the layer itself."""

    def __init__(self, layers: dict[str, nn.Module]) -> None:
        self.layers, self.users, self.own = layers, 0, threading.local()

    def begin(self) -> None:
        self.own.__dict__.update(x=None, made={})

    def ask(self, name: str, x: Tensor) -> Tensor:
        own = self.own.__dict__
        if not own:
            return self.layers[name](x)
        if x is not own["x"]:
            own.update(x=x, made=dict(zip(self.layers, projected(x, *self.layers.values()))))
        return own["made"][name]

    def end(self) -> None:
        self.own.__dict__.clear()


class Member:
    """Stands for one of them."""

    def __init__(self, name: str, together: Together) -> None:
        self.name, self.together = name, together

    def __call__(self, x: Tensor) -> Tensor:
        return self.together.ask(self.name, x)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.together.layers[self.name], name)


JOINING = threading.Lock()  # of what stands in modules for their layers


@contextlib.contextmanager
def joined(module: nn.Module, names: tuple[str, ...]) -> Iterator[None]:
    """While it lasts, these layers of a module are made together, where its own code asks for one at a time. Threads that train
    one module share what stands for its layers, until the last of them leaves."""
    layers = {name: module._modules.get(name) for name in names}
    # Without gradients nothing is gained, and threads that only read the model find it as it is
    wanted = torch.is_grad_enabled() and not torch.compiler.is_compiling()
    if not wanted or None in layers.values() or not all(map(plain_linear, layers.values())):
        yield
        return
    with JOINING:
        standing = module.__dict__.get(names[0])
        together = standing.together if isinstance(standing, Member) else Together(layers)
        together.users += 1
        if together is not getattr(standing, "together", None):
            module.__dict__ |= {name: Member(name, together) for name in names}
    together.begin()
    try:
        yield
    finally:
        together.end()
        with JOINING:
            together.users -= 1
            if not together.users:
                for name in names:
                    module.__dict__.pop(name, None)
