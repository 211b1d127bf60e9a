"""How losses over rows of logits are sharded: each rank has rows of its own, and all have the whole vocabulary."""

from __future__ import annotations

from types import SimpleNamespace

import torch
from torch import Tensor

from ...op import Sharding, upcast


def weight_of_labels(a: SimpleNamespace) -> Tensor:
    """What a mean divides by: how many labels count, or the sum of the weights of their classes."""
    weight = None if hasattr(a, "hidden") else a.weight  # of the classes, not of a linear layer
    vocab = a.weight.shape[0] if hasattr(a, "hidden") else a.logits.shape[-1]
    own = (a.labels >= 0) & (a.labels < vocab) & (a.labels != a.ignore_index)
    if weight is not None:
        own = torch.where(own, upcast(weight)[a.labels.clamp(0, vocab - 1)], 0.0)
    return own.sum()


ADVICE = {"vocab": "pass its to_local() to parallel_cross_entropy"}


def of_rows(a: SimpleNamespace) -> Sharding:
    """Rows are apart from one another, but that a mean divides by what the labels of all ranks weigh."""
    if a.reduction != "mean":
        return Sharding(advice=ADVICE)
    return Sharding(divisor=weight_of_labels, summing={"reduction": "sum"}, advice=ADVICE)
