"""Products by cuBLAS and cuBLASLt, through torch: what they take, and how scales have to lie for them.

cuBLASLt multiplies FP8 whose inner dimension is contiguous on both sides, in sizes that 16 divides. Scales of 1x128 blocks lie
block by block, [M, K/128] with strides (1, M); those of 128x128 blocks row by row, each row padded to a multiple of four, without
which results are silently wrong. Where both it and our kernels can be used, `preference.py` says which is.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from ..core.target import Target
from ..core.tensor import cdiv, rows
from ..runtime.choose import forced
from ..runtime.plan import Call
from .destination import by_rows
from .operands import DTYPES
from .preference import LIBRARY, WIDE, preferred

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
SIXTEEN = {torch.bfloat16: "bf16", torch.float16: "fp16"}
# Pairs of recipes that cuBLASLt has on Hopper, by the names of `scaled_mm.PAIRS`
RECIPES = {
    ("TensorWise", "TensorWise"): "fp8_tensor",
    ("RowWise", "RowWise"): "fp8_row",
    ("BlockWise1x128", "BlockWise128x128"): "fp8_block",
    ("BlockWise128x128", "BlockWise1x128"): "fp8_block_left",
    ("BlockWise1x128", "BlockWise1x128"): "fp8_block_both",
}
SCALED_MM_V2 = (
    "self", "mat2", "scale_a", "recipe_a", "swizzle_a", "scale_b", "recipe_b", "swizzle_b", "bias", "out_dtype",
    "contraction_dim", "use_fast_accum",
)  # fmt: skip
OUTS = {"fp8_tensor": tuple(DTYPES), "fp8_row": ("bfloat16",)}  # else
BLOCK_OUTS = ("bfloat16", "float32")


@functools.cache
def entry_points() -> frozenset[str]:
    """Which functions for scaled products this torch has. Only a CUDA build has any; one with other arguments is left out."""
    if torch.version.cuda is None:
        return frozenset()
    found = {name for name in ("_scaled_mm", "_scaled_mm_v2") if hasattr(torch, name)}
    return frozenset(found if knows_recipes() else found - {"_scaled_mm_v2"})


def knows_recipes() -> bool:
    """Whether `_scaled_mm_v2` is the one of torch 2.10 to 2.13. It is private, and may come to take other arguments."""
    packet = getattr(torch.ops.aten, "_scaled_mm_v2", None)
    if packet is None or not hasattr(functional, "ScalingType"):
        return False
    return tuple(argument.name for argument in packet.default._schema.arguments) == SCALED_MM_V2


@functools.cache
def cuda_version() -> tuple[int, ...]:
    """The version of CUDA that torch was built with."""
    return tuple(int(part) for part in (torch.version.cuda or "0").split(".")[:2])


def wanted(target: Target, asked: str, pair: str, M: int, N: int, K: int) -> bool:
    """Whether the library is to be taken if it takes the arguments: it was asked for, or it is the faster."""
    return LIBRARY in (asked, forced.get()) or preferred(target, pair, M, N, K) == LIBRARY


# ---- scaled products -------------------------------------------------------------------------------------------------


def pair_of(a: SimpleNamespace) -> str | None:
    """The name under which `preference.py` knows these operands; None where cuBLASLt has no such product."""
    pair = RECIPES.get((a.recipe_a, a.recipe_b))
    if pair is None or {a.a.dtype, a.b.dtype} - {E4M3, E5M2} or a.a.dtype == E5M2 == a.b.dtype:
        return None
    blocks = "block" in pair
    if blocks and not a.a.dtype == a.b.dtype == E4M3:
        return None
    fast = "_fast" if a.accumulate == "fast" and not blocks else ""
    return f"{pair}{fast}{WIDE if a.out_dtype == 'float32' else ''}"


def refusal(target: Target, a: SimpleNamespace) -> str | None:
    """Why cuBLASLt cannot multiply these operands, even through a torch that has all of it; None if it can."""
    pair = pair_of(a)
    if pair is None:
        return "cuBLASLt has no product of these operands"
    kind = RECIPES[a.recipe_a, a.recipe_b]
    if not target.nvidia or not target.fp8 or (kind != "fp8_tensor" and not target.wgmma):
        return f"cuBLASLt has no {kind} on {target.arch}"
    (M, K), N = a.a.shape, a.b.shape[1]
    if 0 in (M, N, K) or K % 16 or N % 16:
        return "K and N must be multiples of 16"
    if "block" in kind and (K % 128 or (a.recipe_a == "BlockWise1x128" and M % 4)):
        return "K must be a multiple of 128, and M of 4"
    if not (rows_are_aligned(a.a) and rows_are_aligned(a.b.t())):
        return "the inner dimension of both operands must be contiguous, in rows that begin at multiples of 16 bytes"
    if a.act is not None or (a.c is not None and a.beta != 0.0) or a.out_format is not None:
        return "torch has no activation, c or quantised result there"
    if a.out_dtype not in OUTS.get(kind, BLOCK_OUTS):
        return f"torch has no {kind} into {a.out_dtype}"
    if a.bias is not None and ("block" in kind or a.out_dtype == "float32" or a.bias.dtype != DTYPES[a.out_dtype]):
        return "torch adds a bias of the result's 16-bit dtype only, and none to products in blocks"
    return None


def takes(values: Mapping[str, Any]) -> bool:
    """Whether arguments of `scaled_mm` can be multiplied by cuBLASLt here."""
    a = SimpleNamespace(**values)
    return refusal(Target.at(a.a.device), a) is None and absence(a) is None


def rows_are_aligned(t: Tensor) -> bool:
    """Whether the rows of a matrix are contiguous and begin at multiples of 16 bytes."""
    apart = t.shape[0] == 1 or (t.stride(0) % 16 == 0 and t.stride(0) >= t.shape[1])
    return apart and t.stride(1) == 1 and t.data_ptr() % 16 == 0


def fits(target: Target, a: SimpleNamespace) -> bool:
    """Whether cuBLASLt takes these operands, torch gives access to it, and it is the faster or was asked for."""
    if refusal(target, a) is not None or absence(a) is not None:
        return False
    (M, K), N = a.a.shape, a.b.shape[1]
    return wanted(target, a.backend, pair_of(a), M, N, K)


def absence(a: SimpleNamespace) -> str | None:
    """Why this torch gives no access to the product that cuBLASLt has of these operands; None if it does."""
    kind, names = RECIPES[a.recipe_a, a.recipe_b], entry_points()
    if not names:
        return f"torch {torch.__version__} has no scaled products of CUDA"
    if kind != "fp8_tensor" and cuda_version() < (12, 9):
        return f"scales of rows and blocks came with CUDA 12.9, this torch has {torch.version.cuda}"
    if "block" in kind and "_scaled_mm_v2" not in names:
        return f"torch {torch.__version__} has no _scaled_mm_v2, or another than 2.10 to 2.13 have"
    return None


def scale_for(scale: Tensor, recipe: str, second: bool) -> Tensor:
    """A scale [rows or blocks of rows, blocks] laid out as cuBLASLt reads it. It is copied unless it lies so already."""
    if recipe == "TensorWise":
        return scale.reshape(())
    if recipe == "RowWise":
        return scale.reshape(1, -1).contiguous() if second else scale.contiguous()
    if recipe == "BlockWise1x128":
        R = scale.shape[0]
        if scale.stride(0) == 1 and (scale.shape[1] == 1 or scale.stride(1) == R):
            return scale
        return scale.t().contiguous().t()
    down, across = scale.shape
    wide = 4 * cdiv(across, 4)
    there = scale.storage_offset() + down * wide <= scale.untyped_storage().nbytes() // scale.element_size()
    if scale.stride(1) == 1 and (scale.stride(0) == wide or down == 1) and there:
        return scale.as_strided((wide, down), (1, wide))
    padded = scale.new_zeros(down, wide)
    padded[:, :across] = scale
    return padded.t()


class Multiplied(NamedTuple):
    """A product by cuBLASLt: `function(*tensors, out)` gives it, in the memory `out` unless that is None."""

    function: Callable[..., Tensor]
    tensors: tuple[Tensor | None, ...]


def multiplied(values: Mapping[str, Any]) -> Multiplied:
    """The call of cuBLASLt for arguments of `scaled_mm`, which it takes. Scales are laid out for it."""
    names = values["recipe_a"], values["recipe_b"]
    fast = values["accumulate"] == "fast" and "Block" not in names[0]
    scales = scale_for(values["scale_a"], names[0], False), scale_for(values["scale_b"], names[1], True)
    dtype, bias = DTYPES[values["out_dtype"]], values.get("bias")
    tensors = values["a"], values["b"], *scales, None if bias is None else bias.contiguous()
    if "_scaled_mm_v2" not in entry_points():
        about = {"out_dtype": dtype, "use_fast_accum": fast}
        return Multiplied(lambda *given: torch._scaled_mm(*given[:4], bias=given[4], **about, out=given[5]), tensors)
    first, second = [[getattr(functional.ScalingType, name).value] for name in names]

    def function(a: Tensor, b: Tensor, of_a: Tensor, of_b: Tensor, bias: Tensor | None, out: Tensor | None) -> Tensor:
        sides = [of_a], first, [0], [of_b], second, [0]  # 0: scales are not in tiles
        return torch._scaled_mm_v2(a, b, *sides, bias, dtype, [], fast, out=out)

    return Multiplied(function, tensors)


def prepared(values: Mapping[str, Any]) -> Callable[[], Tensor]:
    """A function that calls cuBLASLt and nothing else, for arguments of `scaled_mm`. Scales are laid out for it beforehand."""
    if not takes(values):
        given = SimpleNamespace(**values)
        raise RuntimeError(
            f"cuBLASLt cannot multiply these: {refusal(Target.at(given.a.device), given) or absence(given)}"
        )
    function, tensors = multiplied(values)
    return functools.partial(function, *tensors, None)


def forward(*, out: Tensor | None = None, **values: Any) -> Tensor:
    """Into memory that this allocates, or the caller's: a call that fills memory is a step of a plan."""
    a, b = values["a"], values["b"]
    function, tensors = multiplied(values)
    direct = out is not None and out.is_contiguous()
    y = out if direct else torch.empty((a.shape[0], b.shape[1]), dtype=DTYPES[values["out_dtype"]], device=a.device)
    Call.now(function, *tensors, y)
    return y if out is None or direct else out.copy_(y)


