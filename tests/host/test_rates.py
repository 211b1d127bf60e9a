"""The page of rates: whose math is used, what a rate is a share of, and which rows have none."""

from __future__ import annotations

from tilewright.bench import rates
from tilewright.bench.cases import CASES

GPU = {"gpu": "Chip A", "arch": "sm_90"}


def row(case: str, burst: float, clock: int | None = 1500) -> dict:
    return {**GPU, "case": case, "rates": {"burst": burst, "sustained": burst - 10, "clock_mhz": clock}}


def test_a_rate_is_a_share_of_the_math_that_is_used():
    size = "4096x4096x4096"
    found = [
        row(f"matmul_bf16/{size}", 700.0), row(f"mxfp4_dense/{size}", 140.0, None), row(f"int8_row/{size}", 1400.0),
        row(f"int4_row_dense/{size}", 280.0), row(f"auto_matmul_bf16/{size}", 7000.0), row("gone", 1.0),
        {**GPU, "case": f"fp8_row_fast/{size}"},
    ]  # fmt: skip
    lines = [line for line in rates.page(found).splitlines() if "Chip A" in line]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert [(c[0], *c[2:]) for c in cells] == [
        (f"`matmul_bf16/{size}`", "BF16, native", "700", "690", "1500", "1.00"),
        (f"`mxfp4_dense/{size}`", "MXFP4 storage, BF16 math", "140", "130", "", "0.20"),
        (f"`int8_row/{size}`", "INT8, native", "1400", "1390", "1500", "1.00"),
        (f"`int4_row_dense/{size}`", "INT4 storage, INT8 math", "280", "270", "1500", "0.20"),
    ]
    assert all(line["case"] in CASES for line in found if line["case"] != "gone")
