"""The rule of `toolchain/waits.py` on small texts, and on kernels in which a wait is left out, late or not everybody's."""

from __future__ import annotations

import pytest
import triton
import triton.language as tl

from tests.compile import table
from tilewright.check.compiled import own_variants
from tilewright.check.variants import Variant
from tilewright.core.triton_versions import gl, gluon
from tilewright.device.dependent import await_last, begin_dependent
from tilewright.runtime.kernel import Kernel, kernel
from tilewright.toolchain.aot import compile_for
from tilewright.toolchain.waits import unawaited

TEXT = """
.visible .entry k(.param .u64 .ptr .global .align 16 X, .param .u32 N)
.reqntid 128
{{
    .reg .pred %p<3>; .reg .b32 %r<9>; .reg .b64 %rd<5>;
    .loc 1 20 0 // of a file
    ld.param.b64 %rd1, [X]; ld.param.b32 %r1, [N];
    {body}
    ret;
}}
.section .debug_abbrev {{ .b8 1 }}
"""
WAIT = "// begin inline asm\n\tgriddepcontrol.wait; // dummy %r3\n\t// end inline asm\n"
LOAD, STORE = "ld.global.v2.b32 {%r2, %r3}, [%rd1];", "@%p1 st.global.b32 [%rd1 + 0], { %r2 };"
RIGHT = {
    "first of all": WAIT + LOAD + STORE,
    "after numbers": "griddepcontrol.launch_dependents; mov.u32 %r3, %tid.x;" + WAIT + LOAD,
    "after shared memory": "st.shared.v2.b32 [%r2], {%r1, %r3}; ld.shared::cta.b32 %r4, [%r2];" + WAIT + LOAD,
    "after barriers": "@%p1 mbarrier.init.shared::cta.b64 [%r2], 1; bar.sync 0, 128;" + WAIT + LOAD,
    "after the L2 was asked": "prefetch.global.L2 [%rd1]; @%p1 cp.async.bulk.prefetch.L2.global [%rd1], 64;"
    + "prefetch.global.L2::evict_last [%rd1]; prefetch.tensormap [%rd2];"
    + WAIT
    + LOAD,
    "on both ways": "@%p1 bra $L_1; " + WAIT + "bra.uni $L_2; $L_1: " + WAIT + "$L_2: " + LOAD,
    "after a loop": "{ .reg .pred done; again: setp.eq.s32 done, %r1, 0; @!done bra.uni again; } " + WAIT + LOAD,
    "or it traps": "@%p1 trap; " + WAIT + LOAD,
    "where warps part": "@%p1 bra $L_1; barrier.sync 1;" + WAIT + LOAD + "barrier.sync 1; ret;"
    "$L_1: barrier.sync 1; ld.shared.b8 %r2, [%r1]; T: .branchtargets $L_2,\n\t$L_3; brx.idx %r2, T;"
    "$L_2: barrier.sync 1; " + WAIT + "cp.async.bulk.tensor.2d.shared::cluster.global.tile [%r2], [%rd1, {%r1, %r1}]; bra.uni $L_1;"
    "$L_3: ret;",
}  # fmt: skip
WRONG = {
    "never": LOAD + STORE,
    "nothing but never": "",
    "after a load": LOAD + WAIT + STORE,
    "after a store": STORE + WAIT,
    "after an exit": "@%p1 bra $L_1; " + WAIT + LOAD + "$L_1:",
    "after a return": "@%p1 ret; " + WAIT + LOAD,
    "on one way": "@%p1 bra $L_1; " + WAIT + "$L_1: " + LOAD,
    "in a loop that may not run": "$L_1: @%p1 bra $L_2; " + WAIT + "bra.uni $L_1; $L_2: " + LOAD,
    "by some threads": "@%p1 griddepcontrol.wait; " + LOAD,
    "after a copy": "cp.async.cg.shared.global [%r2], [%rd1], 16;" + WAIT,
    "after a bulk copy": "cp.async.bulk.tensor.1d.shared::cluster.global.tile [%r2], [%rd1, {%r1}], [%r3];" + WAIT,
    "after a generic load": "ld.b32 %r2, [%rd1];" + WAIT,
    "after an atomic": "atom.global.gpu.relaxed.add.u32 %r2, [%rd1], 1;" + WAIT,
    "after the L1 was asked": "prefetch.global.L1 [%rd1];" + WAIT,
    "after a call": "call.uni f, ();" + WAIT,
    "by the first four warps alone": RIGHT["where warps part"].replace("$L_2: barrier.sync 1; " + WAIT, "$L_2: "),
    "by all others": RIGHT["where warps part"].replace("barrier.sync 1;" + WAIT + LOAD, "barrier.sync 1;" + LOAD, 1),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_wait_that_comes_first_is_seen(name):
    assert unawaited(TEXT.format(body=RIGHT[name])) == []


@pytest.mark.parametrize("name", WRONG)
def test_a_wait_that_comes_late_is_seen(name):
    assert unawaited(TEXT.format(body=WRONG[name]))


def test_early_reads_are_let_pass_where_they_are_meant_but_early_ends_are_not():
    assert unawaited(TEXT.format(body=LOAD + WAIT + STORE), early_reads=True) == []
    assert unawaited(TEXT.format(body="@%p1 ret;" + LOAD + WAIT), early_reads=True) == ["it ends before it waits"]


def test_what_is_no_kernel_is_not_read():
    for text in ("", TEXT.format(body="") * 2, TEXT.format(body="{")):
        with pytest.raises(ValueError, match="PTX"):
            unawaited(text)


# ---- what compilers make of kernels


def waits(X, Y, N, DEPENDENT: tl.constexpr):
    begin_dependent(DEPENDENT)
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    if tl.program_id(0) > N:
        return
    tl.store(Y + i, tl.load(X + i, i < N, 0.0), i < N)


def forgets(X, Y, N, DEPENDENT: tl.constexpr):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(Y + i, tl.load(X + i, i < N, 0.0), i < N)


def loads_first(X, Y, N, DEPENDENT: tl.constexpr):
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    x = tl.load(X + i, i < N, 0.0)
    begin_dependent(DEPENDENT)
    tl.store(Y + i, x, i < N)


def ends_first(X, Y, N, DEPENDENT: tl.constexpr):
    if tl.program_id(0) > N:
        return
    begin_dependent(DEPENDENT)
    i = tl.program_id(0) * 128 + tl.arange(0, 128)
    tl.store(Y + i, tl.load(X + i, i < N, 0.0), i < N)


def variant_of(body, jit=triton.jit) -> Variant:
    made: Kernel = kernel(grid=lambda a: (1,), jit=jit, dependent=True)(body)
    types = {"X": "*fp32", "Y": "*fp32", "N": "i32"}
    return Variant(made, "sm_90", types, frozenset(), {"DEPENDENT": True}, {"launch_pdl": True})


@pytest.mark.parametrize("body", [forgets, loads_first, ends_first])
def test_a_kernel_that_does_not_wait_first_is_refused_by_the_net(body):
    one = variant_of(body)
    assert table.unexpected(one, one.compile())


def test_a_kernel_that_waits_first_is_not():
    one = variant_of(waits)
    assert table.unexpected(one, one.compile()) == []
    off = compile_for(one.kernel.jit, one.types, {"DEPENDENT": False}, "sm_90")
    assert "griddepcontrol" not in off.text


@gluon.jit
def first_warps(X, N, DEPENDENT: gl.constexpr):
    await_last(DEPENDENT)
    gl.store(X, N)


@gluon.jit
def last_warp(Y, N, DEPENDENT: gl.constexpr):
    await_last(DEPENDENT)
    gl.store(Y, N)


def parted(X, Y, N, DEPENDENT: gl.constexpr):
    gl.warp_specialize([(first_warps, (X, N, DEPENDENT)), (last_warp, (Y, N, DEPENDENT))], [1], [24])


def parted_forgetting(X, Y, N, DEPENDENT: gl.constexpr):
    gl.warp_specialize([(first_warps, (X, N, DEPENDENT)), (last_warp, (Y, N, False))], [1], [24])


def test_each_way_of_a_program_whose_warps_part_is_read():
    for body, right in ((parted, True), (parted_forgetting, False)):
        one = variant_of(body, gluon.jit)
        types = {"X": "*i32", "Y": "*i32", "N": "i32"}
        found = unawaited(compile_for(one.kernel.jit, types, one.constants, "sm_90", **one.options).text)
        assert (found == []) == right


def test_dependent_kernels_are_drawn():
    """Those of a decoder's step and of a denoise loop: each has a variant that begins early."""
    early = {one.kernel.name for mine in own_variants().values() for one in mine if one.constants.get("DEPENDENT")}
    assert early >= {
        "rms_norm_forward", "modulated_norm_forward", "small_rows", "small_rows_hopper", "small_add_parts", "qkv_split_cache_rows",
        "attention_part", "attention_parts_merge", "attention_forward", "glu_forward", "epilogue_forward", "sample_heads",
        "sample_rows", "quantize_tiles", "quantize_rows", "cache_write_rows", "cache_move_rows", "softmax_forward",
    }  # fmt: skip
