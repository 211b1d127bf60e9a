"""Facts of a chip. Kernels and `when` predicates ask for facts, never for names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import triton
from triton import knobs

# Gluon, Triton's lower level, is experimental: what its functions are called with is known for this version alone
GLUON = triton.__version__.startswith("3.6.")


@dataclass(frozen=True)
class Target:
    """One chip: what it is, how much of everything it has, what its instructions can do."""

    arch: str
    sms: int
    shared_memory: int  # bytes one block may take
    l2: int  # bytes
    bandwidth: float  # bytes a second, measured read + write copy where the chip has been run, else the data sheet's
    fp8: bool  # converts to and from e4m3 in hardware
    tma: bool  # bulk tensor copies
    ran: bool  # whether tilewright has ever been run on it; otherwise "compiled, never run"
    warp: int = 32
    gluon: bool = GLUON  # whether Triton's Gluon is the one that kernels are written for

    @staticmethod
    def at(device: torch.device) -> Target:
        """The chip that a tensor's kernels run on: the pretended one, the interpreter, or the GPU it is on."""
        instead = pretended.get()
        if instead is not None:
            return instead
        if INTERPRETING:
            return INTERPRETER
        if device.type != "cuda":
            raise RuntimeError(f"kernels do not run on {device.type} tensors, but in a process with TRITON_INTERPRET=1")
        return Target.of(device.index)

    @staticmethod
    @functools.cache
    def of(device: int) -> Target:
        """The chip behind a CUDA device index, its sizes read from the driver."""
        props = torch.cuda.get_device_properties(device)
        if torch.version.hip:
            arch = props.gcnArchName.split(":")[0]
        else:
            arch = f"sm_{props.major}{props.minor}"
        known = TARGETS.get(arch)
        if known is None:
            raise RuntimeError(
                f"tilewright does not know the chip {arch} ({props.name}); it knows {', '.join(TARGETS)}"
            )
        return replace(known, sms=props.multi_processor_count, l2=props.L2_cache_size)


KIB = 1024
TARGETS = {
    t.arch: t
    for t in (
        Target("sm_80", 108, 163 * KIB, 40 * KIB**2, 1.6e12, fp8=False, tma=False, ran=False),
        Target("sm_86", 84, 99 * KIB, 6 * KIB**2, 0.9e12, fp8=False, tma=False, ran=False),
        Target("sm_89", 128, 99 * KIB, 72 * KIB**2, 0.95e12, fp8=True, tma=False, ran=False),
        Target("sm_90", 132, 227 * KIB, 60 * KIB**2, 4.28e12, fp8=True, tma=True, ran=True),  # H200, November 2026
        Target("sm_100", 148, 227 * KIB, 126 * KIB**2, 7.0e12, fp8=True, tma=True, ran=False),
        Target("sm_120", 170, 99 * KIB, 96 * KIB**2, 1.6e12, fp8=True, tma=True, ran=False),
        Target("gfx942", 304, 64 * KIB, 4 * KIB**2, 4.0e12, fp8=True, tma=False, ran=False, warp=64),
        Target("gfx950", 256, 160 * KIB, 4 * KIB**2, 6.0e12, fp8=True, tma=False, ran=False, warp=64),
    )
}
# The interpreter is chosen per process. It stands for the chip the kernels are written for, less what it cannot run.
INTERPRETING: bool = knobs.runtime.interpret
INTERPRETER = replace(TARGETS["sm_90"], fp8=False, tma=False)
pretended: ContextVar[Target | None] = ContextVar("pretended", default=None)


@contextlib.contextmanager
def pretend(target: Target) -> Iterator[None]:
    """Choose implementations and constants as on `target`; with `kernel.collect`, to compile for a chip that is not here."""
    token = pretended.set(target)
    try:
        yield
    finally:
        pretended.reset(token)
