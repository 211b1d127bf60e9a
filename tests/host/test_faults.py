"""Wrong code is refused where a variant is compiled: compiled kernels made up by hand, with and without each fault."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import triton
from typer.testing import CliRunner

from tilewright.__main__ import app
from tilewright.core import triton_versions
from tilewright.runtime.kernel import kernel
from tilewright.toolchain import faults
from tilewright.toolchain.faults import MiscompiledError, refuse

# Lane bits 0, 3 and 4 walk along the columns that are reduced
IR = """#linear = #ttg.linear<{register = [], lane = [[0, 1], [1, 0], [2, 0], [0, 2], [0, 4]], warp = [], block = []}>
#loc1 = loc("norm.py":7:1)
    %1 = "tt.reduce"(%0) <{axis = 1 : i32}> ({
    }) : (tensor<4x8xf32, #linear>) -> tensor<4xf32, #ttg.slice<{dim = 1, parent = #linear}>> loc(#loc1)
"""
RIGHT_IR = IR.replace("[[0, 1], [1, 0], [2, 0], [0, 2], [0, 4]]", "[[0, 1], [0, 2], [0, 4], [1, 0], [2, 0]]")
TEXT = """cvt.rn.satfinite.e4m3x2.f32 %rs1, %r3, %r2;
cvt.rn.satfinite.e4m3x2.f32 %rs2, %r5, %r4;
mov.b32 %r7, {%rs1, %rs2};
cvt.rn.f16x2.e4m3x2 %r6, %rs1;
"""
RIGHT_TEXT = TEXT.replace("cvt.rn.f16x2.e4m3x2 %r6, %rs1;", "")
LOW_BITS = "add.f32 %r4, %r2, 0f4B400000;\nst.shared.b8 [%r6], %r4;\n"
WGMMA = "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16\n"
SASS = (
    "        /*0000*/                   UIADD3 UR4, UP0, UR4, 0x40, URZ ;\n        /*0010*/                   EXIT ;\n"
)
RIGHT_SASS = "        /*0000*/                   UMOV UR4, 0x1 ;\n" + SASS


@kernel(grid=lambda a: (3,))
def nothing(X, N):
    pass


def compiled(ir: str = RIGHT_IR, text: str = RIGHT_TEXT, arch: int = 90, binary: bytes = b"code") -> Any:
    """What Triton's compiler returns, as far as its code goes."""
    target = SimpleNamespace(arch=arch)
    asm = {"ttgir": ir, "ptx": text, "cubin": binary}
    return SimpleNamespace(asm=asm, metadata=SimpleNamespace(target=target), hash="ab" * 32, run=None)


def variant(made: Any) -> Any:
    """The variant of a kernel of which Triton makes this."""
    nothing.jit = SimpleNamespace(params=(), warmup=lambda *args, **options: made)
    with mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False), mock.patch.dict(nothing.variants):
        return nothing.variant([None, 5], {}, (3,), 0)


def refused_variant() -> None:
    """A variant that every known ptxas gets wrong is not taken; `tests/machinery.py` asks this too."""
    right = compiled()
    assert variant(right) is right
    try:
        variant(compiled(text=TEXT))
    except MiscompiledError as error:
        assert "nothing is not run" in str(error)
    else:
        raise AssertionError("wrong code was taken")


def test_a_variant_with_wrong_code_is_refused_every_time():
    refused_variant()
    refused_variant()


@pytest.fixture
def oldest(monkeypatch, tmp_path):
    """Triton 3.6 with ptxas 12.8, whose disassembler says what `said` holds and counts how often it was asked."""
    found = SimpleNamespace(said=RIGHT_SASS, asked=0, tool=tmp_path / "nvdisasm")

    def disassembled(binary: bytes) -> str:
        found.asked += 1
        if isinstance(found.said, Exception):
            raise found.said
        return found.said

    found.tool.touch()
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    monkeypatch.setattr(triton_versions, "assembler", lambda arch: "12.8")
    monkeypatch.setattr(faults, "TOOL", found.tool)
    monkeypatch.setattr(faults, "disassembled", disassembled)
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path / "cache"))
    return found


def test_right_code_passes(oldest):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        refuse("norm", compiled())
        refuse("norm", compiled(text=WGMMA))
    assert oldest.asked == 1  # of products by warpgroups alone


WRONG = {
    "reductions": ({"ir": IR}, r"triton 3.6.0 made wrong code .* norm.py:7 reduces .*Install triton 3.7 or later$"),
    "conversions": ({"text": TEXT}, r"the ptxas \(12.8\) of triton 3.6.0 made .*%rs1: codes .*No ptxas is known to be right"),
    "stores": ({"text": LOW_BITS}, r"%r4: low bits of a number.*Install a triton whose ptxas is 13.4 or later$"),
    "registers": ({"text": WGMMA}, r"sm_90: /\*0000\*/ UIADD3.*UR4 is read .*Install a triton whose ptxas is 12.9 or later$"),
}  # fmt: skip


@pytest.mark.parametrize("fault", WRONG)
def test_wrong_code_raises_one_line(oldest, fault):
    changes, says = WRONG[fault]
    oldest.said = SASS
    with pytest.raises(MiscompiledError, match=rf"^norm is not run: .*{says}") as caught:
        refuse("norm", compiled(**changes))
    assert isinstance(caught.value, RuntimeError) and "\n" not in str(caught.value)


def test_every_fault_is_tried():
    assert WRONG.keys() == triton_versions.FAULTS.keys()


