"""What linear attention carries from chunk to chunk is no product's accumulator: tensor cores round those toward 0."""

from __future__ import annotations

import re

import pytest
import torch

import tilewright as tw
from tilewright.check.variants import Call, launches, variant

OP = tw.catalogue()["linear_attention"]
ZEROS = re.compile(r"(%\w+) = arith\.constant dense<0\.0+e\+00> : tensor<\w+xf32")
TOTALS = re.compile(r"= ttng\.warp_group_dot %\S+, %\S+, (%\w+)")


@pytest.mark.parametrize("kernel", ["linear_attention_states", "linear_attention_states_backward"])
def test_products_begin_with_zeros(kernel):
    """Of bf16 without decay: one product a chunk, which Triton joins with the addition to the state unless it is told not to."""
    blank = torch.empty(1, 256, 2, 64, dtype=torch.bfloat16, device="meta")
    wanted = [w for w in launches(OP, Call({"q": blank, "k": blank, "v": blank})) if w.kernel.name == kernel]
    ir = variant(wanted[0]).compile().ir
    totals = TOTALS.findall(ir)
    assert totals and {*totals} <= {*ZEROS.findall(ir)}
