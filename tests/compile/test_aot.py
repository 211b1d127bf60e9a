"""Ahead-of-time compilation itself: every chip, what the report says, and what an error looks like."""

from __future__ import annotations

from dataclasses import replace

import pytest
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from tests.compile import table
from tilewright.core.target import TARGETS
from tilewright.toolchain.aot import Compiled, CompileError, compile_for, fingerprint


@triton.jit
def square(x):
    return x * x


@triton.jit
def cube(x):
    return x * x * x


@triton.jit
def elementwise(X, W, Y, N, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    y = ACT(tl.load(X + at, mask=at < N, other=0.0).to(tl.float32))
    if W is not None:
        y *= tl.load(W + at, mask=at < N, other=0.0)
    tl.store(Y + at, y.to(Y.dtype.element_ty), mask=at < N)


@triton.jit
def product(A, B, C, K, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, STEP)
    total = tl.zeros((M, N), tl.float32)
    for start in range(0, K, STEP):
        a = tl.load(A + m[:, None] * K + start + k[None, :])
        b = tl.load(B + n[None, :] * K + start + k[:, None])
        total = tl.dot(a, b, total)
    tl.store(C + m[:, None] * N + n[None, :], total.to(C.dtype.element_ty))


@gluon.jit
def doubled(X, Y, N, BLOCK: gl.constexpr, LAYOUT: gl.constexpr):
    at = gl.program_id(0) * BLOCK + gl.arange(0, BLOCK, layout=LAYOUT)
    gl.store(Y + at, gl.load(X + at, mask=at < N, other=0.0) * 2.0, mask=at < N)


def compile_elementwise(arch: str, out: str = "*bf16", weight: bool = False, divisible=("X", "Y", "N")) -> Compiled:
    signature = {"X": "*bf16", "Y": out, "N": "i32", **({"W": "*fp32"} if weight else {})}
    constants = {"ACT": square, "BLOCK": 1024, **({} if weight else {"W": None})}
    return compile_for(elementwise, signature, constants, arch, divisible=divisible)


def compile_product(arch: str = "sm_90", **options) -> Compiled:
    signature = {"A": "*bf16", "B": "*bf16", "C": "*bf16", "K": "i32"}
    constants = {"M": 128, "N": 256, "STEP": 64}
    return compile_for(product, signature, constants, arch, divisible=("A", "B", "C", "K"), num_warps=8, **options)


@pytest.mark.parametrize("arch", TARGETS)
def test_triton_and_gluon_compile_for_every_chip(arch):
    compiled = compile_elementwise(arch)
    assert compiled.registers > 0
    assert compiled.spills == 0
    assert compiled.shared_is_there
    assert compiled.threads == 4 * TARGETS[arch].warp
    assert sum(compiled.instructions.values()) > 20
    layout = gl.BlockedLayout([4], [TARGETS[arch].warp], [4], [0])
    low = compile_for(doubled, {"X": "*fp32", "Y": "*fp32", "N": "i32"}, {"BLOCK": 1024, "LAYOUT": layout}, arch)
    assert low.registers > 0
    assert low.text


def test_divisibility_decides_the_width_of_accesses():
    assert compile_elementwise("sm_90").count("LDG.E.128") > 0
    assert compile_elementwise("sm_90", divisible=()).count("LDG.E.128") == 0


def test_optional_pointer_and_hopper_instructions():
    assert compile_elementwise("sm_90", weight=True).count("LDG") > compile_elementwise("sm_90").count("LDG")
    assert ".target sm_90a" in compile_product(num_stages=3).text
    assert compile_product(num_stages=3).count("HGMMA") > 0


def test_spills_registers_and_shared_memory_are_reported():
    free, tight = compile_product("sm_80", num_stages=3), compile_product("sm_80", num_stages=3, maxnreg=128)
    assert free.registers > 128 >= tight.registers
    assert free.spills == 0 < tight.spills
    assert compile_product(num_stages=3).shared == 3 * (128 + 256) * 64 * 2
    assert not compile_product(num_stages=5).shared_is_there


@pytest.mark.skipif(
    not triton.__version__.startswith("3.6."), reason="needs Triton 3.6: later ones do not serialise this product"
)
def test_serialised_matrix_instructions_are_reported():
    assert compile_product(num_stages=3).serialised
    assert not compile_elementwise("sm_90").serialised


def test_the_report_survives_triton_s_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    first = compile_elementwise("sm_90")
    assert table.row(compile_elementwise("sm_90")) == table.row(first)
    for kept in tmp_path.rglob("*.log"):
        kept.unlink()
    assert table.row(compile_elementwise("sm_90")) == table.row(first)


def test_the_fingerprint_is_of_all_that_machine_code_follows_from(monkeypatch):
    def made(arch="sm_90", out="*bf16", act=square, block=1024, divisible=("X", "Y", "N"), **options):
        signature, constants = {"X": "*bf16", "Y": out, "N": "i32"}, {"ACT": act, "BLOCK": block, "W": None}
        return fingerprint(elementwise, signature, constants, arch, divisible=divisible, **options)

    first = made()
    assert made() == made(num_warps=4) == first
    changes = [
        {"arch": "sm_80"}, {"arch": "gfx942"}, {"out": "*fp16"}, {"act": cube}, {"block": 512}, {"divisible": ("X", "Y")},
        {"num_warps": 8}, {"num_stages": 5}, {"maxnreg": 128},
    ]  # fmt: skip
    assert len({first, *(made(**change) for change in changes)}) == 1 + len(changes)
    with pytest.raises(CompileError, match=r"elementwise for sm_80: .*fp8e4nv not supported"):
        made("sm_80", out="*fp8e4nv")
    monkeypatch.setattr(triton, "__version__", "3.6.1")
    assert made() != first


def test_errors_are_one_line():
    with pytest.raises(CompileError, match=r"elementwise for sm_80: .*fp8e4nv not supported") as error:
        compile_elementwise("sm_80", out="*fp8e4nv")
    assert "\n" not in str(error.value)
    with pytest.raises(CompileError, match="product for sm_90: .*Insufficient registers"):
        compile_product(num_stages=3, maxnreg=64)
    with pytest.raises(ValueError, match="elementwise needs a type or a value for W, Y, N, ACT"):
        compile_for(elementwise, {"X": "*bf16"}, {"BLOCK": 64}, "sm_90")
    with pytest.raises(ValueError, match="does not take Z"):
        compile_for(square, {"x": "fp32", "Z": "i32"}, {}, "sm_90")
    with pytest.raises(ValueError, match="arch is 'sm_70'"):
        compile_for(square, {"x": "fp32"}, {}, "sm_70")
    with pytest.raises(TypeError, match="function is a function"):
        compile_for(square.fn, {"x": "fp32"}, {}, "sm_90")


def test_the_table_holds_registers_spills_and_serialisation(tmp_path):
    compiled = compile_elementwise("sm_90")
    table.save(tmp_path, {"a": table.row(compiled)}, {"a": "toys"})
    rows = table.load(tmp_path)
    assert table.problems("a", compiled, rows) == []
    assert table.problems("a", replace(compiled, registers=compiled.registers - 3), rows) == []
    worse = {"spills": 4, "registers": compiled.registers + table.SLACK + 1, "serialised": True, "shared": 10**6}
    for field, value in worse.items():
        assert len(table.problems("a", replace(compiled, **{field: value}), rows)) == 1
    assert "no recorded row" in table.problems("b", compiled, rows)[0]
