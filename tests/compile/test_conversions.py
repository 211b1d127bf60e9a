"""The rule of `toolchain/conversions.py` beside what ptxas makes of such code, and the kernel that it was found in."""

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
from tilewright.toolchain.conversions import misplaced

TOOLS = Path(triton.__file__).parent / "backends/nvidia/bin"
# Two conversions, what is made of their results, and what else reads the first
KERNEL = """
.version 8.0
.target sm_90
.address_size 64
.visible .entry k(.param .u64 X, .param .u64 Y)
{{
.reg .b16 %rs<3>; .reg .b32 %r<9>; .reg .b64 %rd<5>;
ld.param.u64 %rd1, [X]; ld.param.u64 %rd2, [Y];
mov.u32 %r1, %tid.x; mul.wide.u32 %rd3, %r1, 16; add.s64 %rd4, %rd1, %rd3; add.s64 %rd2, %rd2, %rd3;
ld.global.v4.b32 {{%r2, %r3, %r4, %r5}}, [%rd4];
cvt.rn.satfinite.e4m3x2.f32 %rs1, %r3, %r2;
cvt.rn.satfinite.e4m3x2.f32 %rs2, %r5, %r4;
{stored}
{read}
st.global.b32 [%rd2+8], %r6;
ret;
}}
"""
JOINED = "mov.b32 %r7, {%rs1, %rs2}; st.global.b32 [%rd2], %r7;"
STORED = {
    "joined": JOINED,
    "stored together": "st.global.v2.b16 [%rd2], {%rs1, %rs2};",
    "bytes": "st.global.v2.b8 [%rd2], {%rs1, %rs2};",
    "apart": "st.global.b16 [%rd2], %rs1; st.global.b16 [%rd2+64], %rs2;",
}
READ = {"unpacked": "cvt.rn.f16x2.e4m3x2 %r6, %rs1;", "widened": "cvt.u32.u16 %r6, %rs1;", "not": "mov.u32 %r6, %r2;"}


def reads_what_was_written(ptx: str, folder: Path) -> bool:
    """Whether the machine code that ptxas makes reads codes only from registers that a conversion has written before."""
    source, cubin = folder / "k.ptx", folder / "k.cubin"
    source.write_text(ptx)
    subprocess.run([TOOLS / "ptxas", "-arch", "sm_90", source, "-o", cubin], check=True, capture_output=True)
    sass = subprocess.run([TOOLS / "nvdisasm", "-c", cubin], check=True, capture_output=True, text=True).stdout
    written: set[str] = set()
    for line in sass.splitlines():
        if made := re.search(r"F2FP\.SATFINITE\S+ (R\d+),", line):
            written.add(made[1])
        read = re.search(r"(?:F2FP\S+UNPACK_B R\d+, (R\d+)|LOP3\.LUT R\d+, (R\d+), 0xffff)", line)
        if read and not {read[1], read[2]} & written:
            return False
    return True


@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("stored", STORED)
def test_the_rule_finds_what_ptxas_gets_wrong(stored, read, tmp_path):
    """The rule may call code wrong that a later ptxas gets right, never the other way round."""
    ptx = KERNEL.format(stored=STORED[stored], read=READ[read])
    assert bool(misplaced(ptx)) == (stored in ("joined", "stored together") and read != "not")
    assert reads_what_was_written(ptx, tmp_path) or misplaced(ptx)


def test_ptxas_still_needs_the_rule(tmp_path):
    """When this fails the rule can go, with what `nv_scale` does by integers for its sake."""
    assert not reads_what_was_written(KERNEL.format(stored=JOINED, read=READ["unpacked"]), tmp_path)


@pytest.mark.parametrize("ways", ["row", "col", "both"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_nvfp4_has_no_such_code(dtype, ways):
    """Scales of blocks are stored, and decoded for the codes that they scale."""
    x = torch.empty(64, 320, dtype=dtype, device="meta")
    for one in needed(tw.catalogue()["quantize"], [Call({"x": x, "out_format": tw.nvfp4(ways=ways)}, FORWARD)]):
        assert table.wrong_code(one.name, one.compile()) == []
