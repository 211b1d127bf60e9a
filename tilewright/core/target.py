"""Facts of a chip. Kernels and `when` predicates ask for facts, never for names."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

import torch
from triton import knobs

from . import triton_versions


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
    wgmma: bool = False  # products of whole warpgroups, from shared memory
    fp8_products: bool = False  # multiplies e4m3 and e5m2 as they are
    # Instructions that take codes together with scales of small blocks: recipe, and whether both operands need be of one width
    block_scaled: Mapping[str, bool] = field(default_factory=dict, hash=False)
    early_launch: bool = False  # a kernel may begin before the one it waits for has ended
    gluon: bool | None = (
        None  # whether kernels in Gluon may be taken; None: if the installed Triton offers what they call
    )
    stands_for: str | None = None  # of a chip that is not in the table: the one whose facts these are

    @property
    def nvidia(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def number(self) -> int:
        """Its place in the line of its maker: 90 of sm_90, 0x942 of gfx942."""
        return number(self.arch)[1]

    @property
    def fp4(self) -> bool:
        """Whether it multiplies NVFP4 as it is: e2m1 codes, 16 of which share a scale."""
        return "BlockWise1x16" in self.block_scaled

    @property
    def fused_attention(self) -> bool:
        """Whether attention is one kernel here, whose scores are never in memory. The portable one multiplies bf16, which chips of
        NVIDIA's do from 80 on."""
        return not self.nvidia or self.number >= 80

    @property
    def takes_gluon(self) -> bool:
        """Whether kernels in Gluon may be taken. It is asked last, of chips that there are such kernels for: it may load Gluon, and
        warn that there is none."""
        return triton_versions.offers_gluon() if self.gluon is None else self.gluon

    @property
    def hopper_gluon(self) -> bool:
        """Whether kernels in Gluon that copy in bulk and multiply by warpgroups run here."""
        return self.wgmma and self.tma and self.takes_gluon

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
        found = TARGETS.get(arch) or nearest(arch)
        # What a table says of another chip may be more than this one has
        shared = getattr(props, "shared_memory_per_block_optin", found.shared_memory)
        return replace(
            found,
            sms=props.multi_processor_count,
            l2=props.L2_cache_size,
            shared_memory=min(found.shared_memory, shared) if found.stands_for else found.shared_memory,
            warp=getattr(props, "warp_size", found.warp) if found.stands_for else found.warp,
        )


KIB = 1024
_SINCE_HOPPER = {"fp8": True, "fp8_products": True, "tma": True, "early_launch": True}
TARGETS = {
    t.arch: t
    for t in (
        Target("sm_80", 108, 163 * KIB, 40 * KIB**2, 1.6e12, fp8=False, tma=False, ran=False),
        Target("sm_86", 84, 99 * KIB, 6 * KIB**2, 0.9e12, fp8=False, tma=False, ran=False),
        Target("sm_89", 128, 99 * KIB, 72 * KIB**2, 0.95e12, fp8=True, fp8_products=True, tma=False, ran=False),
        Target("sm_90", 132, 227 * KIB, 60 * KIB**2, 4.28e12, **_SINCE_HOPPER, wgmma=True, ran=True),  # H200, November 2026
        Target("sm_100", 148, 227 * KIB, 126 * KIB**2, 7.0e12, **_SINCE_HOPPER, ran=False,
               block_scaled={"BlockWise1x32": False, "BlockWise1x16": True}),
        Target("sm_120", 170, 99 * KIB, 96 * KIB**2, 1.6e12, **_SINCE_HOPPER, ran=False,
               block_scaled={"BlockWise1x32": True, "BlockWise1x16": True}),
        # Its e4m3 is another encoding than everybody's, so that it converts but does not multiply
        Target("gfx942", 304, 64 * KIB, 4 * KIB**2, 4.0e12, fp8=True, tma=False, ran=False, warp=64),
        Target("gfx950", 256, 160 * KIB, 4 * KIB**2, 6.0e12, fp8=True, fp8_products=True, tma=False, ran=False, warp=64,
               block_scaled={"BlockWise1x32": False}),
    )
}  # fmt: skip


def number(arch: str) -> tuple[str, int]:
    """(maker, number in that maker's line) of a chip: `sm_103` is number 103 of sm, `gfx90a` number 0x90a of gfx."""
    if arch.startswith("sm_"):
        return "sm", int("".join(c for c in arch[3:] if c.isdigit()) or "0")
    if arch.startswith("gfx"):
        return "gfx", int(arch[3:], 16)
    raise RuntimeError(f"tilewright has kernels for chips sm_* and gfx*, not for {arch}")


def nearest(arch: str) -> Target:
    """The target that stands for a chip that is not in the table: it has the facts of the nearest lower chip of its line, and
    portable kernels, for what the chip has beside those is not known. A chip below them all has no instructions for FP8 either."""
    maker, place = number(arch)
    line = sorted((t for t in TARGETS.values() if number(t.arch)[0] == maker), key=lambda t: number(t.arch))
    lower = [t for t in line if number(t.arch)[1] <= place]
    found = lower[-1] if lower else replace(line[0], fp8=False, fp8_products=False)
    plain = {"tma": False, "wgmma": False, "early_launch": False, "block_scaled": {}, "gluon": False, "ran": False}
    return replace(found, arch=arch, stands_for=found.arch, **plain)


def chip_words(target: Target) -> str:
    """The facts of a chip in a few words."""
    if target.stands_for is not None:
        return f"{target.arch}, not known: portable kernels, with the facts of {target.stands_for}"
    return f"{target.arch}, {'measured' if target.ran else 'compiled, never run'}"


# The interpreter is chosen per process. It stands for the chip the kernels are written for, less what it cannot run.
INTERPRETING: bool = knobs.runtime.interpret
INTERPRETER = replace(TARGETS["sm_90"], fp8=False, fp8_products=False, tma=False, wgmma=False, early_launch=False)
pretended: ContextVar[Target | None] = ContextVar("pretended", default=None)


@contextlib.contextmanager
def pretend(target: Target) -> Iterator[None]:
    """Inside, implementations and constants are chosen as on `target`. With `kernel.collect` that is how kernels are compiled for
    a chip that is not here."""
    token = pretended.set(target)
    try:
        yield
    finally:
        pretended.reset(token)
