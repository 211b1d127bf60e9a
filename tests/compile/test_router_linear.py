"""`router_linear` with as many experts as routers have, and in every tile that may be tuned for."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton

from tilewright.check.variants import Call, drawn, launches, variant
from tilewright.core.target import TARGETS, pretend
from tilewright.op import OPS
from tilewright.runtime.kernel import Arguments

HOT = {"tokens": 8192, "hidden": 2048, "experts": 256}
OLDEST = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="needs Triton 3.6: what it makes of this is held"
)


@OLDEST
@pytest.mark.parametrize("experts", [64, 160, 256, 384])
@pytest.mark.parametrize("full", [False, True])
def test_hot_products_neither_spill_nor_wait(experts, full):
    op = OPS["router_linear"]
    for wanted in launches(op, Call(drawn(op, {**HOT, "experts": experts}, full=full))):
        made = variant(wanted).compile()
        assert made.spills == 0 and not made.serialised and made.shared_is_there, f"{wanted.kernel.name}: {made}"


@OLDEST
def test_every_tile_of_the_forward_is_clean():
    op = OPS["router_linear"]
    wanted = launches(op, Call(drawn(op, HOT), frozenset()))[0]
    one = variant(wanted)
    arguments = Arguments(zip(wanted.kernel.names, wanted.ordered))
    with pretend(TARGETS["sm_90"]):
        configs = [dict(c) for c in wanted.kernel.candidates(arguments)]
    assert len(configs) > 1
    for config in configs:
        options = {"num_warps": config.pop("num_warps")}
        made = replace(one, constants={**one.constants, **config}, options=options).compile()
        assert made.spills == 0 and not made.serialised and made.shared_is_there, f"{config} {options}: {made}"
