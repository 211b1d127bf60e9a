"""The calls behind the rows of matrix products: dense and grouped, of plain numbers and of codes in every format.

Truth is the product, in float64, of the numbers that codes stand for, decoded here by the definition of their format. Beside
it, what needs no tolerance: integers whose scales are 1 are multiplied exactly, a row with one number other than 0 picks a column
as it is, and a block of the inner dimension that is scaled by a power of two changes its own part of the sum alone.
"""

from __future__ import annotations

import contextlib
import math

import torch
from torch import Tensor

import tilewright as tw

from ...core.format import Format, Quantized
from ...core.target import TARGETS, pretend
from ...op import force
from ...runtime.kernel import collect
from ..agreement import BF16, FP16, agrees, end_rows, normal

M, N, K = 5, 40, 288  # K is whole blocks of 16 and of 32, and not of 128
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
ONES = {"int8": 127.0, "int4": 7.0, "nvfp4": 6.0 * 448.0}  # the largest number of a block whose scales are 1
EIGHTH = 0.125


# ---- what codes stand for --------------------------------------------------------------------------------------------


def decoded(q: Quantized) -> Tensor:
    """The numbers of a row-wise quantised matrix, in float64."""
    rows, columns = q.shape
    codes, scale = q.data.cpu(), q.scale.cpu()
    if codes.dtype == torch.uint8:  # two codes a byte, the low nibble first
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
        integers = [*range(8), *range(-8, 0)]
        codes = torch.tensor(integers if q.format.name == "int4" else [*E2M1, *(-v for v in E2M1)])[codes]
    if scale.dtype == torch.float8_e8m0fnu:
        scale = torch.exp2(scale.view(torch.uint8).double() - 127)
    scale = scale.double()
    if scale.dim() == 1:
        scale = scale[:, None] if scale.numel() == rows else scale.reshape(1, 1)
    elif getattr(q.format, "granularity", None) == "1x128":
        scale = scale.t()
    for axis, size in enumerate((rows, columns)):
        if scale.shape[axis] not in (1, size):
            block = {"nvfp4": 16, "mx": 32}.get(q.format.name, 128)
            scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    wide = codes.double() * scale
    return wide if q.shared is None else wide * q.shared.cpu().double()


def product(a: Quantized, b: Quantized) -> Tensor:
    """a [M, K] times the transpose of b [N, K]."""
    return decoded(a) @ decoded(b).t()


# ---- dense products --------------------------------------------------------------------------------------------------


def scaled(device: str, form: Format, weight_form: Format | None = None) -> None:
    """A product in a format, its epilogue, a row that picks a column and a block that is scaled."""
    weight_form = weight_form or form
    x, w = normal(device, M, K), normal(device, N, K, seed=1)
    x[:, 0] = 8.0  # the largest number is in the first block
    a, b = tw.quantize(x, form), tw.quantize(w, weight_form)
    exact = product(a, b)
    agrees("y", tw.scaled_mm(a, b.t()), exact, "F")
    agrees("y in fp32", tw.scaled_mm(a, b.t(), out_dtype=torch.float32), exact, "F")
    bias, c = normal(device, N, seed=2), normal(device, M, N, seed=3)
    y = tw.scaled_mm(a, b.t(), bias=bias, act="relu", c=c, beta=0.5)
    agrees("relu(y + bias + c / 2)", y, (exact + bias.cpu().double() + 0.5 * c.cpu().double()).relu(), "F")
    picks_columns(device, form, b)
    scales_one_block(x, form, a, b)


def picks_columns(device: str, form: Format, b: Quantized) -> None:
    """One number other than 0 in a row: a product is one column, rounded once."""
    at = [0, 37, K - 1]
    x = torch.zeros(len(at), K, dtype=BF16)
    for row, column in enumerate(at):
        x[row, column] = ONES.get(form.name, 1.0)
    a = tw.quantize(x.to(device), form)
    y = tw.scaled_mm(a, b.t(), out_dtype=torch.float32)
    agrees("columns", y, product(a, b), "G")


