"""Host arithmetic on sizes and views that op files share."""

from __future__ import annotations

import math

from torch import Tensor


def cdiv(a: int, b: int) -> int:
    """a / b rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The smallest power of two that is at least n (and at least 1)."""
    return 1 << max(0, n - 1).bit_length()


def rows(x: Tensor) -> Tensor:
    """x as [rows, last dimension]: a view where the leading dimensions can be merged, else a copy."""
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
