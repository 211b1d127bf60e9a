"""Every property of values and memory for every op, its kernels run by the interpreter."""

from __future__ import annotations

import pytest

import tilewright as tw
from tests.cases import Net
from tests.properties import VALUES

NET = Net(interpreter=True)
NAMES = sorted(tw.catalogue())


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("prop", VALUES, ids=lambda p: p.__name__)
def test_property(prop, op):
    prop(tw.catalogue()[op], NET)
