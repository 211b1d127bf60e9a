"""The embedding's gradient added to a buffer: no call of the op itself launches these variants."""

from __future__ import annotations

import pytest
import torch
import triton

import tilewright as tw
from tilewright.check.variants import variant
from tilewright.core.target import TARGETS, pretend
from tilewright.ops.embedding.embedding import COUNTED, sum_into
from tilewright.runtime.kernel import collect

OLDEST = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="needs Triton 3.6: what it makes of this is held"
)


@OLDEST
@pytest.mark.parametrize("dtype, tokens", [(torch.float32, 8192), (torch.bfloat16, COUNTED + 1)])
def test_additions_do_not_spill(dtype, tokens):
    """Seven programs of 128 threads on a processor have 84 KB of rows under way."""
    tw.catalogue()
    main_grad = torch.empty(151936, 4096, dtype=dtype, device="meta")
    ids = torch.empty(tokens, dtype=torch.int64, device="meta")
    dy = torch.empty(tokens, 4096, dtype=torch.bfloat16, device="meta")
    with pretend(TARGETS["sm_90"]), collect() as found:
        sum_into(main_grad, ids, dy, None, add=True)
    assert [w.kernel.name for w in found][-2:] == ["embedding_sum", "embedding_combine"]
    assert len(found) == (3 if tokens <= COUNTED else 2)
    for wanted in found[-2:]:
        made = variant(wanted).compile()
        assert made.spills == 0 and made.shared_is_there, f"{wanted.kernel.name}: {made.spills} bytes spilled"
        assert made.registers * made.threads * 7 <= 65536, f"{wanted.kernel.name}: {made.registers} registers"
