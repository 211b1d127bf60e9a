"""Products of groups, one call for all ways of grouping: by rows of the first factor, by the inner dimension, or with a matrix
of its own for each group, of which some rows count.

| a                      | b                         | groups            | result                   | op                           |
|------------------------|---------------------------|-------------------|--------------------------|------------------------------|
| [rows, inner]          | [experts, inner, columns] | `offsets`, rows   | [rows, columns]          | grouped_mm_rows, _rows_fp8   |
| [rows, tokens]         | [tokens, columns]         | `offsets`, tokens | [experts, rows, columns] | grouped_mm_inner, _inner_fp8 |
| [experts, rows, inner] | [experts, inner, columns] | `counts`, rows    | [experts, rows, columns] | grouped_mm_masked            |
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...core.format import Format, Quantized, pack, unpack
from ...core.tensor import cdiv, name_of
from ...gemm.grouped_inner import grouped_mm_inner, grouped_mm_inner_fp8
from ...gemm.grouped_masked import grouped_mm_masked
from ...gemm.grouped_rows import grouped_mm_rows, grouped_mm_rows_fp8, with_epilogue
from ...gemm.operands import DTYPES, KINDS, names_of
from ...gemm.scaled_mm import Act
from ...gemm.tiles import ROWS
from ...runtime.front import fronted
from ..quantise.quantize import quantize

OP = "grouped_mm"
RECIPES = ("RowWise", "BlockWise1x128", "BlockWise128x128")


class Factor(NamedTuple):
    """A factor as it is multiplied, the scales of its rows (of the second factor's: its columns), and their recipe."""

    codes: Tensor
    scale: Tensor | None = None
    recipe: str | None = None


def turned(t: Tensor, yes: bool) -> Tensor:
    return t.transpose(-2, -1) if yes else t


def raw(name: str, t: Tensor, scale: Tensor | None, recipe: Any, transposed: bool) -> Factor:
    """A factor of plain numbers, or of codes with their scales."""
    if recipe is None:
        if scale is not None or t.dtype in KINDS:
            raise ValueError(f"{OP}: scale_{name} and recipe_{name} must be given for codes, neither for plain numbers")
        return Factor(turned(t, transposed))
    found = names_of(recipe)
    if len(found) != 1 or found[0] not in RECIPES:
        raise ValueError(f"{OP}: recipe_{name} must be one of {', '.join(RECIPES)}, got {recipe!r}")
    if not isinstance(scale, Tensor):
        raise ValueError(f"{OP}: scale_{name} must be a tensor for {found[0]}, got {type(scale).__name__}")
    return Factor(turned(t, transposed), scale, found[0])


def factor(name: str, t: Tensor, scale: Tensor | None, recipe: Any, along_rows: bool, transposed: bool) -> Factor:
    if not isinstance(t, Quantized):
        return raw(name, t, scale, recipe, transposed)
    refuse(f"must be None, for {name} is Quantized", **{f"scale_{name}": scale, f"recipe_{name}": recipe})
    return stored(name, t, along_rows, transposed)


def stored(name: str, q: Quantized, along_rows: bool, transposed: bool) -> Factor:
    """A factor out of a quantised value. `along_rows`: the inner dimension is that of the value's rows."""
    fields = ("data", "scale") if along_rows else ("data_t", "scale_t")
    codes, scale = (getattr(q, field) for field in fields)
    if codes is None:
        way = "row-wise" if along_rows else "column-wise"
        raise ValueError(
            f"{OP}: {name} has no {way} operand, along which it is multiplied: quantise it with ways='both'"
        )
    recipe = {"row": "RowWise", "1x128": "BlockWise1x128", "128x128": "BlockWise128x128"}.get(q.format.granularity)
    if recipe is None:
        raise TypeError(f"{OP}: {name} is in the format {q.format}: grouped products take FP8 per row or block")
    if not along_rows:  # [columns, rows of all matrices], of which the rows are contiguous
        codes = codes.unflatten(1, q.shape[:-1]).movedim(0, -1)
    return Factor(turned(codes, transposed), scale, recipe)


def scale_of_matrices(
    b: Factor, experts: int, inner: int, columns: int, q: Quantized | None, along_rows: bool
) -> Tensor:
    """The scales of matrices [experts, inner, columns] as [experts, columns, 1] or [experts, blocks, blocks]."""
    scale, blocks = b.scale, (cdiv(columns, ROWS), cdiv(inner, ROWS))
    if b.recipe == "RowWise":
        if q is not None and not along_rows and scale.dim() == 1:
            scale = scale.expand(experts, columns)  # of the columns of all matrices together
        if scale.numel() == experts * columns:
            return scale.reshape(experts, columns, 1)
        wanted: tuple[int, ...] = (experts, columns)
    elif q is not None:
        # Of the weight [blocks of all rows, blocks of columns], or that transposed; blocks begin anew in each matrix
        scale = scale if along_rows else scale.t()
        down, rows = (blocks[0], columns) if along_rows else (blocks[1], inner)
        if scale.shape[0] < experts * down:
            raise ValueError(
                f"{OP}: b has blocks that reach from one matrix into the next, for {rows} rows are no multiple of {ROWS}:"
                f" quantise it with offsets={rows}, {2 * rows}, ... of its matrices"
            )
        scale = scale[: experts * down].unflatten(0, (experts, down))
        return scale if along_rows else scale.transpose(1, 2)
    else:
        wanted = (experts, *blocks)
        if scale.shape == wanted:
            return scale
    raise ValueError(f"{OP}: scale_b is {list(scale.shape)}, but {b.recipe} of {experts} matrices wants {list(wanted)}")


def scale_of_lines(name: str, f: Factor, lines: int, inner: int, groups: int, q: Quantized | None) -> Tensor:
    """The scales of `lines` rows as [blocks or 1, lines], or [groups, lines] where groups of the inner dimension have their own."""
    scale = f.scale
    if f.recipe == "RowWise":
        count = max(1, groups)
        if q is not None and groups and scale.dim() == 1:
            return scale.expand(groups, lines)
        if scale.numel() == count * lines:
            return scale.reshape(count, lines)
        wanted: tuple[int, ...] = (count * lines,)
    else:
        if q is not None:
            return scale
        wanted = (lines, cdiv(inner, ROWS))
        if scale.dim() == 2 and scale.shape[0] == lines and scale.shape[1] >= wanted[1]:
            return scale.t()
    raise ValueError(
        f"{OP}: scale_{name} is {list(scale.shape)}, but {f.recipe} of {lines} by {inner} wants {list(wanted)}"
    )


@fronted(grouped_mm_rows)
def grouped_mm(
    a: Tensor | Quantized,
    b: Tensor | Quantized,
    offsets: Tensor | None = None,
    *,
    scale_a: Tensor | None = None,
    scale_b: Tensor | None = None,
    recipe_a: Any = None,
    recipe_b: Any = None,
    transposed_a: bool = False,
    transposed_b: bool = False,
    bias: Tensor | None = None,
    act: Act | None = None,
    glu: Act | None = None,
    out_dtype: torch.dtype | None = None,
    out_format: Format | None = None,
    c: Tensor | None = None,
    beta: float = 0.0,
    out: Tensor | None = None,
    counts: Tensor | None = None,
) -> Tensor:
    """Products of groups of rows or tokens, or of matrices, as the table of this module has them; their sizes are on the device.

    `offsets` are end rows, or end tokens, of the groups; without them those of a quantised `a` or `b` are taken. Factors are plain
    numbers, FP8 codes with scales, or `Quantized`. `transposed_a` and `transposed_b` say that an argument is the transpose of the
    factor, as a layer's weight [experts, columns, inner] is: a `Quantized` has no transposed view, and each way of using it takes
    the codes whose inner dimension is contiguous. Scales are torch's:

    * RowWise: `scale_a` [rows], [experts, rows] where `a` has 3 dimensions, `scale_b` [experts, columns]; where tokens are grouped
      each group has its own, [experts * rows] and [experts * columns];
    * BlockWise1x128 of `a`: [rows, inner / 128]; of `b`, where tokens are grouped: [columns, tokens / 128], and groups are then
      whole blocks of 128 tokens;
    * BlockWise128x128 of `b`: [experts, columns / 128, inner / 128]; `a` is then [experts, rows, inner / 128] where it has 3
      dimensions.

    Groups of rows may have `bias` [experts, columns], then `act`, or `glu`: the activation of the first half of the columns times
    the second half. Groups of tokens may have `beta * c` added; `out` may be `c`, an fp32 gradient that is summed in place. Sums
    are fp32, rounded once: to `out_dtype` (that of plain factors, of `c` or `out`, else bf16), or into `out_format`, whose groups
    are the rows'. Of plain numbers grouped by rows there is a gradient, with respect to `a`, `b` and `bias`.
    """
    sources = [t if isinstance(t, Quantized) else None for t in (a, b)]
    many, matrices = a.dim() == 3, b.dim() == 3
    ending = {"bias": bias, "act": act, "glu": glu, "out_format": out_format}
    if many or not matrices:
        refuse("is for groups of rows, where a has 2 dimensions and b has 3", **ending)
    if many or matrices:
        refuse("is for groups of tokens, where a and b have 2 dimensions", c=c, transposed_a=transposed_a or None)
    if many:
        refuse("is for a of 2 dimensions: matrices have counts", offsets=offsets)
    else:
        refuse(f"is for a of 3 dimensions, not for {list(a.shape)}", counts=counts)
    if not many and not matrices:
        first = factor("a", a, scale_a, recipe_a, not transposed_a, transposed_a)
        second = factor("b", b, scale_b, recipe_b, transposed_b, transposed_b)
        return by_tokens(first, second, sources, ends_of(offsets, sources), c, beta, out_dtype, out)
    first = factor("a", a, scale_a, recipe_a, True, False)
    second = factor("b", b, scale_b, recipe_b, transposed_b, transposed_b)
    if (first.recipe is None) != (second.recipe is None):
        raise TypeError(f"{OP}: a and b must both be codes, or neither")
    if many:
        return masked(first, second, sources, transposed_b, counts, out_dtype, out)
    ends = ends_of(offsets, sources)
    return by_rows(first, second, sources, transposed_b, ends, **ending, out_dtype=out_dtype, out=out)


def refuse(why: str, **given: Any) -> None:
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{OP}: {name} {why}")


def ends_of(offsets: Tensor | None, sources: list[Quantized | None]) -> Tensor:
    """The ends of groups, those that a quantised factor came with if no others are given."""
    found = [offsets, *(q.offsets for q in sources if q is not None and q.dim() == 2)]
    known = next((t for t in found if t is not None), None)
    if known is None:
        raise ValueError(f"{OP}: offsets must be given: the end of each group")
    return known


def by_rows(
    a: Factor,
    b: Factor,
    sources: list[Quantized | None],
    transposed: bool,
    offsets: Tensor,
    *,
    bias: Tensor | None,
    act: str | None,
    glu: str | None,
    out_dtype: torch.dtype | None,
    out_format: Format | None,
    out: Tensor | None,
) -> Tensor:
    (rows, inner), (experts, _, columns) = a.codes.shape, b.codes.shape
    dtype = dtype_of(a, out_dtype, out)
    wide = torch.float32 if out_format is not None else dtype
    options = {"bias": bias, "act": act, "glu": glu, "out_dtype": word(wide), "out": None if out_format else out}
    if a.recipe is None:
        graded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (a.codes, b.codes, bias))
        if graded and (bias is not None or act is not None or glu is not None):
            refuse("is for calls that want no gradient", out=out)
            y = grouped_mm_rows.function(a.codes, b.codes, offsets, out_dtype="float32")
            y = with_epilogue(y, bias, offsets, act, glu).to(wide)
        else:
            y = grouped_mm_rows.function(a.codes, b.codes, offsets, **options)
    else:
        if a.recipe == "BlockWise128x128" or b.recipe == "BlockWise1x128":
            raise ValueError(f"{OP}: grouped rows have scales 1x128 or row-wise, their matrices 128x128 or row-wise")
        first = scale_of_lines("a", a, rows, inner, 0, sources[0])
        second = scale_of_matrices(b, experts, inner, columns, sources[1], transposed)
        y = grouped_mm_rows_fp8.function(a.codes, first, b.codes, second, offsets, **options)
    if out_format is None:
        return y
    # The logical dtype of what was rounded from fp32 is the caller's
    if out is not None:
        return quantize.function(y, out_format, offsets=offsets, out=out)
    carrier, tensors = unpack(quantize.function(y, out_format, offsets=offsets), dtype)
    return pack(carrier, tensors, out_format, offsets)


