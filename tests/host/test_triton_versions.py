"""What differs between versions of Triton is probed by what it offers; where that is not enough, portable kernels are taken."""

from __future__ import annotations

import ast
import importlib
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import triton

from tilewright.bench import evidence
from tilewright.core import triton_versions
from tilewright.core.target import TARGETS
from tilewright.core.triton_versions import CALLED, GLUON, NAMED, Absent, found_at, gluon_of, signature_of

LIBRARY = Path(triton_versions.__file__).parents[1]
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


# ---------------------------------------------------------------- what kernels use


class Use(NamedTuple):
    """One name of Gluon's in a file, its path as the probe's tables write it, `?` for the thing whose method it is, and its call if
    it is called."""

    path: str
    call: ast.Call | None
    where: str


def uses(tree: ast.Module, file: str) -> Iterator[Use]:
    """What a file uses of Gluon, and the methods that its functions for the device call of anything else."""
    of_gluon, own = triton_versions.probe().names, {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").endswith("triton_versions"):
            own.update({alias.asname or alias.name: alias.name for alias in node.names if alias.name in of_gluon})

    def path_of(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name):
            return own.get(node.id)
        if not isinstance(node, ast.Attribute):
            return None
        if ast.unparse(node.value) == "triton_versions":
            return node.attr if node.attr in of_gluon else None
        above = path_of(node.value)
        return above and f"{above}.{node.attr}"

    called = {id(node.func): node for node in ast.walk(tree) if isinstance(node, ast.Call)}
    parts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and path_of(node.value)}
    for node in ast.walk(tree):
        if id(node) not in parts and (path := path_of(node)):
            yield Use(path, called.get(id(node)), f"{file}:{node.lineno}")
    for function in ast.walk(tree):
        if isinstance(function, ast.FunctionDef) and any(
            "gluon.jit" in ast.unparse(d) for d in function.decorator_list
        ):
            for statement in function.body:
                for node in ast.walk(statement):
                    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and not path_of(node.func):
                        yield Use(f"?.{node.func.attr}", node, f"{file}:{node.lineno}")


def paths_of(use: Use) -> list[str]:
    """Where the probe's tables may have it: a method with each thing that kernels hold."""
    name = use.path.removeprefix("?.")
    return [use.path] if name == use.path else [f"{thing}.{name}" for thing in ("gl.tensor", "memory")]


def not_probed(found: list[Use]) -> list[str]:
    """Which of them the probe does not ask for, or not with these arguments."""
    known = {*CALLED, *NAMED.split(), *triton_versions.probe().names}
    return [
        f"{use.where}: {ast.unparse(use.call) if use.call else use.path}"
        for use in found
        if not any(path in known and (use.call is None or asked(use, path)) for path in paths_of(use))
    ]


def asked(use: Use, path: str) -> bool:
    """Whether what a call gives is among what the probe gives."""
    if path not in CALLED:
        return False
    signature, (count, words) = signature_of(found_at(triton_versions.probe().names, path)), CALLED[path]
    own = ["_semantic"] if "_semantic" in signature.parameters else []
    probed = signature.bind(*[None] * count, **dict.fromkeys(words.split()))
    try:
        by_name = dict.fromkeys([*own, *(word.arg for word in use.call.keywords)])
        given = signature.bind(*[None] * (len(use.call.args) + (use.path != path)), **by_name)
    except TypeError:
        return False
    return given.arguments.keys() <= probed.arguments.keys()


def test_the_probe_asks_for_all_that_kernels_use():
    found = [
        use
        for path in sorted(LIBRARY.rglob("*.py"))
        if "triton_versions" in (text := path.read_text())
        for use in uses(ast.parse(text), path.name)
    ]
    assert not (wrong := not_probed(found)), "\n".join(wrong)
    used = {path for use in found for path in paths_of(use)}
    assert not (unused := {*CALLED, *NAMED.split()} - used), f"nothing uses {unused}"


@pytest.mark.parametrize(
    "line",
    [
        "gl.histogram(X, 8, L)",
        "gl.uint16",
        "gl.sum(X, 0, True)",
        "mbarrier.arrive(X, count=1, from_cta=0)",
        "X.index(0).atomic_add(1)",
        "X.to(gl.int32, fp_downcast_rounding=0)",
    ],
    ids=("a function", "a dtype", "by position", "by name", "a method", "of a method"),
)
def test_what_the_probe_does_not_ask_for_is_found(line):
    text = f"from ..core.triton_versions import gl, gluon, mbarrier\n@gluon.jit\ndef f(X, L): {line}"
    assert not_probed([*uses(ast.parse(text), "made.py")]) == [f"made.py:3: {line}"]


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


def test_every_op_runs_where_there_is_no_gluon(forked):
    """Kernels' modules can be imported, and calls for Hopper launch portable ones."""
    found = forked(FALLBACK)
    assert found.returncode == 0, found.stderr
    said = {line.split()[0]: set(line.split()[1:]) for line in found.stdout.splitlines()}
    assert len(said) == 4 and all(one == {"True"} for one in said.values()), said


def test_gluon_is_loaded_when_it_is_asked_for(forked):
    code = (
        "import sys, torch, triton; before = {*sys.modules}; import tilewright.core.target, tilewright.runtime.kernel;"
        " print([name for name in sys.modules if 'gluon' in name and name not in before])"
    )
    found = forked(code)
    assert found.stdout == "[]\n", found