def scales_one_block(x: Tensor, form: Format, a: Quantized, b: Quantized) -> None:
    """Codes of a block that is an eighth are the same, and so is the rest of the sum; a row is a block of its own."""
    block = {"nvfp4": 16, "mx": 32}.get(form.name, 128)
    wide, part = x.clone(), slice(2 * block, 3 * block)
    if getattr(form, "granularity", None) == "row":
        wide[3] *= EIGHTH
        y, less = (tw.scaled_mm(q, b.t(), out_dtype=torch.float32) for q in (a, tw.quantize(wide, form)))
        y[3] *= EIGHTH
        agrees("a row that is an eighth", less, y.double(), "G")
        return
    wide[:, part] *= EIGHTH
    less = tw.scaled_mm(tw.quantize(wide, form), b.t(), out_dtype=torch.float32)
    exact = product(a, b) - (1 - EIGHTH) * decoded(a)[:, part] @ decoded(b)[:, part].t()
    agrees("a block that is an eighth", less, exact, "F")


def integers(device: str, form: Format, weight_form: Format | None = None, largest: int = 127) -> None:
    """Integers, the largest of each block being that of the codes: all scales are 1, and no product or sum is rounded."""
    source = torch.Generator().manual_seed(0)
    made = []
    for rows in (M, N):
        t = torch.randint(-largest, largest + 1, (rows, K), generator=source).to(BF16)
        t[:, ::128] = largest
        made.append(t.to(device))
    x, w = made
    a, b = tw.quantize(x, form), tw.quantize(w, weight_form or form)
    exact = x.cpu().double() @ w.cpu().double().t()
    agrees("integers", tw.scaled_mm(a, b.t(), out_dtype=torch.float32), exact, "G")


def scaled_integers(device: str, form: Format, weight_form: Format | None = None, largest: int = 127) -> None:
    scaled(device, form, weight_form)
    integers(device, form, weight_form, largest)


def plain(device: str) -> None:
    """Every dtype of the factors; sums in fp16 of numbers whose sums fp16 holds; int8, of which int32 holds all sums."""
    for dtype, bar in ((BF16, "E"), (FP16, "E"), (torch.float32, "E"), (torch.float8_e4m3fn, "F")):
        a, b = normal(device, M, K, dtype=dtype), normal(device, K, N, dtype=dtype, seed=1)
        exact = a.cpu().to(torch.float64) @ b.cpu().to(torch.float64)
        agrees(str(dtype), tw.matmul(a, b), exact, bar)
    a, b = (torch.randint(-2, 3, shape, generator=torch.Generator().manual_seed(0)) for shape in ((M, K), (K, N)))
    for dtype in (FP16, torch.float8_e4m3fn):
        y = tw.matmul(a.to(dtype).to(device), b.to(dtype).to(device), acc_dtype="float16", out_dtype="float16")
        agrees(f"{dtype} summed in fp16", y, a.double() @ b.double(), "G")
    a, b = (63 * a).to(torch.int8), (64 * b - 1).clamp(-128, 127).to(torch.int8)
    y = tw.matmul(a.to(device), b.to(device))
    assert y.dtype == torch.int32 and torch.equal(y.cpu().long(), a.long() @ b.long())


def persistent(device: str) -> None:
    """On a chip with bulk copies a product of many tiles is as many programs as there are SMs; and it is right."""
    target = TARGETS["sm_90"]
    a, b = (torch.empty(4096, 256, dtype=BF16, device=device) for _ in range(2))
    with pretend(target), force("portable"), collect() as launches:
        tw.matmul(a, b.t())
    programs = [dict(zip(one.kernel.names, one.ordered))["PROGRAMS"] for one in launches]
    assert programs == [target.sms], f"{programs} programs on {target.sms} SMs"
    a, b = normal(device, 150, 40), normal(device, 40, 144, seed=1)
    with contextlib.nullcontext() if device == "cpu" else force("portable"):  # a GPU may take a library's product
        agrees("several tiles", tw.matmul(a, b), a.cpu().double() @ b.cpu().double(), "E")