def test_releases_that_are_right_are_not_suspected(oldest, monkeypatch):
    oldest.said = SASS
    monkeypatch.setattr(triton, "__version__", "3.7.0")
    monkeypatch.setattr(triton_versions, "assembler", lambda arch: "12.9")
    refuse("norm", compiled(IR, WGMMA))
    with pytest.raises(MiscompiledError, match="%rs1"):
        refuse("norm", compiled(text=TEXT))
    monkeypatch.setattr(triton_versions, "assembler", lambda arch: None)
    with pytest.raises(MiscompiledError, match=r"the ptxas \(unknown\) of triton 3.7.0"):
        refuse("norm", compiled(text=WGMMA))
    refuse("norm", SimpleNamespace(asm={"ttgir": IR, "amdgcn": WGMMA, "hsaco": b""}))


def test_the_table_of_faults_and_what_looks_for_them():
    assert faults.looks("", "", list, None).keys() <= triton_versions.FAULTS.keys()
    with mock.patch.object(triton, "__version__", "3.6.0"):
        assert faults.looks("", "", list, None).keys() == triton_versions.FAULTS.keys()
    for name, fault in triton_versions.FAULTS.items():
        assert (Path(faults.__file__).parent / f"{name}.py").is_file() and fault.known_by
    assert triton_versions.assembler(90)[:2] in ("12", "13")  # the installed Triton says


def test_no_environment_variable_is_asked(oldest, monkeypatch):
    """Triton's own cache reads where it is; nothing of ours is asked."""
    asked: list[str] = []

    class Watched(dict):
        def get(self, name: str, default: Any = None) -> Any:
            asked.append(name)
            return super().get(name, default)

        def __getitem__(self, name: str) -> str:
            asked.append(name)
            return super().__getitem__(name)

        def __contains__(self, name: object) -> bool:
            asked.append(str(name))
            return super().__contains__(name)

    oldest.said = SASS
    names = ("TILEWRIGHT_DEBUG", "TILEWRIGHT_CHECK", "TILEWRIGHT_UNSAFE", "TRITON_NVDISASM_PATH", "PYTHONOPTIMIZE")
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", Watched({**os.environ, **dict.fromkeys(names, "0")}))
        for changes, _ in WRONG.values():
            with pytest.raises(MiscompiledError):
                refuse("norm", compiled(**changes))
    assert not [name for name in asked if name.startswith("TILEWRIGHT") or name in names]


# ---------------------------------------------------------------- the verdict on machine code


def kept(tmp_path: Path) -> Path:
    (found,) = (tmp_path / "cache").rglob(faults.KEPT)
    return found


@pytest.mark.parametrize("said", [SASS, RIGHT_SASS], ids=["wrong", "right"])
def test_a_binary_is_disassembled_once(oldest, tmp_path, said):
    oldest.said = said
    for _ in range(2):
        assert bool(faults.unset(compiled(text=WGMMA))) == (said == SASS)
    assert oldest.asked == 1
    row = json.loads(kept(tmp_path).read_text())
    assert row.keys() == {"schema", "rule", "binary", "found"} and row["schema"] == faults.SCHEMA
    assert [path.name for path in kept(tmp_path).parent.iterdir()] == [faults.KEPT]  # nothing half written is left


BROKEN = {
    "no JSON": lambda row: "{",
    "no object": lambda row: "[]",
    "another schema": lambda row: json.dumps({**row, "schema": 0}),
    "another rule": lambda row: json.dumps({**row, "rule": ""}),
    "another binary": lambda row: json.dumps({**row, "binary": ""}),
    "no verdict": lambda row: json.dumps({**row, "found": None}),
    "a field more": lambda row: json.dumps({**row, "more": 1}),
}


@pytest.mark.parametrize("how", BROKEN)
def test_a_verdict_that_is_not_of_this_binary_and_rule_is_made_again(oldest, tmp_path, how):
    faults.unset(compiled())
    kept(tmp_path).write_text(BROKEN[how](json.loads(kept(tmp_path).read_text())))
    oldest.said = SASS
    assert faults.unset(compiled()) and oldest.asked == 2
    assert faults.unset(compiled()) and oldest.asked == 2


def test_a_cache_that_cannot_be_written_is_done_without(oldest, monkeypatch, tmp_path):
    oldest.said = SASS
    faults.unset(compiled())
    kept(tmp_path).unlink()

    def put(*args: Any, **settings: Any) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(type(faults.get_cache_manager("ab")), "put", put)
    assert faults.unset(compiled()) and faults.unset(compiled()) and oldest.asked == 3


def test_what_cannot_be_read_is_said_and_the_rest_is_looked_at(oldest):
    oldest.said = OSError("no such file")
    with pytest.warns(RuntimeWarning, match="norm: triton 3.6.0 .* could not be read: no such file"):
        refuse("norm", compiled(text=WGMMA))
    odd = IR.replace("#ttg.linear<{register", "#ttg.other<{register")
    with pytest.warns(RuntimeWarning, match="which is not known here"), pytest.raises(MiscompiledError, match="%rs1"):
        refuse("norm", compiled(odd, TEXT))


@pytest.mark.parametrize("there", [True, False])
def test_doctor_says_where_machine_code_is_not_looked_at(oldest, there):
    oldest.said = SASS
    if not there:
        oldest.tool.unlink()
        refuse("norm", compiled(text=WGMMA))
    rows = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)
    (row,) = (row for row in rows if row["what"] == "wrong code")
    assert "reductions, registers, stores, conversions" in row["found"]
    assert ("without nvdisasm" in row["found"]) == bool(row["to mend it"]) == (not there)
