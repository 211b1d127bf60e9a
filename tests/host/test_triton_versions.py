"""What differs between versions of Triton is probed by what it offers; where that is not enough, portable kernels are taken."""

from __future__ import annotations

import importlib
import subprocess
import sys
import warnings
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from tilewright.bench import evidence
from tilewright.core import triton_versions
from tilewright.core.target import TARGETS
from tilewright.core.triton_versions import GLUON, Absent, gluon_of

HOPPER = f"{GLUON}.language.nvidia.hopper"


def without(module: Any, *names: str, **changes: Any) -> SimpleNamespace:
    """A module without some of its names, and with others."""
    return SimpleNamespace(**{n: v for n, v in vars(module).items() if n not in names}, **changes)


def loading(**instead: Any):
    """Triton's modules, but for some."""
    return lambda name: instead.get(name) or importlib.import_module(name)


def older(function: Any) -> Any:
    """What an older Triton had under another name: a function that takes the same."""
    return lambda *args, **settings: function(*args, **settings)


def test_the_installed_triton_offers_what_kernels_call():
    found = triton_versions.probe()
    assert found.lacks is None and found.names["gl"].constexpr
    assert triton_versions.offers_gluon() and TARGETS["sm_90"].hopper_gluon
    assert triton_versions.offered_gluon(triton.__version__)


def test_of_two_names_the_newer_is_taken():
    hopper, gl = importlib.import_module(HOPPER), importlib.import_module(f"{GLUON}.language")
    load, store, wait = (older(print) for _ in range(3))
    names = "async_load", "async_store", "async_copy_global_to_shared", "async_copy_shared_to_global"
    before = {"async_copy_global_to_shared": load, "async_copy_shared_to_global": store}
    tma = without(hopper.tma, *names, **before)
    language = without(gl, "barrier", "thread_barrier", thread_barrier=wait)
    old = gluon_of(loading(**{HOPPER: without(hopper, "tma", tma=tma), f"{GLUON}.language": language}))
    assert old.lacks is None
    assert (old.names["async_load"], old.names["async_store"], old.names["barrier"]) == (load, store, wait)
    new = without(
        hopper.tma, *names, **before, async_load=store, async_store=load
    )  # both are there, the older to complain
    both = gluon_of(loading(**{HOPPER: without(hopper, "tma", tma=new)}))
    assert (both.names["async_load"], both.names["async_store"]) == (store, load)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda hopper: without(hopper, "warpgroup_mma"), "warpgroup_mma"),
        (lambda hopper: without(hopper, "tma", tma=without(hopper.tma, "store_wait")), "store_wait"),
        (lambda hopper: without(hopper, "warpgroup_mma_wait", warpgroup_mma_wait=lambda pendings: None), "warpgroup_mma_wait"),
        (lambda hopper: without(hopper, "fence_async_shared", fence_async_shared=lambda scope, _semantic: None), "scope"),
    ],
    ids=("a name", "an inner name", "other arguments", "one argument more"),
)  # fmt: skip
def test_what_is_missing_is_said(change, words):
    found = gluon_of(loading(**{HOPPER: change(importlib.import_module(HOPPER))}))
    assert not found.names and words in found.lacks


def test_a_triton_without_gluon_has_kernels_that_can_be_imported():
    def load(name: str) -> Any:
        raise ModuleNotFoundError(f"No module named {name!r}")

    assert GLUON in gluon_of(load).lacks
    absent = Absent()

    @absent.jit
    def function(x, N: absent.constexpr):
        return absent.load(x)

    assert isinstance(function, Absent) and list(absent.constexpr(absent.Layout([1], rank=2)).names) == []


@pytest.fixture
def lacking(monkeypatch):
    """As under a Triton whose Gluon is another."""
    monkeypatch.setattr(triton_versions, "probe", lambda: triton_versions.Gluon({}, "no barrier"))
    triton_versions.offers_gluon.cache_clear()
    yield
    triton_versions.offers_gluon.cache_clear()


def test_portable_kernels_are_taken_with_one_warning(lacking):
    chip = TARGETS["sm_90"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not TARGETS["sm_80"].hopper_gluon  # there are no kernels in Gluon for it anyway
    with pytest.warns(RuntimeWarning, match=r"Gluon call \(no barrier\): portable kernels are taken"):
        assert not chip.hopper_gluon
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert not chip.hopper_gluon and replace(chip, gluon=True).hopper_gluon
    assert isinstance(triton_versions.warpgroup_mma, Absent)


def test_rows_are_of_the_kernels_of_their_triton(lacking):
    """The installed one is asked; of others those are known that kernels were compiled with."""
    row = {"arch": "sm_90", "sms": 132, "triton": triton.__version__}
    assert not evidence.target_of(row).gluon
    others = {
        version: evidence.target_of({**row, "triton": version}).gluon
        for version in ("3.5.1", "3.6.1", "3.8.99", "4.0.0")
    }
    assert others == {"3.5.1": False, "3.6.1": True, "3.8.99": True, "4.0.0": False}


FALLBACK = """
import warnings
from tilewright.core import triton_versions
triton_versions.probe = lambda: triton_versions.Gluon({}, "nothing")
import tilewright as tw
from tilewright.check.variants import HOT, FORWARD, Call, drawn, launches
warnings.simplefilter("ignore")
for name in ("glu", "scaled_mm", "grouped_mm_rows_fp8", "linear_cross_entropy"):
    op = tw.catalogue()[name]
    values = drawn(op, HOT[0])
    if name == "glu":
        values["out_format"] = tw.fp8("1x128", ways="both")
    print(name, *(wanted.kernel.jit.is_gluon() is False for wanted in launches(op, Call(values, FORWARD))))
"""


def test_every_op_runs_where_there_is_no_gluon():
    """Kernels' modules can be imported, and calls for Hopper launch portable ones."""
    found = subprocess.run([sys.executable, "-c", FALLBACK], capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    said = {line.split()[0]: set(line.split()[1:]) for line in found.stdout.splitlines()}
    assert len(said) == 4 and all(one == {"True"} for one in said.values()), said


def test_gluon_is_loaded_when_it_is_asked_for():
    code = (
        "import sys, tilewright.core.target, tilewright.runtime.kernel; print(sum('gluon' in m for m in sys.modules))"
    )
    before = "import sys, torch, triton; print(sum('gluon' in m for m in sys.modules))"
    found = [
        subprocess.run([sys.executable, "-c", one], capture_output=True, text=True, check=True)
        for one in (before, code)
    ]
    assert found[0].stdout == found[1].stdout, found
