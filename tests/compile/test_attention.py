"""Attention reads and writes heads by words of 16 bytes wherever they lie so: also those of 72 columns, whose strides are multiples
of 8 elements and not of 16, of which Triton knows nothing by itself."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.attention import portable
from tilewright.check.variants import variant
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

ATTENTION = tw.catalogue()["attention"]


def compiled(width: int, dtype: torch.dtype, backend: str = "portable"):
    q, k, v = torch.empty(1, 256, 3, 16, width, dtype=dtype, device="meta").unbind(2)
    with pretend(TARGETS["sm_90"]), torch.no_grad(), collect() as found:
        ATTENTION.run(ATTENTION.signature.bind((q, k, v), {"backend": backend}))
    return variant(found[-1]).compile()


@pytest.mark.parametrize(("width", "dtype"), [(72, torch.bfloat16), (80, torch.bfloat16), (40, torch.float16)])
def test_heads_are_read_and_written_by_words(width, dtype):
    one = compiled(width, dtype)
    assert one.count("LDG.E.128") and one.count("STG.E.128")
    # The rest of the stores is lse, a number for each row
    assert not one.count("LDG.E.U16") and not one.count("LDG.E.64") and not one.count("STG.E.U16")
    assert one.count("STG") - one.count("STG.E.128") <= 1
    assert not one.spills and not one.serialised
    assert one.count("LDGSTS")  # of keys and values to come: they are under way while others are multiplied


@pytest.mark.parametrize("columns", [72, 75])
def test_a_result_and_its_gradient_may_lie_in_other_ways(columns):
    """The gradient by words, the result as well or number by number."""
    do = torch.empty(1, 256, 16, 72, dtype=torch.bfloat16, device="meta")
    o, sums = do.new_empty(1, 256, 16, columns)[..., :72], do.new_empty(1, 16, 256, dtype=torch.float32)
    with pretend(TARGETS["sm_90"]), collect() as found:
        portable.attention_delta(
            portable.in_words(o), portable.in_words(do), None, sums, 256, 16, 1, 0, 0, 0, 72, BLOCK=128
        )  # fmt: skip
    assert variant(found[0]).compile().count("LDG")


def test_heads_of_odd_width_are_read_number_by_number():
    assert compiled(17, torch.bfloat16).count("LDG.E.U16")


@pytest.mark.skipif(
    not TARGETS["sm_90"].hopper_gluon, reason="this Triton's Gluon is not the one that kernels are written in"
)
def test_hopper_s_results_are_written_by_words():
    one = compiled(72, torch.bfloat16, "hopper")
    assert one.count("STG.E.128") and not one.count("STG.E.U16") and not one.spills