def by_tokens(
    a: Factor,
    b: Factor,
    sources: list[Quantized | None],
    offsets: Tensor,
    c: Tensor | None,
    beta: float,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    dtype = dtype_of(a, out_dtype, out if out is not None else c)
    options = {"c": c, "beta": beta, "out_dtype": word(dtype), "out": out}
    if a.recipe != b.recipe or a.recipe == "BlockWise128x128":
        raise ValueError(
            f"{OP}: where tokens are grouped both factors have scales 1x128, or row-wise, or neither has any"
        )
    if a.recipe is None:
        return grouped_mm_inner.function(a.codes, b.codes, offsets, **options)
    groups, (rows, tokens) = offsets.shape[0] if a.recipe == "RowWise" else 0, a.codes.shape
    first = scale_of_lines("a", a, rows, tokens, groups, sources[0])
    second = scale_of_lines("b", b, b.codes.shape[1], tokens, groups, sources[1])
    return grouped_mm_inner_fp8.function(a.codes, first, b.codes, second, offsets, recipe=a.recipe, **options)


def masked(
    a: Factor,
    b: Factor,
    sources: list[Quantized | None],
    transposed: bool,
    counts: Tensor | None,
    out_dtype: torch.dtype | None,
    out: Tensor | None,
) -> Tensor:
    """[experts, rows, columns], of which the first `counts[e]` rows of each are products."""
    if counts is None:
        raise ValueError(f"{OP}: counts must be given where a has 3 dimensions: the rows of each matrix that count")
    recipes, name = (a.recipe, b.recipe), word(dtype_of(a, out_dtype, out))
    if a.recipe is None:
        return grouped_mm_masked.function(a.codes, b.codes, counts, out_dtype=name, out=out)
    if recipes not in (("BlockWise1x128", "BlockWise128x128"), ("RowWise", "RowWise")):
        raise ValueError(
            f"{OP}: where there are counts a has 1x128 scales and b 128x128, or both row-wise, not {' and '.join(recipes)}"
        )
    (experts, rows, inner), columns = a.codes.shape, b.codes.shape[2]
    second = scale_of_matrices(b, experts, inner, columns, sources[1], transposed)
    if a.recipe == "RowWise":
        # Kernels take scales of blocks: a row's are its own in every block, a column's come after the sum
        blocks = cdiv(inner, ROWS)
        first = scale_of_lines("a", a, experts * rows, inner, 0, sources[0]).reshape(experts, rows, 1)
        ones = torch.ones(1, 1, 1, device=second.device).expand(experts, cdiv(columns, ROWS), blocks)
        given = a.codes, b.codes, counts, first.expand(experts, rows, blocks), ones
        if out is not None:
            grouped_mm_masked.validate(grouped_mm_masked.signature.bind(given, {"out_dtype": name, "out": out}))
        y = grouped_mm_masked.function(*given, out_dtype="float32").mul_(second.transpose(1, 2))
        return y.to(getattr(torch, name)) if out is None else out.copy_(y)
    first = a.scale if sources[0] is None else a.scale.t().unflatten(0, (experts, rows))
    return grouped_mm_masked.function(a.codes, b.codes, counts, first, second, out_dtype=name, out=out)


def dtype_of(a: Factor, wanted: torch.dtype | None, like: Tensor | None) -> torch.dtype:
    """The dtype of a result: the one that is asked for, or that of memory for it, else that of plain factors, else bf16."""
    if wanted is not None:
        return wanted
    return like.dtype if like is not None else torch.bfloat16 if a.recipe else a.codes.dtype


def word(dtype: torch.dtype) -> str:
    """The name of a result's dtype as ops take it."""
    name = name_of(dtype)
    if name not in DTYPES and dtype != torch.float64:
        raise TypeError(f"{OP}: out_dtype must be one of {', '.join(DTYPES)}, got {name}")
    return name
