"""Products on hardware: exact where sums are exact, in every pair of formats and by every implementation that takes it; what fast
accumulation loses; and the codes of the formats that products alone use, bit for bit against the reference on a CPU."""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests import integer_oracle
from tests import product_oracle as oracle
from tilewright.check.oracle import pieces, same_bits
from tilewright.core.draw import Draw
from tilewright.core.target import Target
from tilewright.formats.mx import CODES, RULES
from tilewright.gemm.hopper import scaled_mm as hopper
from tilewright.gemm.scaled_mm import PAIRS, draw_operand, product

pytestmark = pytest.mark.gpu
FEW, MANY, COLUMNS, INNER = 64, 256, 512, 1024  # the least that every kernel takes
ONCE = ("fp8_row", "fp8_tensor")  # whose sums may stay in the tensor cores
SUMS = [(pair, "full") for pair in PAIRS] + [(pair, "fast") for pair in ONCE]


def takers(exact: oracle.Exact, accumulate: str, device: str = "cuda") -> Iterator[dict]:
    """The arguments of a call by each implementation that takes these operands, into fp32 if it can, else into bf16."""
    target, given = Target.at(torch.device(device)), exact.arguments(device)
    for one in product.implementations:
        for out_dtype in ("float32", "bfloat16"):
            call = {**given, "accumulate": accumulate, "out_dtype": out_dtype, "backend": one.name}
            if one.when(target, SimpleNamespace(**product.signature.bind((), call))):
                yield call
                break


def agrees(exact: oracle.Exact, accumulate: str = "full") -> None:
    calls = list(takers(exact, accumulate))
    assert calls
    for call in calls:
        y, wanted = product.function(**call).cpu(), exact.wanted.float().to(getattr(torch, call["out_dtype"]))
        same_bits(
            f"{call['backend']} into {call['out_dtype']}", y + 0.0, wanted + 0.0
        )  # a sum with 0.0 in it is never -0.0


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize(("pair", "accumulate"), SUMS)
def test_one_hot_rows_give_dequantised_values(pair, accumulate, rows):
    agrees(oracle.one_hot_rows(pair, rows, COLUMNS, INNER), accumulate)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize(("pair", "accumulate"), SUMS)
def test_a_block_counts_for_itself_alone(pair, accumulate, rows):
    agrees(oracle.larger_block(pair, rows, COLUMNS, INNER), accumulate)


@pytest.mark.parametrize("rows", [FEW, MANY])
@pytest.mark.parametrize("kinds", [("int8", "int8"), ("int4", "int4"), ("int8", "int4")])
def test_integers_are_exact(kinds, rows):
    agrees(oracle.integers(kinds, rows, COLUMNS, INNER))


def test_every_implementation_was_asked():
    """On the chip that all of them are for."""
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("needs a Hopper, and a Triton that offers what its kernels in Gluon call")
    made = (oracle.one_hot_rows(pair, rows, COLUMNS, INNER) for pair in PAIRS for rows in (FEW, MANY))
    asked = {call["backend"] for exact in made for accumulate in ("full", "fast") for call in takers(exact, accumulate)}
    assert {one.name for one in product.implementations if not one.library} <= asked


# ---- what the tensor cores lose --------------------------------------------------------------------------------------


@functools.cache
def errors(inner: int) -> dict[str, float]:
    """Relative RMS errors of fp32 results against the float64 product of the codes, 512x512 and normally distributed."""
    source = torch.Generator().manual_seed(inner)
    a, b = (torch.randn(512, inner, generator=source).to(torch.float8_e4m3fn).cuda() for _ in range(2))
    scale = torch.ones(512, 1, device="cuda")
    exact, found = a.double() @ b.double().t(), {}
    for accumulate in ("full", "fast"):
        y = tw.scaled_mm(
            a, b.t(), scale, scale.t(), recipe_a="RowWise", recipe_b="RowWise", out_dtype=torch.float32,
            accumulate=accumulate, backend="triton",
        )  # fmt: skip
        found[accumulate] = float((y.double() - exact).norm() / exact.norm())
    return found


