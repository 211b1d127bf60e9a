"""The rule of `toolchain/stores.py` beside what ptxas makes of such code, and the kernel that it was found in."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import torch
import triton

import tilewright as tw
from tests.compile import table
from tilewright.check.variants import FORWARD, Call, needed
from tilewright.toolchain.stores import narrowed

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# The low bits of a number, in the ways in which they can be taken, and stores that want fewer than there are
NARROWING = """
.version 8.0
.target {arch}
.address_size 64
.visible .entry k(.param .u64 X, .param .u64 Y)
{{
.reg .pred %p<2>; .reg .b16 %rs<3>; .reg .b32 %r<9>; .reg .b64 %rd<5>; .shared .align 4 .b8 S[1024];
ld.param.u64 %rd1, [X]; ld.param.u64 %rd2, [Y];
mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 4; add.s64 %rd4, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
ld.global.b32 %r2, [%rd4];
mov.u32 %r5, S; add.s32 %r6, %r5, %r1;
setp.num.f32 %p1, %r2, %r2;
add.f32 %r3, %r2, 0f4B400000;
{made}
{stored}
ret;
}}
"""
MADE = {
    "chosen as a number": "selp.f32 %r4, %r3, 0f4B400000, %p1;",
    "rounded": "add.f32 %r4, %r2, 0f4B400000;",
    "chosen as bits": "selp.b32 %r4, %r3, 0, %p1;",
    "masked": "and.b32 %r4, %r3, 255;",
    "loaded": "mov.b32 %r4, %r2;",
}
NARROW = {
    "a byte, shared": "st.shared.b8 [%r6], %r4;",
    "two bytes, shared": "st.shared.b16 [%r6], %r4;",
    "a byte": "st.global.b8 [%rd2], %r4;",
    "converted before": "cvt.u16.u32 %rs1, %r4; st.shared.b8 [%r6], %rs1;",
    "a word": "st.global.b32 [%rd2], %r4;",
}


def converts(ptx: str, arch: str, folder: Path) -> bool:
    """Whether the machine code that ptxas makes converts numbers to integers."""
    source, cubin = folder / "k.ptx", folder / "k.cubin"
    source.write_text(ptx)
    subprocess.run([TOOLS / "ptxas", "-arch", arch, source, "-o", cubin], check=True, capture_output=True)
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    return bool(re.search(r"\bF2IP?\.", sass))


@pytest.mark.parametrize("stored", NARROW)
@pytest.mark.parametrize("made", MADE)
def test_the_rule_finds_low_bits_that_ptxas_converts(made, stored, tmp_path):
    ptx = NARROWING.format(arch="sm_90", made=MADE[made], stored=NARROW[stored])
    assert bool(narrowed(ptx)) == converts(ptx, "sm_90", tmp_path)
    assert bool(narrowed(ptx)) == (made in ("chosen as a number", "rounded") and "byte" in stored)


def test_ptxas_still_needs_the_rule(tmp_path):
    """When this fails for the oldest ptxas that is used, the rule can go, with the mask in `cache_write.codes_of`."""
    for arch in ("sm_80", "sm_90"):
        assert converts(NARROWING.format(arch=arch, made=MADE["rounded"], stored=NARROW["a byte"]), arch, tmp_path)


def test_codes_in_caches_are_stored_as_they_are():
    """The call in which this was found: of four columns that are rotated, two went through shared memory as bytes, and were 255."""
    blank = {"device": "meta"}
    values = {
        "qkv": torch.empty(2, 3, 96, **blank), "heads": 2, "kv_heads": 2, "head_dim": 16,
        "k_cache": torch.empty(2, 16, 2, 16, dtype=torch.int8, **blank),
        "v_cache": torch.empty(2, 16, 2, 16, dtype=torch.int8, **blank),
        "slots": torch.empty(2, 3, dtype=torch.int32, **blank), "q_weight": torch.empty(16, **blank),
        "k_weight": torch.empty(16, **blank), "freqs": torch.empty(12, 4, **blank), "rotary_dim": 4,
        "k_scale": torch.empty(1, 1, 1, 1, **blank), "v_scale": torch.empty(1, 1, 1, 1, **blank), "packing": "plain",
    }  # fmt: skip
    variants = needed(tw.catalogue()["qkv_split_cache"], [Call(values, FORWARD)])
    assert [line for one in variants for line in table.wrong_code(one.name, one.compile())] == []
    assert variants
