"""Loops whose stages host code chooses by a chip's shared memory: what they are reckoned to take is there, at any width, on every
chip. `tests/compile/test_shared_memory.py` holds that reckoning to compiled kernels."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tilewright.core.target import TARGETS, pretend
from tilewright.core.tensor import power_of_two
from tilewright.ops.norm import gated_group_norm, rms_norm
from tilewright.runtime.kernel import Arguments, Wanted, collect

LOW, HALF, WIDE = torch.bfloat16, torch.float16, torch.float32
# Powers of two, models' widths, odd ones, and one further than each
WIDTHS = sorted(
    {
        width + more
        for more in (0, 1)
        for width in (
            *(2**n for n in range(6, 17)), 1536, 2560, 2880, 3072, 3584, 5120, 6144, 7168, 9216, 10240, 11008, 12288, 13312,
            14336, 15360, 18432, 20480, 24576,
        )
    }
)  # fmt: skip
every_chip = pytest.mark.parametrize("arch", TARGETS)


def blank(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def arguments(found: list[Wanted], name: str) -> Arguments | None:
    """Those of the launch of one kernel, if there is one."""
    return next((Arguments(zip(w.kernel.names, w.ordered)) for w in found if w.kernel.name == name), None)


@every_chip
@pytest.mark.parametrize(
    "dtype, weight", [(LOW, LOW), (LOW, WIDE), (HALF, HALF), (WIDE, WIDE), (WIDE, LOW), (WIDE, None)]
)
def test_rms_norm_has_the_shared_memory_that_it_reckons_with(arch, dtype, weight):
    """With a residual's gradient and without, of all gradients or of the weight's alone."""
    room, stages = TARGETS[arch].shared_memory, set()
    for N in WIDTHS:
        x = blank(64, N, dtype=dtype)
        w = None if weight is None else blank(N, dtype=weight)
        for dh in (None, x):
            for needs in ({"x"}, {"weight"}, {"x", "weight"}) if weight is not None else ({"x"},):
                with pretend(TARGETS[arch]), collect() as found:
                    rms_norm.gradients(x, w, None, x, dh, 1e-6, 0.0, needs)
                a = arguments(found, "rms_norm_backward")
                assert (a is None) == (power_of_two(N) > rms_norm.WIDEST), N
                if a is not None:
                    stages.add(a.STAGES)
                    taken = (a.STAGES - 1) * rms_norm.stage_backward(a, a.ROWS, a.RELOAD) + rms_norm.REDUCING
                    assert taken <= room, f"{N} columns, {sorted(needs)}: {taken} bytes of {room}"
    assert stages == {1, 3}  # so that both sides of the edge were seen


@every_chip
@pytest.mark.parametrize("dtype", [LOW, WIDE])
def test_gated_group_norm_has_the_shared_memory_that_it_reckons_with(arch, dtype):
    """As by default and in every config that may be tuned for."""
    room = TARGETS[arch].shared_memory
    for D in WIDTHS:
        for groups in (1, 4):
            x = blank(2, 32, groups * D, dtype=dtype)
            saved = SimpleNamespace(
                x=x, gate=x, weight=blank(D, dtype=dtype), eps=1e-6, groups=groups, transposed=False, act="silu",
                needs={"x", "gate", "weight"},
            )  # fmt: skip
            with pretend(TARGETS[arch]), collect() as found:
                gated_group_norm.backward(saved, x)
                a = arguments(found, "gated_group_norm_backward")
                for config in ({"ROWS": a.ROWS, "STAGES": a.STAGES}, *gated_group_norm._candidates_backward(a)):
                    held = gated_group_norm.stage_backward(a, config["ROWS"])
                    taken = (config["STAGES"] - 1) * held + gated_group_norm.REDUCING
                    assert taken <= room, f"{groups} x {D} columns, {config}: {taken} bytes of {room}"
