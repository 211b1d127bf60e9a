"""Results as a registered op returns them: flat. A quantised result is up to `PIECES` tensors led by a carrier, one element
expanded to the logical shape, through which autograd sends an ordinary gradient."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..core.declaration import PIECES, Declaration
from ..core.format import Quantized, pack


def flatten(results: Any) -> tuple[Tensor, ...]:
    """All results as the registered op returns them; absent pieces of a quantised one are empty tensors."""
    made: list[Tensor] = []
    for r in results if isinstance(results, tuple) else (results,):
        if not isinstance(r, Quantized):
            made.append(r)
            continue
        made.append(torch.empty(1, dtype=r.dtype, device=r.device).expand(r.shape))
        pieces = r.tensors()
        made += [*pieces, *(torch.empty(0, device=r.device) for _ in range(PIECES - len(pieces)))]
    return tuple(made)


def saved_results(op: Declaration, flat: tuple[Tensor, ...]) -> dict[str, Tensor]:
    """The results that the backward wants, by name."""
    return {name: flat[at] for name, at in op.saved_results.items()}


def unflatten(op: Declaration, values: Mapping[str, Any], flat: tuple) -> tuple:
    """The results from what the registered op (or the autograd function) returned."""
    fmt = values.get("out_format")
    if fmt is None:
        return tuple(flat)
    groups = values.get(op.groups)
    if op.groups in op.results:  # the op makes the groups itself
        groups = flat[op.results.index(op.groups) + PIECES]
    return (pack(flat[0], flat[1 : 1 + len(fmt.tensor_names)], fmt, groups), *flat[1 + PIECES :])