def calls_by_group(
    op: str, values: Mapping[str, Any]
) -> tuple[list[Callable[[], Tensor]], Callable[[list[Tensor]], Tensor]]:
    """(a call of cuBLASLt for each group that is not empty, a function that makes one result of theirs).

    The arguments are those of `grouped_mm_rows_fp8` or `grouped_mm_inner_fp8`, with scales of blocks; operands and scales are cut
    beforehand.
    """
    a, b, scale_a, scale_b = (values[name] for name in ("a", "b", "scale_a", "scale_b"))
    common = {"bias": None, "act": None, "c": None, "beta": 0.0, "accumulate": "full", "out_format": None}
    common |= {"out_dtype": values["out_dtype"], "recipe_a": "BlockWise1x128"}
    by_rows, calls, groups = op == "grouped_mm_rows_fp8", [], []
    ends = [0, *values["offsets"].tolist()]
    for group, (start, end) in enumerate(zip(ends, ends[1:])):
        if start == end:
            continue
        if by_rows:
            here = a[start:end], b[group], scale_a[:, start:end].t(), scale_b[group], "BlockWise128x128"
        else:
            blocks = slice(start // 128, cdiv(end, 128))
            cut = a[:, start:end].contiguous(), b.t()[:, start:end].contiguous().t()
            here = *cut, scale_a[blocks].t(), scale_b[blocks].t(), "BlockWise1x128"
        calls.append(prepared({**common, **dict(zip(("a", "b", "scale_a", "scale_b", "recipe_b"), here))}))
        groups.append(group)

    def finish(parts: list[Tensor]) -> Tensor:
        if by_rows:
            return torch.cat(parts)
        whole = parts[0].new_zeros(len(ends) - 1, *parts[0].shape)
        whole[groups] = torch.stack(parts)
        return whole

    return calls, finish


# ---- plain products --------------------------------------------------------------------------------------------------


def pair_of_matmul(a: SimpleNamespace) -> str | None:
    """The name under which `preference.py` knows these factors; None where cuBLAS does not multiply them as our kernels do."""
    pair = SIXTEEN.get(a.a.dtype) if a.b.dtype == a.a.dtype else None
    return f"{pair}{WIDE}" if pair and a.out_dtype == "float32" else pair


def refusal_of_matmul(target: Target, a: SimpleNamespace) -> str | None:
    """Why cuBLAS is not used for these factors; None if it can be."""
    if pair_of_matmul(a) is None:
        return "only products of bf16 and of fp16 are left to cuBLAS"
    if not target.nvidia:
        return f"there is no cuBLAS on {target.arch}"
    if 0 in (*a.a.shape, *a.b.shape):
        return "there is nothing to multiply"
    if a.bias is not None or a.act is not None or a.c is not None or a.out_format is not None:
        # Of fp16 results of torch.addmm 39 of 200 were not the nearest, as if it rounded before it adds (H200, torch 2.11)
        return "what follows a product is not left to cuBLAS"
    if a.acc_dtype == "float16" or dtype_of(a.a, a.out_dtype) not in (a.a.dtype, torch.float32):
        return "torch has no such sums or results"
    return None


def fits_matmul(target: Target, a: SimpleNamespace) -> bool:
    """Whether cuBLAS takes these factors, is there, and is the faster or was asked for."""
    if torch.version.cuda is None or refusal_of_matmul(target, a) is not None:
        return False
    return wanted(target, a.backend, pair_of_matmul(a), a.a.numel() // a.a.shape[-1], a.b.shape[1], a.a.shape[-1])


def dtype_of(a: Tensor, out_dtype: str | None) -> torch.dtype:
    return a.dtype if out_dtype is None else DTYPES.get(out_dtype, a.dtype)


class Whole:
    """Inside, cuBLAS adds up parts of a sum in fp32, as our kernels do. By default torch lets it add them in 16 bits. That is a
    setting of the process: of threads that are inside at a time the last to leave restores it."""

    NAMES = ("allow_bf16_reduced_precision_reduction", "allow_fp16_reduced_precision_reduction")

    def __init__(self) -> None:
        self.lock, self.inside, self.before = threading.Lock(), 0, {}

    def __enter__(self) -> None:
        settings = torch.backends.cuda.matmul
        with self.lock:
            if self.inside == 0:
                self.before = {name: getattr(settings, name) for name in self.NAMES}
                for name in self.NAMES:
                    setattr(settings, name, False)
            self.inside += 1

    def __exit__(self, *error: Any) -> None:
        with self.lock:
            self.inside -= 1
            if self.inside == 0:
                for name, value in self.before.items():
                    setattr(torch.backends.cuda.matmul, name, value)


whole_sums = Whole()


def fill_product(a: Tensor, b: Tensor, y: Tensor) -> None:
    """Fill y [M, N] with a [M, K] @ b [K, N], as a step of a plan."""
    Call.now(_multiply, a, b, y)


def _multiply(a: Tensor, b: Tensor, y: Tensor) -> None:
    with whole_sums:
        torch.mm(a, b, out=y) if y.dtype == a.dtype else torch.mm(a, b, out_dtype=y.dtype, out=y)


def multiply(a, b, *, out_dtype, out, **_) -> Tensor:
    dtype = dtype_of(a, out_dtype)
    y = torch.empty(*a.shape[:-1], b.shape[1], dtype=dtype, device=a.device) if out is None else out
    return by_rows(y, functools.partial(fill_product, rows(a), b))