# ---- grouped products ------------------------------------------------------------------------------------------------


def grouped(device: str) -> None:
    """Forward, both gradients and decoding of two experts and one without tokens, in blocks of FP8."""
    ends, hidden, ffn = [128, 128, 200], 144, 136
    spans = list(zip([0, *ends], ends))
    offsets, rows = end_rows(device, ends), tw.fp8("1x128", ways="both")
    weight = normal(device, len(ends), ffn, hidden, seed=1, scale=0.2)
    weights = tw.nn.quantize_experts(weight)
    known = torch.stack([decoded(tw.quantize(one, tw.fp8("128x128"))) for one in weight])
    x, dy = (tw.quantize(normal(device, 200, n, seed=n), rows, offsets=offsets) for n in (hidden, ffn))
    seen = {id(q): q.dequantize(torch.float32).cpu().double() for q in (x, dy)}
    y = tw.grouped_mm(x, weights, transposed_b=True)
    dx = tw.grouped_mm(dy, weights)
    for e, (start, end) in enumerate(spans):
        agrees(f"y of {e}", y[start:end], seen[id(x)][start:end] @ known[e].t(), "F")
        agrees(f"dx of {e}", dx[start:end], seen[id(dy)][start:end] @ known[e], "F")
    # Along tokens the codes are those of the column-wise twin
    down = {id(q): column_wise(q, ends) for q in (x, dy)}
    dweight = tw.grouped_mm(dy, x, transposed_a=True, out_dtype=torch.float32)
    for e, (start, end) in enumerate(spans):
        exact = down[id(dy)][start:end].t() @ down[id(x)][start:end]
        agrees(f"dweight of {e}", dweight[e], exact, "F")
    masked(device, weights, known)


def column_wise(q: Quantized, ends: list[int]) -> Tensor:
    """The numbers of the column-wise twin of groups of rows, whose blocks of 128 begin anew with each group."""
    codes, scale, block = q.data_t.t().cpu().double(), q.scale_t.cpu().double(), 0
    for start, end in zip([0, *ends], ends):
        for first in range(start, end, 128):
            codes[first : min(first + 128, end)] *= scale[block, : codes.shape[1]]
            block += 1
    return codes


def masked(device: str, weights: Quantized, known: Tensor) -> None:
    """As many rows of each expert's matrix as its count says."""
    count, hidden = [3, 0, 1], known.shape[2]
    x = normal(device, len(count), 3, hidden, seed=7)
    y = tw.grouped_mm(tw.quantize(x, tw.fp8("1x128")), weights, transposed_b=True, counts=end_rows(device, count))
    for e, rows in enumerate(count):
        exact = decoded(tw.quantize(x[e], tw.fp8("1x128"))) @ known[e].t()
        agrees(f"counted rows of {e}", y[e, :rows], exact[:rows], "F")


def added_to(device: str) -> None:
    """a @ b and c times a number, over c, rounded once."""
    for beta in (1.0, -0.5):
        a, b, c = (normal(device, *shape, dtype=FP16, seed=i) for i, shape in enumerate(((M, K), (K, N), (M, N))))
        exact = a.double() @ b.double() + beta * c.double()
        y = tw.matmul(a, b, c=c, beta=beta, out=c)
        assert y is c, "another tensor came back"
        agrees("c", c, exact, "E")


