"""Every property of calls, errors and registration, on a CPU without kernels: of the op for every op, of the machinery for
those that stand for all."""

from __future__ import annotations

import pytest

import tilewright as tw
from tilewright.check import families
from tilewright.check.cases import Net
from tilewright.check.registration import FACES, compiled, traced

NET = Net()
PAIRS = [
    pytest.param(prop, op, id=f"{prop.__name__}-{op}")
    for prop in FACES
    for op in families.tried_on(prop, "reference")
    if not (prop is traced and op in families.tried_on(compiled, "reference"))  # of which it is a part
]


@pytest.mark.parametrize(("prop", "op"), PAIRS)
def test_property(prop, op):
    prop(tw.catalogue()[op], NET)
