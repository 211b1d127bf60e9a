"""Where a program's two warpgroups wait for each other."""

from ...core.triton_versions import gl, gluon

# Barriers 10 to 12 are those of turns (`device/warpgroups.py`), at which somebody may have arrived already
MEET = gl.constexpr("bar.sync 13, 256; mov.u32 $0, 0;")


@gluon.jit
def meet():
    """Both warpgroups wait for each other."""
    gl.inline_asm_elementwise(MEET, "=r", [], gl.int32, False, 1)
