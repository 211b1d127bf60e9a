"""What CONTRIBUTING.md shows is tried: its op, as it stands there, has every property, and is found by its family."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.contributed import FAMILY, NAME, contributed
from tilewright.bench import documents
from tilewright.check.cases import Net
from tilewright.check.properties import VALUES
from tilewright.check.registration import fakes, refusals
from tilewright.core.target import TARGETS

NET = Net(interpreter=True, cases=3)


@pytest.fixture(scope="module")
def op(tmp_path_factory):
    with contributed(tmp_path_factory.mktemp("ops")) as declared:
        yield declared


# An op in one file, loaded here alone, is not found by the process that spreads tensors apart, nor is it in any model
@pytest.mark.parametrize(
    "prop", [p for p in (*VALUES, refusals, fakes) if p.__name__ not in ("wide_strides", "as_in_models")]
)
def test_it_has_every_property(op, prop):
    prop(op, NET)


def test_it_appears_everywhere(op):
    x = torch.linspace(-2, 2, 12).reshape(3, 4)
    assert torch.equal(getattr(tw, NAME)(x), torch.relu(x).square())
    assert torch.equal(torch.ops.tilewright.squared_relu(x), torch.relu(x).square())
    pages = documents.ops_pages({NAME: op}, [], TARGETS.values())
    assert f"### {NAME}" in pages[documents.OPS / f"{FAMILY}.md"]
    assert "Operations that somebody added." in pages[documents.INDEX]
    assert f'"{NAME}": "ops.{FAMILY}.{NAME}"' in documents.names_table("OPS = {\n}\n", {NAME: op})
