"""Every property of calls, errors and registration for every op, on a CPU without kernels."""

from __future__ import annotations

import pytest

import tilewright as tw
from tilewright.check.cases import Net
from tilewright.check.registration import FACES

NET = Net()
NAMES = sorted(tw.catalogue())


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("prop", FACES, ids=lambda p: p.__name__)
def test_property(prop, op):
    prop(tw.catalogue()[op], NET)
