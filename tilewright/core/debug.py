"""Checks that read device memory, and so cost a synchronisation: only with TILEWRIGHT_DEBUG=1 in the environment."""

from __future__ import annotations

import os

import torch
from torch import Tensor


def can_read(indices: Tensor) -> bool:
    """Whether the contents of these indices are to be checked: that was asked for, and they can be read now."""
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


def check_labels(op: str, labels: Tensor, classes: int, ignore_index: int) -> None:
    """Raise if a label is neither a class nor `ignore_index`; like `check_indices` it reads the device."""
    if not can_read(labels):
        return
    wrong = ((labels < 0) | (labels >= classes)) & (labels != ignore_index)
    if bool(wrong.any()):
        raise ValueError(
            f"{op}: labels must be in [0, {classes}) or {ignore_index}, got {labels[wrong].flatten()[:4].tolist()}"
        )


def check_ends(op: str, name: str, ends: Tensor | None, most: int) -> None:
    """Raise if numbers that mark the ends of groups do not ascend within [0, most]; like `check_indices` it reads the device."""
    if ends is None or not can_read(ends):
        return
    found = ends.tolist()
    if found != sorted(found) or found[0] < 0 or found[-1] > most:
        raise ValueError(
            f"{op}: {name} must ascend within [0, {most}], got {found[:8]}{' ...' if len(found) > 8 else ''}"
        )
