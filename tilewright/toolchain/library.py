"""The compiler's library of mathematical functions, for the interpreter: its names have no bodies there."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import triton.language as tl
from triton.language.extra import libdevice
from triton.runtime.interpreter import TensorHandle

TWINS: dict[str, Callable[..., np.ndarray]] = {
    "exp": np.exp, "exp2": np.exp2, "expm1": np.expm1, "log": np.log, "log1p": np.log1p, "log2": np.log2, "sin": np.sin,
    "cos": np.cos, "tan": np.tan, "atan": np.arctan, "tanh": np.tanh, "sqrt": np.sqrt, "floor": np.floor, "ceil": np.ceil,
    "trunc": np.trunc, "fmod": np.fmod, "copysign": np.copysign, "pow": np.power, "erf": np.vectorize(math.erf, otypes=[float]),
    "rsqrt": lambda x: 1 / np.sqrt(x), "sinpi": lambda x: np.sin(np.pi * x), "cospi": lambda x: np.cos(np.pi * x),
    "fast_sinf": np.sin, "fast_cosf": np.cos, "fast_logf": np.log,
}  # fmt: skip


def twin(function: Callable[..., np.ndarray]) -> Callable[..., tl.tensor]:
    """A function of tensors: in the dtype of the first, each value rounded once from float64."""

    def call(*arguments: tl.tensor) -> tl.tensor:
        dtype = arguments[0].dtype.scalar
        arrays = [np.asarray(a.handle.data, dtype=np.float64) for a in arguments]
        with np.errstate(all="ignore"):
            made = function(*arrays).astype(arguments[0].handle.data.dtype)
        shape = np.broadcast_shapes(*(tuple(map(int, a.shape)) for a in arguments))
        kind = tl.block_type(dtype, list(shape)) if shape else dtype
        return tl.tensor(TensorHandle(made.reshape(shape or (1,)), dtype), kind)

    return call


def install() -> None:
    for name, function in TWINS.items():
        setattr(libdevice, name, twin(function))
