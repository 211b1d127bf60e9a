"""Every property of values, memory and calls for every op, its kernels run by the interpreter."""

from __future__ import annotations

import pytest

import tilewright as tw
from tilewright.check.cases import Net
from tilewright.check.faces import fakes, refusals
from tilewright.check.properties import VALUES, accuracy

NET = Net(interpreter=True)
NAMES = sorted(tw.catalogue())
QUICK = {accuracy}  # what is run with the oldest supported Triton as well


def marked(prop):
    return pytest.param(prop, id=prop.__name__, marks=[pytest.mark.smoke] if prop in QUICK else [])


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("prop", [marked(p) for p in (*VALUES, refusals, fakes)])
def test_property(prop, op):
    prop(tw.catalogue()[op], NET)
