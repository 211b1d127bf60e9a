"""What low-precision products are said to be computed in, chip by chip."""

from __future__ import annotations

import pytest
import torch

from tilewright.core.target import TARGETS
from tilewright.gemm.arithmetic import computed, math_of, words_for
from tilewright.gemm.scaled_mm import PAIRS

NATIVE = "native"
WIDENED = {
    "mxfp8": "MXFP8 storage, BF16 math",
    "mxfp4": "MXFP4 storage, BF16 math",
    "nvfp4": "NVFP4 storage, BF16 math",
}
FP8 = "FP8 storage, BF16 math"
LABELS = {
    "sm_80": {"fp8_block": FP8, "fp8_row": FP8, "int8_row": NATIVE, **WIDENED},
    "sm_89": {"fp8_block": NATIVE, "fp8_row": NATIVE, **WIDENED},
    "sm_90": {
        "fp8_block": NATIVE, "fp8_tensor": NATIVE, "int8_row": NATIVE, "int8_block": NATIVE,
        "int4_row": "INT4 storage, INT8 math", "int4_weight": "INT4 storage, BF16 math", **WIDENED,
    },
    "sm_100": {"mxfp8": NATIVE, "mxfp4": NATIVE, "nvfp4": NATIVE, "int4_row": "INT4 storage, INT8 math"},
    "sm_120": {"mxfp8": NATIVE, "mxfp4": NATIVE, "nvfp4": NATIVE},
    "gfx942": {"fp8_block": FP8, "int8_row": NATIVE, **WIDENED},
    "gfx950": {"fp8_block": NATIVE, "mxfp8": NATIVE, "mxfp4": NATIVE, "nvfp4": WIDENED["nvfp4"]},
}  # fmt: skip


@pytest.mark.parametrize("arch", LABELS)
def test_labels(arch):
    for pair, words in LABELS[arch].items():
        kinds, recipes = PAIRS[pair][:2], PAIRS[pair][2:]
        assert words_for(kinds, recipes, TARGETS[arch]) == words, pair


def test_labels_of_mixes():
    mixed = ("e4m3", "e2m1"), ("BlockWise1x32", "BlockWise1x32")
    assert words_for(*mixed, TARGETS["sm_100"]) == NATIVE
    assert words_for(*mixed, TARGETS["sm_120"]) == "MXFP8 and MXFP4 storage, BF16 math"
    assert words_for(("int8", "int4"), ("RowWise", "BlockWise1x128"), TARGETS["sm_90"]) == "INT4 storage, INT8 math"
    assert math_of(TARGETS["sm_90"], ("int8", "int4"), ("RowWise", "RowWise"), zero=True) == "bf16"


def test_label_of_tensors():
    codes = torch.empty(4, 64, dtype=torch.uint8)
    halves = torch.empty(4, 128, dtype=torch.float16)

    def of(a: torch.Tensor, b: torch.Tensor, arch: str, *recipes: str | None) -> tuple[str, str]:
        return computed({"a": a, "b": b.mT, **dict(zip(("recipe_a", "recipe_b"), recipes))}, TARGETS[arch])

    assert of(codes, codes, "sm_90", "BlockWise1x16", "BlockWise1x16") == (WIDENED["nvfp4"], "bf16")
    assert of(codes, codes, "sm_90", "RowWise", "RowWise") == ("INT4 storage, INT8 math", "int8")
    assert of(codes, codes, "sm_100", "BlockWise1x32", "BlockWise1x32") == (NATIVE, "scaled")
    assert of(codes[:, :63], codes[:, :63], "sm_100", "BlockWise1x32", "BlockWise1x32") == (WIDENED["mxfp4"], "bf16")
    assert of(halves, codes, "sm_90", None, "BlockWise1x128") == ("INT4 storage, FP16 math", "fp16")
    assert of(halves, halves, "sm_90") == (NATIVE, "fp16")
    grouped = torch.empty(2, 4, 128, dtype=torch.float8_e4m3fn)
    assert of(grouped[0], grouped.mT, "sm_90") == (NATIVE, "fp8")
