"""Shared memory as host code reckons it, which chooses how many stages a loop has, against what the compiled kernel takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tilewright as tw
from tests.compile import table
from tests.compile.test_kernels import TABLE
from tilewright.check.variants import Call, drawn, launches, passes, variant
from tilewright.core.target import TARGETS
from tilewright.ops.norm import gated_group_norm, rms_norm, rms_norm_shared
from tilewright.runtime.kernel import Arguments, Wanted
from tilewright.toolchain.aot import Compiled

ROOM = TARGETS["sm_90"].shared_memory
PORTABLE = replace(TARGETS["sm_90"], gluon=False)
LOW, WIDE = torch.bfloat16, torch.float32


def backward_of(name: str, dtype: torch.dtype, hidden: int, weight: torch.dtype | None, wanted: set[str]) -> Wanted:
    """The launch of a norm's own backward kernel, with a weight of another dtype, or none."""
    op = tw.catalogue()[name]
    values = drawn(op, {"tokens": 512, "batch": 2, "length": 256, "hidden": hidden}, dtype=dtype, full=True)
    values["weight"] = None if weight is None else values["weight"].to(weight)
    _, made = passes(op, Call(values, frozenset(wanted) if wanted else None), PORTABLE)
    return next(one for one in made if one.kernel.name.endswith("norm_backward"))


def compiled(wanted: Wanted, stages: int) -> Compiled:
    one = variant(wanted)
    return replace(one, constants={**one.constants, "STAGES": stages}).compile()


@pytest.mark.parametrize(
    "name, dtype, hidden, weight, gradients, stages",
    [
        ("rms_norm", LOW, 2048, LOW, {}, 3),  # several rows, and a weight that is loaded before the loop
        ("rms_norm", LOW, 16384, LOW, {}, 3),  # the widest rows, with 3 KB to spare
        ("rms_norm", WIDE, 12288, None, {}, 3),
        ("rms_norm", WIDE, 12288, WIDE, {}, 1),
        ("rms_norm", LOW, 12288, WIDE, {}, 1),
        ("rms_norm_rstd", LOW, 12288, WIDE, {"weight"}, 3),  # nothing is stored in the loop
        ("add_rms_norm", LOW, 12288, LOW, {}, 3),  # 3 KB to spare
        ("add_rms_norm", LOW, 16384, LOW, {}, 1),
    ],
)
def test_rms_norm_reckons_with_what_three_stages_take(name, dtype, hidden, weight, gradients, stages):
    """To the byte, but for what sums take; and fewer stages are chosen only where three would not fit."""
    wanted = backward_of(name, dtype, hidden, weight, gradients)
    a = Arguments(zip(wanted.kernel.names, wanted.ordered))
    assert stages == a.STAGES
    made = compiled(wanted, 3)
    reckoned = 2 * rms_norm.stage_backward(a, a.ROWS, a.RELOAD)
    assert reckoned <= made.shared <= reckoned + rms_norm.REDUCING, (
        f"{made.shared} bytes, {reckoned} were reckoned with"
    )
    assert made.shared_is_there == (stages == 3), f"{made.shared} bytes of {ROOM}"


@pytest.mark.parametrize("name, dtype, hidden", [("rms_norm", WIDE, 12288), ("add_rms_norm", LOW, 16384)])
def test_without_stages_rms_norm_takes_little(name, dtype, hidden):
    """Where the layouts of two operands differ, a piece of a row passes through shared memory: no chip lacks that much."""
    wanted = backward_of(name, dtype, hidden, dtype, {})
    piece = 4 * Arguments(zip(wanted.kernel.names, wanted.ordered)).BLOCK
    assert variant(wanted).constants["STAGES"] == 1
    assert compiled(wanted, 1).shared <= piece < min(t.shared_memory for t in TARGETS.values())


@pytest.mark.parametrize("hidden, weight", [(17408, LOW), (24576, WIDE), (20000, None), (32768, LOW), (36864, LOW)])
def test_rows_in_shared_memory_take_what_is_reckoned_with(hidden, weight):
    """Slots of rows and the weight to the byte, and of what is reserved no more than half, which the chip may want itself."""
    op = tw.catalogue()["rms_norm"]
    values = drawn(op, {"tokens": 512, "hidden": hidden}, full=True)
    values["weight"] = None if weight is None else values["weight"].to(weight)
    found = [one for one in launches(op, Call(values)) if one.kernel.name.endswith("shared")]
    assert found
    for wanted in found:
        a = Arguments(zip(wanted.kernel.names, wanted.ordered))
        rows = a.SLOTS * (2 if wanted.kernel.name == "rms_norm_backward_shared" else 1)
        reckoned = a.BLOCK * a.PIECES * (2 * rows + (0 if weight is None else weight.itemsize))
        made = variant(wanted).compile()
        assert reckoned <= made.shared <= reckoned + rms_norm_shared.RESERVED // 2 and made.shared_is_there


@pytest.mark.parametrize("dtype, hidden", [(LOW, 8192), (WIDE, 8192), (LOW, 5120)])
def test_gated_group_norm_reckons_with_what_its_stages_take(dtype, hidden):
    wanted = backward_of("gated_group_norm", dtype, hidden, dtype, {})
    a = Arguments(zip(wanted.kernel.names, wanted.ordered))
    assert a.STAGES == 3
    made = compiled(wanted, 3)
    reckoned = 2 * gated_group_norm.stage_backward(a, a.ROWS)
    assert reckoned <= made.shared <= reckoned + gated_group_norm.REDUCING, f"{made.shared} bytes, not {reckoned}"
    assert made.shared_is_there


def test_no_recorded_variant_takes_more_than_there_is():
    """Those that have not changed are not compiled again, so that nothing else would say so."""
    over = [f"{name}: {row['shared']} bytes" for name, row in table.load(TABLE).items() if row["shared"] > ROOM]
    assert not over, "\n".join(over)
