"""The bytes that a call must read and write, from which the floor of its time follows.

An op that touches other memory than its arguments and results (a gather, a product) declares `cost.moved`. Every other op reads
each tensor argument once and writes each result once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from .declaration import Declaration
from .format import Format, Quantized


def traffic(op: Declaration, values: Mapping[str, Any]) -> tuple[int, int]:
    """(bytes read, bytes written) by the forward of an op, for arguments by name. Nothing is computed."""
    values = op.arguments(values)
    if op.cost.moved is not None:
        return op.cost.moved(**values)
    read = sum(tensor_bytes(v) for v in values.values())
    with FakeTensorMode() as mode, torch.no_grad():
        results = op.run_reference({n: _fake(v, mode) for n, v in values.items()})
    written = [*(results if isinstance(results, tuple) else (results,)), *(values[name] for name in op.writes)]
    return read, sum(map(tensor_bytes, written))


def tensor_bytes(value: Any) -> int:
    """The bytes of whatever tensors a value holds."""
    if isinstance(value, Format):
        value = value.tensor
    if isinstance(value, (list, tuple)):
        return sum(tensor_bytes(t) for t in value)
    if isinstance(value, Quantized):
        return sum(tensor_bytes(t) for t in value.tensors())
    if not isinstance(value, Tensor):
        return 0
    count = 1
    for size, stride in zip(value.shape, value.stride()):
        count *= size if stride != 0 or size == 0 else 1  # an expanded dimension is read once
    return count * value.element_size()


def _fake(value: Any, mode: FakeTensorMode) -> Any:
    if isinstance(value, Format) and value.tensor is not None:
        return value.bare().with_scale(mode.from_tensor(value.tensor))
    if isinstance(value, (list, tuple)):
        return type(value)(_fake(t, mode) for t in value)
    if isinstance(value, torch.Generator):
        return None
    return mode.from_tensor(value) if isinstance(value, Tensor) else value
