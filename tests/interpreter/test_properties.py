"""Every property of values, memory and calls, kernels run by the interpreter: of the op for every op, of the machinery for those
that stand for all."""

from __future__ import annotations

import os

import pytest

import tilewright as tw
from tilewright.check import families
from tilewright.check.cases import Net
from tilewright.check.properties import VALUES, accuracy, outs, sizes
from tilewright.check.registration import fakes, refusals

NET = Net(interpreter=True, cases=int(os.environ.get("TILEWRIGHT_CASES", "7")))  # a GPU draws three times as many
QUICK = {accuracy}  # what is run with the oldest supported Triton as well
# Of second public forms over the kernels of other ops these are enough here, and what they are tried on for the machinery's sake;
# a GPU runs it all.
FORMS = (accuracy, sizes, fakes, outs)


def pairs():
    for prop in (*VALUES, refusals, fakes):
        for op in families.tried_on(prop, "kernels"):
            if tw.catalogue()[op].sibling is None or prop in FORMS or prop.about["kernels"][0] == "machinery":
                marks = [pytest.mark.smoke] if prop in QUICK else []
                yield pytest.param(prop, op, id=f"{prop.__name__}-{op}", marks=marks)


@pytest.mark.parametrize(("prop", "op"), [*pairs()])
def test_property(prop, op):
    prop(tw.catalogue()[op], NET)
