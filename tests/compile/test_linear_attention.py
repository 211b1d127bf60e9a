"""What linear attention carries from chunk to chunk is no product's accumulator: tensor cores round those toward 0."""

from __future__ import annotations

import re

import pytest
import torch
import triton

import tilewright as tw
from tilewright.check.variants import FORWARD, Call, Variant, launches, variant
from tilewright.core.target import TARGETS

OP = tw.catalogue()["linear_attention"]
ZEROS = re.compile(r"(%\w+) = arith\.constant dense<0\.0+e\+00> : tensor<\w+xf32")
TOTALS = re.compile(r"= ttng\.warp_group_dot %\S+, %\S+, (%\w+) \{[^}]*maxNumImpreciseAcc = 1")
SHARED = TARGETS["sm_90"].shared_memory


def walks(kernel: str, batch: int, width: int, decay: bool = False) -> list[Variant]:
    blank = torch.empty(batch, 256, 2, width, dtype=torch.bfloat16, device="meta")
    given = {"q": blank, "k": blank, "v": blank}
    if decay:
        given["log_decay"] = torch.empty(2, dtype=torch.float32, device="meta")
    return [variant(w) for w in launches(OP, Call(given)) if w.kernel.name == kernel]


@pytest.mark.parametrize("batch", [1, 64], ids=["few", "crowded"])
@pytest.mark.parametrize("kernel", ["linear_attention_states", "linear_attention_states_backward"])
def test_products_begin_with_zeros(kernel, batch):
    """Of bf16 without decay: one product of a chunk for the state, which Triton joins with the addition to it unless it is told not
    to."""
    ir = walks(kernel, batch, 64)[0].compile().ir
    totals = TOTALS.findall(ir)
    assert totals and {*totals} <= {*ZEROS.findall(ir)}


@pytest.mark.skipif(not triton.__version__.startswith("3.6."), reason="registers are those of Triton 3.6")
def test_an_sm_has_two_walkers_that_make_outputs():
    """Of a decay of each head and 128 columns: half of the shared memory at most, a KB of it the chip's own, and of registers only
    a few numbers spilled that the walk does not change, of which a chunk loads one."""
    compiled = walks("linear_attention_states", 64, 128, decay=True)[0].compile()
    assert compiled.spills <= 72 and not compiled.serialised and compiled.threads == 128
    assert compiled.shared + 1024 <= SHARED // 2


def test_packed_sequences_that_crowd_the_chip():
    """Walkers do not reach tokens that are in none of them, which a kernel of its own fills."""
    blank = torch.empty(1, 4096, 4, 64, dtype=torch.bfloat16, device="meta")
    marks = torch.empty(65, dtype=torch.int32, device="meta")
    call = Call({"q": blank, "k": blank, "v": blank, "cu_seqlens": marks}, FORWARD)
    found = {w.kernel.name: variant(w) for w in launches(OP, call)}
    assert "linear_attention_outputs" not in found
    for name in ("linear_attention_states", "linear_attention_rest"):
        assert not found[name].compile().spills