@pytest.mark.parametrize("inner", [512, 2048, 8192, 16384])
def test_what_fast_accumulation_loses(inner):
    """`docs/measured.md` has the numbers; full accumulation keeps to its bar at any length."""
    found = errors(inner)
    if "OUT" in os.environ:
        with (Path(os.environ["OUT"]) / "fast_accumulation.jsonl").open("a") as file:
            file.write(json.dumps({"inner": inner, **found}) + "\n")
    assert found["full"] <= 5e-4 and found["full"] <= found["fast"] <= 5e-3


# ---- codes -----------------------------------------------------------------------------------------------------------

INTEGERS = [
    tw.int8("row"), tw.int8("tensor", ways="both"), tw.int8("1x128", ways="both"), tw.int8("128x128", ways="both"),
    tw.int4(), tw.int4("1x128", ways="both"), tw.int4("1x128", zero=True, ways="both"),
]  # fmt: skip
SMALL = [tw.mx(code, scale_rule=rule, ways="both") for code in CODES for rule in RULES]
SMALL += [
    tw.nvfp4(ways="both"),
    tw.nvfp4(),
    tw.nvfp4(ways="col"),
    tw.nvfp4(ways="both", swizzled=True),
    tw.mx(swizzled=True),
]


def every() -> Tensor:
    """Every finite bf16 value: neighbours side by side, and mixed so that blocks hold numbers of all sizes."""
    x = torch.arange(65536, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    x = x[x.float().isfinite()]
    x = torch.cat([x, x[torch.randperm(len(x), generator=torch.Generator().manual_seed(0))]])
    return x[: len(x) // 510 * 510].reshape(-1, 510)  # no multiple of any block


def random(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows))


def special() -> Tensor:
    """NaN, infinities, signed zeros and empty blocks."""
    x = random(64, 320)
    x[3, 5], x[20, 100], x[40, 300] = float("nan"), float("inf"), -float("inf")
    x[8:16], x[9, 0] = 0.0, -0.0
    return x


SOURCES = {
    "every value": every,
    "special": special,
    "matrix": lambda: torch.from_numpy(integer_oracle.matrix(130, 258, seed=1)),
    "odd strides": lambda: random(68, 516).half()[::2, ::2],
    "nothing": lambda: torch.zeros(0, 256),
}


def agree(label: str, x: Tensor, fmt: tw.Format) -> None:
    made, expected = tw.quantize(x.cuda(), fmt), fmt.quantize(x)
    for (tail, found), right in zip(pieces(made).items(), pieces(expected).values()):
        same_bits(f"{label} in {fmt}{tail}", found.cpu(), right)
    same_bits(f"{label} from {fmt}", tw.dequantize(made).cpu(), expected.dequantize())


@pytest.mark.parametrize("fmt", INTEGERS + SMALL, ids=str)
def test_codes(fmt):
    for label, make in SOURCES.items():
        agree(label, make(), fmt)


@pytest.mark.parametrize("fmt", [tw.int8("row"), tw.int8("1x128"), tw.int4(), tw.int4("1x128", zero=True)], ids=str)
def test_quotients_at_the_edge_of_two_codes(fmt):
    largest = 127 if fmt.name == "int8" else 7
    agree("ties", torch.from_numpy(integer_oracle.ties(largest, 128, seed=1)), fmt)


@pytest.mark.parametrize("fmt", [tw.int8("row"), tw.mx("e4m3"), tw.mx("e2m1"), tw.nvfp4()], ids=str)
def test_quantised_operands_are_multiplied_as_what_they_stand_for(fmt):
    source = torch.Generator().manual_seed(6)
    x, w = (torch.randn(n, INNER, generator=source).bfloat16().cuda() for n in (MANY, COLUMNS))
    a, b = tw.quantize(x, fmt), tw.quantize(w, fmt)
    exact = a.dequantize(torch.float32).double() @ b.dequantize(torch.float32).double().t()
    y = tw.scaled_mm(a, b.t(), out_dtype=torch.float32)
    assert float((y.double() - exact).norm() / exact.norm()) <= 5e-4


def test_masked_matrices_with_scales_of_rows():
    """Scales of stride 0 along the inner dimension, in the kernel that decoding takes."""
    source = torch.Generator().manual_seed(7)
    a, b = (torch.randn(4, n, INNER, generator=source).to(torch.float8_e4m3fn).cuda() for n in (FEW, COLUMNS))
    scale_a, scale_b = (torch.rand(4, n, generator=source).cuda() + 0.5 for n in (FEW, COLUMNS))
    counts = torch.tensor([FEW, 1, 0, 17], device="cuda")
    y = tw.grouped_mm(
        a, b, scale_a=scale_a, scale_b=scale_b, recipe_a="RowWise", recipe_b="RowWise", transposed_b=True, counts=counts,
        out_dtype=torch.float32,
    )  # fmt: skip
    exact = (a.double() * scale_a.double()[..., None]) @ (b.double() * scale_b.double()[..., None]).mT
    for e, count in enumerate(counts.tolist()):
        assert (y[e, :count].double() - exact[e, :count]).norm() <= 5e-4 * exact[e, :count].norm()


# ---- results as codes ------------------------------------------------------------------------------------------------

STORED = [
    tw.fp8("1x128"), tw.fp8("1x128", "e5m2"), tw.fp8("1x128", pow2=False), tw.fp8("1x128", rule="exact", pow2=False),
    tw.fp8("1x128", rule="linghe", pow2=False), tw.fp8("tensor", scale="unit"), tw.fp8("tensor", scale=torch.tensor([0.37])),
    tw.fp8("tensor", rule="exact", scale=torch.tensor([0.37])), tw.int8("1x128"), tw.int4("1x128"), tw.int4("1x128", zero=True),
    tw.mx("e4m3"), tw.mx("e5m2"), tw.mx("e2m1"), tw.mx("e4m3", swizzled=True),
]  # fmt: skip


def on_device(fmt: tw.Format) -> tw.Format:
    return fmt if fmt.tensor is None else fmt.with_scale(fmt.tensor.cuda())


# Whole tiles; rows and columns that end inside one; and rows of codes that no bulk copy may write
@pytest.mark.parametrize(("rows", "columns"), [(384, 512), (200, 320), (70, 200)])
@pytest.mark.parametrize("tile", hopper.TILES, ids=lambda tile: f"{tile.rows}x{tile.columns}")
@pytest.mark.parametrize("fmt", STORED, ids=str)
def test_products_store_the_codes_of_their_sums(fmt, tile, rows, columns, monkeypatch):
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("needs a Hopper, and a Triton that offers what its kernels in Gluon call")
    monkeypatch.setattr(hopper, "TILES", (tile,))
    fmt, source = on_device(fmt), torch.Generator().manual_seed(rows)
    bias, c = (torch.randn(n, generator=source).bfloat16().cuda() for n in ((columns,), (rows, columns)))
    for pair in ("fp8_block", "fp8_row"):
        kind_a, kind_b, recipe_a, recipe_b = PAIRS[pair]
        a, scale_a = (t.cuda() for t in draw_operand(Draw(1), kind_a, recipe_a, rows, 384))
        b, scale_b = (t.cuda() for t in draw_operand(Draw(2), kind_b, recipe_b, columns, 384))
        a.view(torch.uint8)[rows // 2, 5] = 0x7F  # NaN
        for more in ({}, {"bias": bias, "act": "gelu_tanh"}, {"c": c, "beta": 0.5}):
            call = functools.partial(
                product.function, a, b.t(), scale_a, scale_b, recipe_a, recipe_b, backend="hopper", **more
            )
            expected, out = (
                tw.quantize(call(out_dtype="float32"), fmt),
                fmt.empty((rows, columns), torch.bfloat16, "cuda"),
            )
            assert call(out_format=fmt, out=out) is out
            for made in (call(out_format=fmt), out):
                for (tail, found), right in zip(pieces(made).items(), pieces(expected).values()):
                    same_bits(f"{pair} {list(more)} in {fmt}{tail}", found, right)
