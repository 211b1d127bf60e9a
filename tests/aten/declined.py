"""With which dtypes a plain call of an overload is left to aten, and why: what is in neither table is ours with every dtype.

A plain call is `check.provided.aten.call_as`. `LEFT` has what aten takes, or takes in part, on a processor or on a GPU; `REFUSED`
what it refuses too. `GPU_ONLY` is ours, and aten's on a GPU alone.
"""

from __future__ import annotations

import torch

from tilewright.core.tensor import name_of

BOOL, BYTE, FP64 = (torch.bool,), (torch.uint8,), (torch.float64,)
HALVES = torch.bfloat16, torch.float16
FLOATS = (*HALVES, torch.float32, *FP64)
WHOLE = torch.int64, torch.int32, torch.int16, torch.int8, *BYTE
OTHERS = (*WHOLE, *BOOL)
# Of each line: a reason, in which {} is the dtype's name; dtypes; overloads
Lines = tuple[tuple[str, tuple[torch.dtype, ...], str], ...]

# float64 in products, which would take a kernel of its own, is all that a GPU's aten takes of these: integers are a processor's
LEFT: Lines = (
    ("other dtypes than 16 bits and fp32, or several", (*FP64, *OTHERS), "addmm addmm.out addmv addmv.out bmm mm mm.out mv"),
    ("dtype {}", OTHERS, "native_dropout_backward"),
    ("gradients by frequency, or of integers", OTHERS, "embedding_dense_backward"),
    ("no floats", OTHERS, "max_pool2d_with_indices _upsample_bicubic2d_aa"),
)  # fmt: skip
REFUSED: Lines = (
    ("no floats", OTHERS,
     "_fused_rms_norm _fused_rms_norm_backward _weight_norm_interface _weight_norm_interface_backward exponential_"
     " max_pool2d_backward native_batch_norm native_batch_norm_backward native_group_norm native_group_norm_backward"
     " native_layer_norm native_layer_norm_backward normal_ uniform_"),
    ("no floats", tuple(d for d in OTHERS if d != torch.int64), "avg_pool2d avg_pool2d_backward max_pool2d_with_indices_backward"),
    ("no floats", tuple(d for d in OTHERS if d != torch.uint8), "upsample_nearest2d"),
    ("no floats, or no indices", (torch.int64,), "max_pool2d_with_indices_backward"),
    ("no floats, or a dimension that is not there", OTHERS, "_softmax _log_softmax"),
    ("no floats, or a share that is refused", OTHERS, "native_dropout"),
    ("dtypes that are refused", OTHERS, "_softmax_backward_data _log_softmax_backward_data"),
    ("scores that are refused", OTHERS, "nll_loss_forward nll_loss_backward nll_loss2d_forward nll_loss2d_backward"),
    ("shapes or dtypes that are refused", OTHERS, "normal.Tensor_Tensor normal.Tensor_float normal.float_Tensor"),
    ("weights that are refused", OTHERS, "multinomial"),
    ("repeats that are refused", (*FLOATS, torch.int16, torch.int8, *BYTE, *BOOL), "repeat_interleave.Tensor"),
    ("other dtypes than 16 bits, or several", (torch.float32, *FP64, *OTHERS), "_flash_attention_forward"),
    ("no two floats of one dtype", (*HALVES, *OTHERS), "polar"),
    ("integers divided by integers", OTHERS, "addcdiv"),
    ("dtype {}", OTHERS,
     "elu elu_ elu_backward gelu gelu_ gelu_backward glu glu_backward lerp.Tensor lerp_.Tensor linalg_vector_norm"
     " log_sigmoid_forward mean mean.dim mse_loss sigmoid_backward silu silu_ silu_backward softplus std.correction"
     " tanh_backward var_mean.correction"),
    ("dtype {}", WHOLE, "lerp.Scalar lerp_.Scalar"),
    ("dtype int64", BOOL, "lerp.Scalar lerp_.Scalar"),  # as which its weight is promoted
    ("dtype {}", FLOATS,
     "bitwise_and.Tensor bitwise_and_.Tensor bitwise_not bitwise_not_ bitwise_or.Tensor bitwise_or_.Tensor"),
    ("dtype {}", BOOL,
     "abs abs_ addcmul argmax argmin clamp.Tensor clamp_.Tensor cumsum.out div.Tensor_mode div_.Tensor_mode floor_divide"
     " floor_divide.out floor_divide_.Tensor isin.Tensor_Tensor isin.Tensor_Scalar isin.Scalar_Tensor neg neg_"
     " pow.Tensor_Tensor pow_.Tensor relu relu_ remainder.Tensor remainder_.Tensor threshold threshold_backward"),
    ("{}", BOOL, "sub.Tensor sub_.Tensor"),
    ("{}, or a result that is resized or strided", BOOL, "arange.start_out linspace.out logspace.out"),
    ("a result that is resized or strided, or cannot hold them", BOOL, "randperm.generator_out"),
    ("no two vectors of one length and dtype", BOOL, "dot vdot"),
    ("a dimension or dtype that is refused", BOOL, "topk"),
    ("a result that cannot hold it", OTHERS,
     "atan_ cos_ div_.Tensor erf_ exp2_ exp_ reciprocal_ rsqrt_ sigmoid_ sin_ sqrt_ tanh_"),
    ("a result that cannot hold it", BOOL, "clamp_ clamp_min_ pow_.Scalar"),
    ("a result that is resized, cast or strided", tuple(d for d in OTHERS if d != torch.int64), "sum.out"),
)  # fmt: skip
# Of which a processor has no kernels
GPU_ONLY = {"_upsample_bicubic2d_aa": HALVES, "_weight_norm_interface_backward": HALVES, "trace": BOOL}


def by_overload(lines: Lines) -> dict[str, dict[torch.dtype, str]]:
    found: dict[str, dict[torch.dtype, str]] = {}
    for reason, dtypes, overloads in lines:
        for name in overloads.split():
            found.setdefault(name, {}).update({dtype: reason.format(name_of(dtype)) for dtype in dtypes})
    return found


LEFT_OF, REFUSED_OF = by_overload(LEFT), by_overload(REFUSED)


def declined(name: str) -> dict[torch.dtype, str]:
    """The dtypes with which a plain call of an overload is not ours, and why."""
    return {**REFUSED_OF.get(name, {}), **LEFT_OF.get(name, {})}
