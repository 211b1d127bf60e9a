"""Where a program's warpgroups wait for each other."""

from ...core.triton_versions import gl, gluon

# Barriers 10 to 12 are those of turns (`device/warpgroups.py`), at which somebody may have arrived already
MEET = gl.constexpr(("bar.sync 13, 256; mov.u32 $0, 0;", "bar.sync 13, 384; mov.u32 $0, 0;"))


@gluon.jit
def meet(COUNT: gl.constexpr = 2):
    """COUNT warpgroups, two or three, wait for each other."""
    gl.inline_asm_elementwise(MEET[COUNT - 2], "=r", [], gl.int32, False, 1)
