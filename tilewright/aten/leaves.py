"""Overloads that calls of others reach: composites, whose gradient a kernel of their own would take away, and names that torch
forwards to another overload."""

from __future__ import annotations

# For each of them the one that there is a replacement for; of several, the one that does the work
LEAVES: dict[str, str] = {
    "arange": "arange.start_out", "arange.start": "arange.start_out", "arange.start_step": "arange.start_out", "eye": "eye.m_out",
    "eye.m": "eye.m_out", "full": "fill_.Scalar", "linspace": "linspace.out", "ones": "fill_.Scalar", "zeros": "zero_",
    "bitwise_and.Scalar": "bitwise_and.Tensor", "bitwise_and.Scalar_Tensor": "bitwise_and.Tensor",
    "bitwise_and_.Scalar": "bitwise_and_.Tensor", "bitwise_or.Scalar": "bitwise_or.Tensor",
    "bitwise_or.Scalar_Tensor": "bitwise_or.Tensor", "bitwise_or_.Scalar": "bitwise_or_.Tensor", "celu": "elu", "celu_": "elu_",
    "contiguous": "clone", "diag": "diag_embed", "div.Scalar": "div.Tensor", "div.Scalar_mode": "div.Tensor_mode",
    "div_.Scalar": "div_.Tensor", "div_.Scalar_mode": "div_.Tensor_mode", "divide.Scalar": "div.Tensor",
    "divide.Scalar_mode": "div.Tensor_mode", "divide.Tensor": "div.Tensor", "divide.Tensor_mode": "div.Tensor_mode",
    "divide_.Scalar": "div_.Tensor", "divide_.Scalar_mode": "div_.Tensor_mode", "divide_.Tensor": "div_.Tensor",
    "divide_.Tensor_mode": "div_.Tensor_mode", "floor_divide.Scalar": "floor_divide",
    "floor_divide_.Scalar": "floor_divide.out", "log_sigmoid": "log_sigmoid_forward", "logspace": "logspace.out",
    "hstack": "cat", "kron": "mul.Tensor", "pad": "constant_pad_nd", "remainder.Scalar": "remainder.Tensor",
    "remainder_.Scalar": "remainder_.Tensor", "repeat_interleave.self_int": "clone", "stack": "cat", "tile": "repeat",
    "true_divide.Scalar": "div.Tensor", "true_divide.Tensor": "div.Tensor", "true_divide_.Scalar": "div_.Tensor",
    "true_divide_.Tensor": "div_.Tensor", "vstack": "cat", "where.ScalarOther": "where.self", "where.ScalarSelf": "where.self",
    "embedding_backward": "embedding_dense_backward", "gather_backward": "scatter_add_",
    "repeat_interleave.self_Tensor": "repeat_interleave.Tensor", "quantile": "sort", "rand": "uniform_", "rand_like": "uniform_",
    "randn": "normal_", "randn_like": "normal_", "randperm": "randperm.generator_out", "rms_norm": "_fused_rms_norm",
}  # fmt: skip
