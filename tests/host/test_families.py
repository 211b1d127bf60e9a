"""Which ops a property is tried on: every property says what it is about, and few ops say all that any declaration says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

import tilewright as tw
from tilewright.check import families
from tilewright.check.properties import VALUES
from tilewright.check.registration import FACES
from tilewright.op import Out


def test_families_are_folders():
    assert (
        families.of("rms_norm") == "norm" and families.of("scaled_mm") == "gemm" and families.of("linear_fp8") == "nn"
    )
    assert families.of_module("tilewright.gemm.hopper.few") == "gemm"
    assert families.of_module("tilewright.formats.tiles") == "formats"
    assert sorted(op for own in families.members().values() for op in own) == sorted(tw.catalogue())


@pytest.mark.parametrize("prop", [*VALUES, *FACES], ids=lambda prop: prop.__name__)
def test_every_property_says_what_it_is_about(prop):
    for net in families.NETS:
        about, why = prop.about[net]
        assert about in ("op", "machinery") and why
        wanted = sorted(tw.catalogue()) if about == "op" else families.representatives()
        assert families.tried_on(prop, net) == wanted


def test_the_ops_that_stand_for_all_say_all():
    ops = tw.catalogue()
    found = families.representatives()
    for own in families.members().values():
        assert min(own, key=lambda name: (len(ops[name].signature.parameters), name)) in found
    every = set().union(*(families.says(op) for op in ops.values()))
    assert every == set().union(*(families.says(ops[name]) for name in found))
    assert len(every) >= 15 and len(found) <= len(ops) / 2


def test_a_declaration_that_says_something_new_is_taken():
    def op(count: int, **said: object) -> SimpleNamespace:
        names = [f"a{i}" for i in range(count)]
        signature = SimpleNamespace(parameters=names, names=names, listed=False, lists=())
        quiet = {"out": Out(), "differentiable": (), "results": ("out",), "hidden": 0, "resume": None}
        quiet |= {
            "saved_results": {},
            "writes": (),
            "shape_only": None,
            "overwrites": None,
            "groups": None,
            "asks": None,
        }
        quiet |= {"composite": False, "sharded": None}
        return SimpleNamespace(signature=signature, implementations=(SimpleNamespace(out=False),), **{**quiet, **said})

    ops = {"small": op(1), "large": op(3), "hidden": op(4, hidden=1), "c": op(5, hidden=2)}
    ops["both"] = op(6, hidden=1, composite=True)
    assert families.chosen(ops, {"one": ["small", "large"], "two": ["both", "c"]}) == ["both", "c", "small"]
    assert families.chosen(ops, {"one": ["small", "large", "hidden", "both", "c"]}) == ["both", "small"]
