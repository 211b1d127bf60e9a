"""The kernel that JAX launches, as jax-triton compiles it: pointers and sizes, and the chip's own conversion."""

from __future__ import annotations

import pytest

from tests.compile import table
from tilewright.formats.given import given_codes
from tilewright.toolchain.aot import compile_for


@pytest.mark.parametrize("transposed", [False, True])
def test_it_compiles_with_the_conversion_instruction(transposed):
    constants = {"TRANSPOSED": transposed, "FORMAT": "e4m3:static:fp32:te:fast", "ROWS": 32, "COLS": 128}
    signature = {"X": "*bf16", "SCALE": "*fp32", "M": "i32", "N": "i32", "CODES": "*fp8e4nv"}
    compiled = compile_for(
        given_codes.jit, signature, constants, "sm_90", divisible=("X", "SCALE", "CODES"), num_warps=4
    )
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.text and compiled.spills == 0
    assert table.wrong_code("given_codes", compiled) == []
