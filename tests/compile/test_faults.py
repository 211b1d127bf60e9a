"""What a process refuses to run, asked of what Triton has compiled: `toolchain/faults.py` on the compiler's own objects."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import triton
import triton.language as tl

import tilewright as tw
from tests.attention_oracle import CALLS, call
from tests.compile import table, test_kernels
from tilewright.attention import portable
from tilewright.check.compiled import chip_variants
from tilewright.check.variants import Call, Variant, launches, variant
from tilewright.toolchain import aot, faults
from tilewright.toolchain.aot import Compiled

OLDEST = pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="needs Triton 3.6: what it makes of this is held"
)


def loaded(made: Compiled, digest: str = "cd" * 32) -> Any:
    """A kernel that was compiled ahead of time as a process has it that would launch it."""
    target = aot.gpu_target(made.arch)
    asm = {"ttgir": made.ir, "ptx": made.text, "cubin": made.binary}
    return SimpleNamespace(asm=asm, metadata=SimpleNamespace(target=target), hash=digest)


def add_rows(X, Y, N: tl.constexpr):
    x = tl.load(X + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :])
    tl.store(Y + tl.arange(0, N)[:, None] * N + tl.arange(0, N)[None, :], tl.dot(x, x))


def test_the_compiler_s_own_object_is_read():
    """Of a product by warpgroups all is looked at, and nothing is wrong with it."""
    source = aot._source(triton.jit(add_rows), {"X": "*bf16", "Y": "*fp32"}, {"N": 64}, ())
    made, _ = aot._compile(source, "sm_90", aot._options("sm_90"))
    assert "wgmma" in made.asm["ptx"] and faults.unset(made) == []
    faults.refuse("add_rows", made)


def attention_at(least: int, monkeypatch: pytest.MonkeyPatch) -> Variant:
    """72 columns of keys beside 40 of values, read number by number, in parts of at least so many."""
    monkeypatch.setattr(portable, "narrowest", lambda q: least)
    monkeypatch.setattr(portable, "in_words", portable.heads_of)
    op = tw.catalogue()["attention"]
    values = op.signature.bind((), {**call(**CALLS["72 and 40"]), "backend": "portable"})
    forward = next(one for one in launches(op, Call(values), "sm_90") if one.kernel.name == "attention_forward")
    return variant(forward, "sm_90")


@OLDEST
def test_descriptors_that_were_never_set_are_refused(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    with pytest.raises(faults.MiscompiledError, match=r"ptxas \(12.8\) .* UR\d+ is read and was never written"):
        faults.refuse("attention_forward", loaded(attention_at(16, monkeypatch).compile()))
    faults.refuse("attention_forward", loaded(attention_at(64, monkeypatch).compile()))


# ---------------------------------------------------------------- what a table may hold


def known_wrong(name: str) -> Variant:
    """The first variant of a kernel that is refused on a chip: `sm_100 hadamard_tiles`."""
    arch, kernel = name.split()
    return next(one for own in chip_variants(arch).values() for one in own if one.kernel.name == kernel)


@OLDEST
@pytest.mark.parametrize("name", table.REFUSED)
def test_what_the_table_calls_refused_is_refused(name):
    """When this fails the row can leave `REFUSED`."""
    one = known_wrong(name)
    made = one.compile()
    assert table.wrong_code(one.name, made) and not table.unexpected(one, made)
    with pytest.raises(faults.MiscompiledError, match=rf"toolchain/{table.REFUSED[name]}\.py"):
        faults.refuse(one.kernel.name, loaded(made))


@OLDEST
def test_no_row_is_written_of_wrong_code(monkeypatch):
    one = known_wrong(*table.REFUSED)
    for name, value in (("_wanted", [one]), ("_recorded", {}), ("_others", {}), ("_texts", {})):
        monkeypatch.setattr(test_kernels, name, value, raising=False)
    label, row, said = test_kernels.measure(0)
    assert label == table.label(one) and row.keys() == {"shared", "source"} and not said
    monkeypatch.setattr(table, "REFUSED", {})
    label, row, said = test_kernels.measure(0)
    assert label == table.label(one) and row is None and "lane bits" in said[0]
