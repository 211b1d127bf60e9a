"""What the roles share.

A role finds modules that an op can stand for, by what they hold, and makes the forwards that take their place. Each has a file of
its own with a function of (name, module) that returns None for a module that has nothing to do with the role, a `Skip` for one that
stays as it is, or a `Found` for one that was probed and computes what the op does.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from .probe import compared, shallow
from .projections import autocast_dtype

TRAINING = "in training its code does more"
CHECKPOINT = "_gradient_checkpointing_func"  # what a layer's forward runs under, where its checkpoints are asked for
CACHES = ("past_key_values", "layer_past")  # arguments that a forward which runs twice would add to twice
Count = Callable[[str], None]  # told the name of an op that is called


@dataclass
class Skip:
    """A module that stays as it is. `failed`: it should have been one of ours, but computes something else or raises."""

    reason: str
    failed: bool = False
    error: Exception | None = None


@dataclass
class Found:
    """The op, and what instances are to have for it: (module, attribute, value) each."""

    op: str
    changes: Callable[[Count], list[tuple[nn.Module, str, Any]]]
    less: str | None = None  # why it is not all that was asked for


def compared_in_modes(
    ours: Callable[..., Any], theirs: Callable[..., Any], bar: float, module: nn.Module, *given: Any
) -> str | None:
    """Why `ours` does not stand for `theirs` in both modes of a module, or None. In training code may drop some of its values or
    add noise, which none of our forwards does; torch's generators stay as they were."""
    device = next(g.device for g in given if isinstance(g, Tensor))
    with torch.random.fork_rng([] if device.type == "cpu" else [device], device_type=device.type):
        words = compared(ours, theirs, bar, in_mode(module, False), *given)
        if words is not None:
            return words
        before = random_state(device)
        words = compared(ours, theirs, bar, in_mode(module, True), *given)
        if words is None and not torch.equal(before, random_state(device)):  # so few were dropped that it did not show
            words = "it draws random numbers"
        return None if words is None else f"{TRAINING}: {words}"


def in_mode(module: nn.Module, training: bool) -> nn.Module:
    """A copy of a module and of those in it, with the same tensors, in training or not."""
    made = shallow(module)
    children = {name: child and in_mode(child, training) for name, child in module._modules.items()}
    made.__dict__ |= {"training": training, "_modules": children}
    return made


def random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else getattr(torch, device.type).get_rng_state(device)


def ignore(op: str) -> None:
    """The `Count` of a probe."""


def argument(forward: Callable) -> str | None:
    """The name of a forward's only argument beside self."""
    names = [*inspect.signature(forward).parameters]
    return names[1] if len(names) == 2 else None


def taking(name: str, compute: Callable[[nn.Module, Tensor], Tensor]) -> Callable:
    """A forward of one argument of this name."""

    def forward(self: nn.Module, *given: Tensor, **named: Tensor) -> Tensor:
        return compute(self, given[0] if given else named[name])

    return forward


def checkpoints(forward: Callable | None) -> bool:
    """Whether a forward, or what wraps it, runs it under gradient checkpointing. Old versions of transformers do so in a layer's
    `__call__`, which stays."""
    while forward is not None:
        if CHECKPOINT in getattr(getattr(forward, "__code__", None), "co_names", ()):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False


def checkpointed(original: Callable, forward: Callable) -> Callable:
    """`forward` in the place of `original`, under checkpoints if that runs under them, as transformers has it: without caches, but
    for layers that only read them."""
    if not checkpoints(original) or checkpoints(forward):
        return forward

    def made(self: nn.Module, *given: Any, **named: Any) -> Any:
        if not (self.gradient_checkpointing and self.training):
            return forward(self, *given, **named)
        off = {"use_cache": False} | ({} if self._can_checkpoint_with_cache else dict.fromkeys(CACHES))
        named |= {name: value for name, value in off.items() if name in named}
        return getattr(self, CHECKPOINT)(functools.partial(forward, self, **named), *given)

    return made


def bound(module: nn.Module, forward: Callable) -> tuple[nn.Module, str, Any]:
    """As a method, so that a copy of the module has one that is bound to the copy. It has the original's signature but no
    `__wrapped__`: accelerate follows that to take its own wrapper off, and would take this one off too."""
    original = type(module).forward
    forward = checkpointed(original, forward)
    functools.update_wrapper(forward, original)
    del forward.__wrapped__
    forward.__signature__ = inspect.signature(original)
    return module, "forward", MethodType(forward, module)


def alike(x: Tensor, weight: Tensor, *more: Tensor | None) -> tuple[Tensor | None, ...]:
    """In the dtype of the weight or, under autocast, of that: as a linear layer would have them."""
    return cast(autocast_dtype(x) or weight.dtype, x, weight, *more)


def cast(dtype: torch.dtype, *given: Tensor | None) -> tuple[Tensor | None, ...]:
    return tuple(t if t is None else t.to(dtype) for t in given)
