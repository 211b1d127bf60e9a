"""The command line: tables and JSON say the same, errors are one line that names what is wrong."""

from __future__ import annotations

import io
import json
import re

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.commands import console

QUANTISED = "fp8:e4m3:1x128:both:pow2:te"


def run(*words: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(words))
    return result.exit_code, result.stdout, result.stderr


def launches(*words: str) -> dict[str, list[str]]:
    status, out, _ = run("explain", *words, "--json")
    assert status == 0
    rows = json.loads(out)["launches"]
    return {which: [row["kernel"] for row in rows if row["pass"] == which] for which in ("forward", "backward")}


def test_version():
    assert run("--version") == (0, f"{tw.__version__}\n", "")


def test_list_has_every_op():
    status, out, _ = run("list", "--json")
    rows = {row["name"]: row for row in json.loads(out)}
    assert status == 0 and set(rows) == set(tw.catalogue())
    assert (
        rows["glu"]["backward"]
        and rows["glu"]["formats"] == ["fp8", "int4", "int8", "mx", "nvfp4"]
        and "gluon" in rows["glu"]["implementations"]
    )
    assert not rows["dequantize_codes"]["backward"]
    assert rows["dequantize_codes"]["internal"] and not rows["quantize"]["internal"]
    assert rows["rms_norm"]["chips"]["sm_90"] == "measured" and rows["rms_norm"]["chips"]["sm_80"] == "compiled"
    assert rows["scaled_mm"]["emulated"]["sm_90"]["mxfp4"] == "MXFP4 storage, BF16 math"
    assert "mxfp4" not in rows["scaled_mm"]["emulated"]["sm_100"] and not rows["glu"]["emulated"]
    status, out, _ = run("list")
    assert status == 0 and all(name in out for name in ("glu", "quantize", "int4_row: INT4 storage, INT8 math"))
    assert out.index(" transpose_pad ") < out.index("parts of other ops") < out.index(" dequantize_codes ")


@pytest.mark.parametrize("name", [None, *typer.main.get_command(app).commands])
def test_h_is_help(name):
    words = [name] if name else []
    status, out, _ = run(*words, "-h")
    assert status == 0 and "Usage" in out and out == run(*words, "--help")[1]


def shown(rows, monkeypatch, capsys, width: int) -> str:
    """What a terminal of this width shows."""
    window = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(console, "Console", lambda: window)
    console.show(rows, "ops [all]", False)
    return window.file.getvalue() + capsys.readouterr().out


@pytest.mark.parametrize("width", [40, 80, 120, 240])
def test_a_table_loses_no_text_and_breaks_no_word(width, monkeypatch, capsys):
    rows = [{"name": name, "summary": (op.__doc__ or "").strip().partition("\n")[0], "formats": op.formats(),
             "implementations": [one.name for one in op.implementations]}
            for name, op in tw.catalogue().items()]  # fmt: skip
    text = shown(rows, monkeypatch, capsys, width)
    words = set(re.sub("[│┃]", " ", text).split())
    assert "[all]" in words
    for row in rows:
        wanted = {row["name"], *row["summary"].split(), *row["formats"], *row["implementations"]}
        assert wanted <= words, wanted - words
    assert ("━" in text) == (width > 80)  # else each row is a list of its fields


def test_doctor_names_what_it_found():
    status, out, _ = run("doctor", "--json")
    found = {row["what"]: row["found"] for row in json.loads(out)}
    assert status == 0 and {"python", "torch", "triton", "launch"} <= set(found)
    assert any(what.startswith("GPU") for what in found)


def test_explain_shows_what_is_launched():
    plain = launches("rms_norm", "--dim", "tokens=16")
    assert plain["forward"] == ["rms_norm_forward"] and plain["backward"][0] == "rms_norm_backward"
    wide = launches("rms_norm", "--dim", "tokens=4", "--dim", "hidden=36864")
    assert (wide["forward"], wide["backward"][0]) == (["rms_norm_shared"], "rms_norm_backward_shared")
    wide = launches("rms_norm", "--dim", "tokens=4", "--dim", "hidden=20000", "--arch", "sm_80")
    assert wide["backward"][:2] == ["rms_norm_row_sums", "rms_norm_backward_wide"]
    codes = launches("rms_norm", "--format", QUANTISED, "--arch", "sm_80")
    assert codes["forward"] == ["rms_norm_forward", "quantize_tiles"]
    assert run("explain", "glu", "--dim", "tokens=16")[0] == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["explain", "rms_nrm"], "rms_norm"),
        (["explain", "rms_norm", "--arch", "sm_91"], "sm_90"),
        (["explain", "rms_norm", "--dim", "tokens"], "tokens=8192"),
        (["explain", "rms_norm", "--dim", "token=3"], "no dimension token; it has"),
        (["explain", "rms_norm", "--format", "fp9"], "fp8"),
        (["explain", "cross_entropy", "--format", QUANTISED], "out_format"),
    ],
)
def test_an_error_is_one_line(words, said):
    status, out, err = run(*words)
    assert status == 2 and out == "" and said in err and err.count("\n") == 1
