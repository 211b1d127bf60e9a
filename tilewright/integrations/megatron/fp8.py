"""Blockwise FP8 for TransformerEngine's layers: its own tensors, whose codes are made by our kernels.

`TransformerConfig(fp8="e4m3", fp8_recipe="custom", fp8_quantizer_factory="tilewright.integrations.megatron.fp8.quantizer")` has
Megatron call `quantizer` for every tensor that its linear layers quantise. Bits are those of TransformerEngine's recipe with its
default, power-of-two scales; where its compiled code quantises by itself, fused into a norm say, its own kernels run as before.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor

from ...core.format import Quantized
from ...formats.fp8 import Fp8, fp8
from ...formats.interchange import to_te_blockwise
from ...ops.quantise.quantize import quantize

OURS = ("quantize_impl", "copy")


def quantizer(role: Any) -> Any:
    """A `Float8BlockQuantizer` for a tensor in this role: scales of 128x128 blocks for weights, of 1x128 for all else.

    It is an instance of TransformerEngine's very class, which its compiled code compares types with; only this instance's way to
    quantise is ours. `role` is a word, or in newer versions an object with a `tensor_type`.
    """
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockQuantizer

    weight = str(getattr(role, "tensor_type", role)).endswith("weight")
    dims = 2 if weight else 1
    return adopt(Float8BlockQuantizer(tex.DType.kFloat8E4M3, rowwise=True, columnwise=True, block_scaling_dim=dims))


def adopt(made: Any) -> Any:
    for name in OURS:
        vars(made).pop(name, None)  # of an instance that this one was copied from
    made.quantize_impl, made.copy = partial(quantised, made), partial(copied, made.copy)
    return made


def copied(before: Callable[[], Any]) -> Any:
    return adopt(before())


def format_of(quantizer: Any) -> Fp8:
    """What a `Float8BlockQuantizer` makes."""
    if quantizer.amax_epsilon:
        raise ValueError(f"quantizer: amax_epsilon must be 0, got {quantizer.amax_epsilon}")
    ways = {(True, True): "both", (True, False): "row", (False, True): "col"}
    way = ways.get((bool(quantizer.rowwise_usage), bool(quantizer.columnwise_usage)))
    if way is None:
        raise ValueError("quantizer: must have row-wise or column-wise usage")
    code = "e5m2" if str(quantizer.dtype).endswith("E5M2") else "e4m3"
    return fp8(
        "128x128" if quantizer.block_scaling_dim == 2 else "1x128", code, ways=way, pow2=quantizer.force_pow_2_scales
    )


def quantised(quantizer: Any, tensor: Tensor) -> Any:
    return to_transformer_engine(quantize.function(tensor.detach(), format_of(quantizer)), quantizer)


def to_transformer_engine(q: Quantized, quantizer: Any) -> Any:
    """The `Float8BlockwiseQTensor` that shares the memory of `q`; with `quantizer.internal`, the storage that is no tensor."""
    import transformer_engine_torch as tex
    from transformer_engine.pytorch.tensor.float8_blockwise_tensor import Float8BlockwiseQTensor

    fields = to_te_blockwise(q)
    fields["fp8_dtype"] = getattr(tex.DType, fields["fp8_dtype"])
    if quantizer.internal:
        from transformer_engine.pytorch.tensor.storage.float8_blockwise_tensor_storage import (
            Float8BlockwiseQTensorStorage,
        )

        return Float8BlockwiseQTensorStorage(**fields, quantizer=quantizer)
    return Float8BlockwiseQTensor(shape=q.shape, dtype=q.dtype, **fields, quantizer=quantizer, requires_grad=False)
