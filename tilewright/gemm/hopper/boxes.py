"""Bulk copies on Hopper: which tensors they take, and the descriptors they go by."""

from __future__ import annotations

from torch import Tensor

from ...core.tensor import cdiv
from ...core.triton_versions import TensorDescriptor, gl


def copies_in_bulk(*tensors: Tensor) -> bool:
    """Whether bulk copies take these tensors: rows and matrices begin at multiples of 16 bytes, and columns lie side by side."""
    for t in tensors:
        strides = [s for s, size in zip(t.stride()[:-1], t.shape) if size > 1]
        if t.data_ptr() % 16 or t.stride(-1) != 1 or any(s == 0 or s * t.element_size() % 16 for s in strides):
            return False
    return True


def stores_in_bulk(t: Tensor) -> bool:
    """Whether bulk copies may write a result: its rows must be whole multiples of 16 bytes.

    A result of one bf16 number was seen to change what lay beside it (H200, November 2026); why was not looked into.
    """
    return copies_in_bulk(t) and t.shape[-1] * t.element_size() % 16 == 0


def box_of(t: Tensor, block: list[int], dtype) -> TensorDescriptor:
    # Of a dimension of one element any stride will do, but a descriptor wants a multiple of 16 bytes
    fine = [size > 1 or (s > 0 and s % 16 == 0) for s, size in zip(t.stride(), t.shape)]
    strides = [s if is_fine else 16 * cdiv(t.shape[-1], 16) for s, is_fine in zip(t.stride()[:-1], fine)]
    return TensorDescriptor(t, list(t.shape), [*strides, 1], block, gl.NVMMASharedLayout.get_default_for(block, dtype))
