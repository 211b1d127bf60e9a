"""`<op>_main_grad`: an op whose backward adds the gradient of one argument to a buffer, as training with Megatron wants it.

The forward is the op's own. The backward is given: it calls an op that declares the buffer among what it writes. Both are
registered, so that torch.compile and dispatch modes see what is written, and when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ..core.memory import overlapping, self_overlapping
from ..core.tensor import name_of
from .choose import force, forced
from .register import DEVICES, LIBRARY
from .run import Runner

Backward = Callable[[SimpleNamespace, Tensor, Tensor, frozenset], Mapping[str, "Tensor | None"]]


class Accumulating:
    """Registers `<op>_main_grad`, which adds the gradient of the argument `of`. `saves` names the tensors that the backward reads,
    `kinds` the dtypes that the buffer may have, `fixed` arguments that callers do not give.

    `backward(saved, dy, main_grad, needs)` adds to `main_grad` if `of` is among the names `needs`, and gives the other gradients;
    `saved.dtypes` has those of all tensors of the call.
    """

    def __init__(
        self, op: Runner, of: str, backward: Backward, saves: tuple[str, ...], kinds: tuple[str, ...], **fixed: Any
    ) -> None:
        self.op, self.of, self.add, self.saves, self.kinds, self.fixed = op, of, backward, saves, kinds, fixed
        self.name = f"{op.name}_main_grad"
        own = [p for p in op.signature.parameters if p.name not in fixed]
        self.names = [p.name for p in own]
        self.names.insert(self.names.index(of) + 1, "main_grad")
        types = {p.name: p.schema(default=False) for p in own}  # a default would be dropped while a call is traced
        types["main_grad"] = "Tensor main_grad"
        LIBRARY.define(f"{self.name}({', '.join(types[n] for n in self.names)}) -> Tensor")
        for device in DEVICES:
            LIBRARY.impl(self.name, self.forward, device)
        full = f"tilewright::{self.name}"
        torch.library.register_fake(full, self.fake, lib=LIBRARY)
        torch.library.register_autograd(full, self.backward, setup_context=self.keep, lib=LIBRARY)

    def __call__(self, main_grad: Any, values: Mapping[str, Any]) -> Tensor:
        """The op with its arguments by name, and the buffer."""
        if not isinstance(main_grad, Tensor):
            raise TypeError(f"{self.name}: main_grad must be a Tensor, got {type(main_grad).__name__}")
        if main_grad.requires_grad:
            raise ValueError(f"{self.name}: main_grad requires a gradient: pass main_grad.detach()")
        given = {**values, "main_grad": main_grad}
        return getattr(torch.ops.tilewright, self.name)(*(given[n] for n in self.names))

    def arguments(self, flat: tuple) -> tuple[dict[str, Any], Tensor]:
        """The op's arguments and the buffer, after they were checked but for what depends on addresses."""
        given = dict(zip(self.names, flat))
        main_grad, weight = given.pop("main_grad"), given[self.of]
        values = {**given, **self.fixed}
        self.op.signature.validate({**self.op.signature.defaults, **values})
        if name_of(main_grad.dtype) not in self.kinds:
            raise TypeError(f"{self.name}: main_grad must be {' or '.join(self.kinds)}, got {name_of(main_grad.dtype)}")
        if main_grad.shape != weight.shape or main_grad.device != weight.device:
            raise ValueError(
                f"{self.name}: main_grad is {list(main_grad.shape)} on {main_grad.device}, but {self.of} is"
                f" {list(weight.shape)} on {weight.device}"
            )
        return values, main_grad

    def forward(self, *flat: Any) -> Tensor:
        values, main_grad = self.arguments(flat)
        if self_overlapping(main_grad):
            raise ValueError(f"{self.name}: main_grad has elements that share memory")
        if overlapping(main_grad, values[self.of]):
            raise ValueError(f"{self.name}: main_grad shares memory with {self.of}")
        return self.op.public(self.op.run(values))

    def fake(self, *flat: Any) -> Tensor:
        values, _ = self.arguments(flat)
        shape, dtype = next(iter(self.op.expected(values).values()))
        return values[self.of].new_empty(shape, dtype=dtype)

    def keep(self, ctx: Any, inputs: tuple, output: Tensor) -> None:
        given = dict(zip(self.names, inputs))
        ctx.save_for_backward(*(given[n] for n in self.saves))
        # Not saved tensors: another backward into the same buffer would make it one that was changed in the meantime
        ctx.main_grad, ctx.weight = given["main_grad"], given[self.of]
        ctx.numbers = {n: v for n, v in given.items() if not isinstance(v, Tensor)}
        ctx.dtypes = {n: v.dtype for n, v in given.items() if isinstance(v, Tensor)}
        ctx.forced = forced.get()  # autograd may run the backward in a thread of its own

    def backward(self, ctx: Any, dy: Tensor) -> tuple:
        needs = frozenset(n for n, wanted in zip(self.names, ctx.needs_input_grad) if wanted)
        saved = SimpleNamespace(**{**ctx.numbers, **dict(zip(self.saves, ctx.saved_tensors))}, dtypes=ctx.dtypes)
        with force(ctx.forced):
            found = dict(self.add(saved, dy, ctx.main_grad, needs))
        if self.of in needs:
            found[self.of] = placeholder(ctx.weight)
        return tuple(found.get(n) for n in self.names)


def placeholder(weight: Tensor) -> Tensor | None:
    """What stands for a gradient that was added to a buffer, where the weight has Megatron's attributes."""
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    make = torch.zeros_like if getattr(weight, "zero_out_wgrad", False) else torch.empty_like
    return make(weight, requires_grad=False)