def runner(device: str) -> None:
    """What an object that runs products does: it makes ready, multiplies plain numbers or codes, and adds, activates and adds."""
    a, b, bias = normal(device, M, K), normal(device, K, N, seed=1), normal(device, N, seed=2)
    y = torch.full((M, N), torch.nan, device=device)
    tw.warmup(tw.matmul, a, b, out_dtype="float32", out=y)
    assert y.isnan().all(), "a kernel was launched"
    exact = a.double() @ b.double()
    agrees("product", tw.matmul(a, b, out_dtype="float32"), exact, "E")
    agrees("activated", tw.matmul(a, b, bias=bias, act="gelu_tanh"), gelu(exact + bias.double()), "E")
    whole, c = tw.fp8("tensor", pow2=False), normal(device, M, N, seed=3)
    x, w = tw.quantize(a, whole), tw.quantize(b.t().contiguous(), whole)
    wide = decoded(x) @ decoded(w).t() + bias.cpu().double()
    agrees("codes", tw.scaled_mm(x, w.t(), bias=bias, act="relu"), wide.relu(), "F")
    agrees(
        "added",
        tw.scaled_mm(x, w.t(), bias=bias, c=c, beta=1.0, out=c),
        wide + normal("cpu", M, N, seed=3).double(),
        "F",
    )


def gelu(x: Tensor) -> Tensor:
    """The one by tanh, as a sigmoid: 1 + tanh leaves nothing of a large negative number."""
    return x * torch.sigmoid(2.0 * math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))


def whole_scales(device: str, out_dtype: torch.dtype) -> None:
    """e4m3 codes of [M, K] and [K, N], each with one scale on the device."""
    a, b = (normal(device, *shape, seed=i).to(torch.float8_e4m3fn) for i, shape in enumerate(((M, K), (K, N))))
    s_a, s_b = torch.tensor([0.02], device=device), torch.tensor([1.7], device=device)
    exact = (a.cpu().double() @ b.cpu().double()) * (s_a.cpu().double() * s_b.cpu().double())
    y = tw.scaled_mm(a, b, s_a, s_b, recipe_a="TensorWise", recipe_b="TensorWise", out_dtype=out_dtype)
    agrees("y", y, exact, "F")


def nvfp4_codes(device: str, swizzled: bool = False) -> None:
    """Blocks of 16 numbers, the scale of the whole being 1: scales of blocks are e4m3(amax / 6), codes the nearest of value / it,
    both ties to even. Swizzled, scales lie in tiles of 128 rows and 4 blocks."""
    x, one = normal(device, 130, 96, scale=3.0), torch.ones(1, device=device)
    x[1], x[2, :16] = (
        0.0,
        torch.tensor([6.0, 0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0] * 2).to(x),
    )  # scale 1, codes between two
    q = tw.quantize(x, tw.nvfp4(scale=one, swizzled=swizzled))
    wide = x.cpu().float().reshape(130, 6, 16)
    scale = (wide.abs().amax(-1) / 6.0).clamp(max=448.0).to(torch.float8_e4m3fn)
    found = q.scale.cpu().view(torch.uint8)
    if swizzled:
        r, b = torch.arange(130)[:, None], torch.arange(6)[None, :]
        found = found.reshape(-1)[(r // 128 * 2 + b // 4) * 512 + r % 32 * 16 + r % 128 // 32 * 4 + b % 4]
    assert torch.equal(found, scale.view(torch.uint8)), "scales of blocks"
    step = scale.float()[..., None]
    near = torch.where(step == 0.0, 0.0, wide.double() / step.double()).clamp(-6.0, 6.0)
    codes = torch.stack((q.data.cpu() & 15, q.data.cpu() >> 4), -1).reshape(130, 6, 16).long()
    values = torch.tensor([*E2M1, *(-v for v in E2M1)], dtype=torch.float64)
    apart = (near.abs()[..., None] - values[:8]).abs()
    ties = (apart == apart.amin(-1, keepdim=True)).nonzero()
    best = torch.full((130, 6, 16), -1)
    for *at, code in ties.tolist():  # of two that are as near, the even one
        at = tuple(at)
        best[at] = code if best[at] < 0 or code % 2 == 0 else best[at]
    assert torch.equal(codes & 7, best), "codes"
    assert bool((values[codes] * near >= 0).all()), "signs"
