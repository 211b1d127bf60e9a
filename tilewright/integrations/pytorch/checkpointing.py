"""Selective activation checkpointing: results of products are kept, all else is computed again in the backward.

    y = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False, context_fn=save_products)

A product is what says how many operations it is: an op of ours by its `flops`, one of torch's by `torch.utils.flop_counter`. The
rest reads and writes memory at a fraction of a product's time, and is most of what a layer would keep.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import cache
from typing import Any

from torch._ops import OpOverload
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.flop_counter import flop_registry

from ...op import OPS


def save_products() -> tuple[AbstractContextManager, AbstractContextManager]:
    """A `context_fn` of `torch.utils.checkpoint.checkpoint`: `policy` for the forward and for its second run."""
    return create_selective_checkpoint_contexts(policy)


def policy(context: Any, overload: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """What becomes of the results of one call of a torch operator. For policies of one's own: add to what this one saves."""
    return CheckpointPolicy.MUST_SAVE if is_product(overload) else CheckpointPolicy.PREFER_RECOMPUTE


@cache
def is_product(overload: Any) -> bool:
    if not isinstance(overload, OpOverload) or overload._schema.is_mutable:
        return False  # what writes to its arguments must do so again
    if overload.namespace != "tilewright":
        return overload._overloadpacket in flop_registry
    name = overload._schema.name.partition("::")[2]
    op = OPS.get(name.removesuffix("_main_grad"))  # of which only the backward is another
    return op is not None and op.cost.flops is not None
