"""Checks that read device memory, and so cost a synchronisation: only with TILEWRIGHT_DEBUG=1 in the environment."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def can_read(indices: Tensor) -> bool:
    """Whether the contents of these indices are to be checked: asked for, and there to be read."""
    if os.environ.get("TILEWRIGHT_DEBUG") != "1" or indices.is_meta or indices.numel() == 0:
        return False
    return not (indices.is_cuda and torch.cuda.is_current_stream_capturing())


def check_indices(op: str, name: str, indices: Tensor, low: int, high: int) -> None:
    """Raise if an index lies outside [low, high). Kernels clamp such indices; this says where they come from.

    For the host code of an op: what it does here is no part of a plan, so that every call is checked. During graph capture
    nothing can be read, and nothing is checked.
    """
    if not can_read(indices):
        return
    least, most = (int(v) for v in indices.aminmax())
    if least < low or most >= high:
        raise ValueError(f"{op}: {name} must be in [{low}, {high}), got values from {least} to {most}")
