"""How functions of another package are replaced wherever its modules hold them: a package of a few lines, Megatron not needed."""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tilewright.integrations.megatron import functions
from tilewright.integrations.megatron.functions import FUNCTIONS, Declined, Function
from tilewright.integrations.megatron.patches import FunctionReport, replace

OLD = Function("role", "standin.maker", "double", "doubled", lambda x, by=2: x * by)
NEW = Function("role", "standin.maker", "double", "doubled newly", lambda x, by=2, plus=0: x * by + plus)
ODD = Function("role", "standin.maker", "odd", "odd", lambda x: Declined("it is even") if x % 2 == 0 else -x)


@pytest.fixture
def package(monkeypatch) -> dict[str, ModuleType]:
    """`maker` defines, `user` imported by name, the package itself shows it too, and another package holds it."""

    def double(x, by=2, clamp_value=None):
        return "theirs", x, by, clamp_value

    def odd(x):
        return "theirs", x

    made = {name: ModuleType(name) for name in ("standin", "standin.maker", "standin.user", "elsewhere")}
    made["standin.maker"].double, made["standin.maker"].odd = double, odd
    made["standin"].double = made["standin.user"].twice = made["elsewhere"].double = double
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    return made


def patched(*rows: Function, packages: tuple[str, ...] = ("standin",)) -> FunctionReport:
    report = FunctionReport({}, packages=packages)
    replace([*rows], report)
    return report


def test_every_binding_of_the_package_and_no_other(package):
    original = package["elsewhere"].double
    report = patched(OLD)
    assert {r.module for r in report.replaced} == {"standin.double", "standin.maker.double", "standin.user.twice"}
    assert package["standin.user"].twice(3) == 6 and package["standin"].double(3, by=5) == 15
    assert package["elsewhere"].double is original and report.calls() == {"doubled": 2}
    report.undo()
    assert package["standin.user"].twice is package["standin"].double is package["standin.maker"].double is original


def test_keywords_that_are_not_known_go_to_the_original(package):
    report = patched(OLD)
    double = package["standin.maker"].double
    assert double(3, 2, None) == 6 and double(3, clamp_value=None) == 6
    assert double(3, 2, 7.0) == ("theirs", 3, 2, 7.0) == double(3, clamp_value=7.0)
    assert double(3, clamp_value=torch.ones(2))[0] == "theirs"  # nobody asks a tensor whether it is None
    assert report.calls() == {"doubled": 2} and report.fallbacks() == {"double: it was given clamp_value": 3}
    for given, named in (((), {}), ((1, 2, 3, 4), {}), ((1,), {"x": 1}), ((1,), {"other": 1})):
        with pytest.raises(TypeError):
            double(*given, **named)


def test_declined_calls_are_counted(package):
    report = patched(ODD)
    assert package["standin.maker"].odd(3) == -3 and package["standin.maker"].odd(4) == ("theirs", 4)
    assert report.calls() == {"odd": 1} and report.fallbacks() == {"odd: it is even": 1}
    assert "odd: it is even left to Megatron 1 times" in str(report)


def test_the_signature_chooses_the_row(package):
    assert patched(NEW, OLD).replaced[0].op == "doubled"
    assert not patched(OLD._replace(ours=lambda x, by=3: x * by)).replaced  # another default
    exact = patched(
        OLD._replace(exact=True), Function("role", "standin.none", "f", "f", len), ODD._replace(name="even")
    )
    assert not exact.replaced
    assert [s.reason for s in exact.skipped] == [
        "its parameters are (x, by=2, clamp_value=None)",
        "standin.none cannot be imported: No module named 'standin.none'; 'standin' is not a package",
        "there is none",
    ]


def test_what_came_later_is_given_back_too(package, monkeypatch):
    report = patched(OLD)
    late = ModuleType("standin.late")
    late.double = package["standin"].double
    monkeypatch.setitem(sys.modules, "standin.late", late)
    package["standin.user"].twice = len
    with pytest.raises(ValueError, match="twice of a module was replaced after the patch"):
        report.undo()
    package["standin.user"].twice = package["standin"].double
    report.undo()
    assert late.double is package["elsewhere"].double


def test_rows_name_parameters_and_no_op_twice():
    assert len({(row.name, row.ours) for row in FUNCTIONS}) == len(FUNCTIONS)


def test_nothing_of_megatron_is_imported_before_it_is_asked_for():
    folder = Path(functions.__file__).parent
    for name in ("__init__", "functions", "patches", "fp8"):
        top = [
            n
            for n in ast.parse((folder / f"{name}.py").read_text()).body
            if isinstance(n, (ast.Import, ast.ImportFrom))
        ]
        named = [n.module or "" if isinstance(n, ast.ImportFrom) else n.names[0].name for n in top]
        assert named and not [n for n in named if n.startswith(("megatron", "transformer_engine"))], name
