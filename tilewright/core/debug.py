"""Checks that read device memory, and so cost a synchronisation: only with TILEWRIGHT_DEBUG=1 in the environment."""

from __future__ import annotations

import math
import os

import torch
from torch import Tensor


def can_read(t: Tensor) -> bool:
    """Whether what this tensor holds is to be checked: that was asked for, and it can be read now."""
    if os.environ.get("TILEWRIGHT_DEBUG") != "1" or t.is_meta or t.numel() == 0:
        return False
    return not (t.is_cuda and torch.cuda.is_current_stream_capturing())


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


def check_numbers(op: str, name: str, numbers: Tensor, least: float = -math.inf) -> None:
    """Raise if a number is NaN or below `least`; like `check_indices` it reads the device."""
    if not can_read(numbers):
        return
    wrong = ~(numbers >= least)
    if bool(wrong.any()):
        below = "" if least == -math.inf else f" or below {least:g}"
        raise ValueError(f"{op}: {name} must not be NaN{below}, got {numbers[wrong].flatten()[:4].tolist()}")


def check_pages(op: str, name: str, table: Tensor, page: int, pages: int, first: Tensor, last: Tensor) -> None:
    """Raise if a table [sequences, most] of pages that hold `page` keys each has a number that is none of `pages` for a page which
    has keys from `first` to before `last` [sequences]. Its other entries may be anything. Like `check_indices` it reads the device.
    """
    if not can_read(table):
        return
    begin = page * torch.arange(table.shape[1], device=table.device)
    read = (begin < last.unsqueeze(1)) & (begin + page > first.unsqueeze(1))
    wrong = read & ((table < 0) | (table >= pages))
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        raise ValueError(
            f"{op}: {name} must be in [0, {pages}) where keys are seen, got {int(table[at])} at {list(at)}"
        )
