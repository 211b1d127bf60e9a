"""Every property of values, memory and calls for every op, its kernels run by the interpreter."""

from __future__ import annotations

import os

import pytest

import tilewright as tw
from tilewright.check.cases import Net
from tilewright.check.properties import VALUES, accuracy, sizes
from tilewright.check.registration import fakes, refusals

NET = Net(interpreter=True, cases=int(os.environ.get("TILEWRIGHT_CASES", "7")))  # a GPU draws three times as many
NAMES = sorted(tw.catalogue())
QUICK = {accuracy}  # what is run with the oldest supported Triton as well
# Second public forms over the kernels of other ops: here their results, fakes and errors are enough, a GPU runs it all.
SIBLINGS = (
    "cross_entropy_lse", "glu_linear_fp8", "linear_fp8", "moe_feed_forward", "rms_norm_rstd", "rope_one",
)  # fmt: skip
FORMS = (accuracy, sizes, refusals, fakes)


def marked(prop):
    return pytest.param(prop, id=prop.__name__, marks=[pytest.mark.smoke] if prop in QUICK else [])


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("prop", [marked(p) for p in (*VALUES, refusals, fakes)])
def test_property(prop, op):
    if op in SIBLINGS and prop not in FORMS:
        return
    prop(tw.catalogue()[op], NET)
