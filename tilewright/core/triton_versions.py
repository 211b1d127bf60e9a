"""What differs between versions of Triton: names of Gluon, its lower level, options of the compiler, compiled launchers, and what
its compiler gets wrong.

Any Triton is probed by what it offers, never by its number; what its compiler gets wrong, which nothing tells, is a table of
numbers. Gluon is experimental, and its functions are renamed: kernels import them from here by their newest names. Where Triton
does not offer what kernels in Gluon call, portable ones are taken. Gluon is loaded when the first of its names is asked for, since
that takes 0.1 s. This module knows Triton alone.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
import sys
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import triton

GLUON = "triton.experimental.gluon"
TRIED = ("3.6.", "3.7.", "3.8.", "3.9.")  # kernels have been compiled with these
WARPGROUP = ("warpgroup_mma", "warpgroup_mma_init", "warpgroup_mma_wait")
# How kernels call what they import from here, and methods of what they make with it: how many arguments by position, the tensor or
# memory of a method among them, and which by name. A test holds both tables to the kernels
CALLED = {
    "GluonASTSource": (0, "fn signature constexprs attrs"),
    "TensorDescriptor": (5, ""),
    "arrive_when_copied": (1, "increment_count _semantic"),
    "async_load": (4, "pred _semantic"),
    "async_store": (3, "_semantic"),
    "barrier": (0, "_semantic"),
    "commit_group": (0, "_semantic"),
    "copy_ahead": (3, "_semantic"),
    "fence_async_shared": (0, "_semantic"),
    "gl.BlockedLayout": (4, ""),
    "gl.DistributedLinearLayout": (5, ""),
    "gl.DotOperandLayout": (0, "operand_index parent k_width"),
    "gl.NVMMADistributedLayout": (0, "version warps_per_cta instr_shape"),
    "gl.NVMMASharedLayout": (0, "swizzle_byte_width element_bitwidth rank"),
    "gl.NVMMASharedLayout.get_default_for": (2, ""),
    "gl.SliceLayout": (2, ""),
    "gl.SwizzledSharedLayout": (4, ""),
    "gl.abs": (1, "_semantic"),
    "gl.allocate_shared_memory": (3, "_semantic"),
    "gl.arange": (3, "_semantic"),
    "gl.associative_scan": (3, "_semantic"),
    "gl.atomic_add": (2, "sem _semantic"),
    "gl.broadcast": (2, "_semantic"),
    "gl.cdiv": (2, ""),
    "gl.constexpr": (1, ""),
    "gl.convert_layout": (2, "assert_trivial _semantic"),
    "gl.exp2": (1, "_semantic"),
    "gl.expand_dims": (2, "_semantic"),
    "gl.full": (4, "_semantic"),
    "gl.inline_asm_elementwise": (3, "dtype is_pure pack _semantic"),
    "gl.join": (2, "_semantic"),
    "gl.load": (3, "cache_modifier _semantic"),
    "gl.log": (1, "_semantic"),
    "gl.max": (2, ""),
    "gl.maximum": (2, "_semantic"),
    "gl.minimum": (2, "_semantic"),
    "gl.multiple_of": (2, "_semantic"),
    "gl.pointer_type": (1, ""),
    "gl.program_id": (1, "_semantic"),
    "gl.reduce": (3, "_semantic"),
    "gl.rsqrt": (1, "_semantic"),
    "gl.split": (1, "_semantic"),
    "gl.static_range": (3, ""),
    "gl.store": (3, "_semantic"),
    "gl.sum": (2, ""),
    "gl.tensor.reshape": (2, "_semantic"),
    "gl.tensor.to": (2, "bitcast _semantic"),
    "gl.warp_specialize": (3, "_semantic"),
    "gl.where": (3, "_semantic"),
    "gl.zeros": (3, ""),
    "gl.zeros_like": (1, ""),
    "gluon.jit": (1, "do_not_specialize"),
    "mbarrier.MBarrierLayout": (0, ""),
    "mbarrier.arrive": (1, "count pred _semantic"),
    "mbarrier.expect": (2, "pred _semantic"),
    "mbarrier.init": (1, "count _semantic"),
    "mbarrier.wait": (2, "_semantic"),
    "memory.index": (2, "_semantic"),
    "memory.load": (2, "_semantic"),
    "memory.permute": (2, "_semantic"),
    "memory.slice": (4, "_semantic"),
    "memory.store": (2, "_semantic"),
    "mma_v2": (3, "_semantic"),
    "reinterpret": (4, "_semantic"),
    "tma.store_wait": (1, "_semantic"),
    "wait_group": (1, "_semantic"),
    "warpgroup_mma": (3, "use_acc is_async _semantic"),
    "warpgroup_mma_init": (1, "_semantic"),
    "warpgroup_mma_wait": (1, "deps _semantic"),
}
NAMED = "gl.bfloat16 gl.float16 gl.float32 gl.float8e4nv gl.float8e5 gl.int16 gl.int32 gl.int64 gl.int8 gl.uint8"  # and not called


class Absent:
    """Stands for all of Gluon where it is not what kernels are written for, so that their modules can be imported. Whatever is
    made of it is absent as well."""

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):  # what asks for such a name wants to know what kind of thing this is
            raise AttributeError(name)
        return self

    def __call__(self, *args: Any, **settings: Any) -> Absent:
        return self

    def __iter__(self) -> Any:
        return iter(())


class Gluon(NamedTuple):
    """Gluon's names as kernels use them, and what this Triton lacks of it, in words."""

    names: dict[str, Any]
    lacks: str | None


def gluon_of(load: Callable[[str], Any]) -> Gluon:
    """Gluon, its modules loaded by `load`."""
    try:
        gl = load(f"{GLUON}.language")
        hopper = load(f"{GLUON}.language.nvidia.hopper")
        memory = load(f"{GLUON}.language._core").shared_memory_descriptor
        tma, threads = hopper.tma, load(f"{GLUON}.language.nvidia.ampere").async_copy
        names = {
            "gl": gl,
            "gluon": load(GLUON),
            "memory": memory,
            "GluonASTSource": load(f"{GLUON}._runtime").GluonASTSource,
            "TensorDescriptor": load(f"{GLUON}.nvidia.hopper").TensorDescriptor,
            # Of two names the newer is asked for first: an older one may be kept only to say that it is gone
            "async_load": either(tma, "async_load", "async_copy_global_to_shared"),
            "async_store": either(tma, "async_store", "async_copy_shared_to_global"),
            "barrier": either(gl, "barrier", "thread_barrier"),
            # By threads, not in bulk: `async_load` of another module
            "copy_ahead": either(threads, "async_load", "async_copy_global_to_shared"),
            "arrive_when_copied": threads.mbarrier_arrive,  # all threads, each when what it has begun to copy is there
            **{name: getattr(threads, name) for name in ("commit_group", "wait_group")},
            "reinterpret": either(memory, "reinterpret", "_reinterpret"),
            **{name: getattr(hopper, name) for name in ("fence_async_shared", "mbarrier", "mma_v2", "tma")},
            **{name: getattr(hopper, name) for name in WARPGROUP},
        }
        for path in NAMED.split():
            found_at(names, path)
        for path, (count, words) in CALLED.items():
            signature_of(found_at(names, path)).bind(*[None] * count, **dict.fromkeys(words.split()))
    except (ImportError, AttributeError) as error:
        return Gluon({}, str(error))
    except (TypeError, ValueError) as error:
        return Gluon({}, f"{path}: {error}")
    return Gluon(names, None)


def found_at(names: dict[str, Any], path: str) -> Any:
    """What a dotted name stands for."""
    first, *rest = path.split(".")
    return functools.reduce(getattr, rest, names[first])


def signature_of(function: Any) -> inspect.Signature:
    """What a function takes; of one that Triton has wrapped to compile it, what it takes in a kernel."""
    return inspect.signature(getattr(function, "fn", function))


def either(of: Any, name: str, older: str) -> Any:
    """What goes by one of two names; if none does, the error says the newer."""
    return getattr(of, name) if hasattr(of, name) or not hasattr(of, older) else getattr(of, older)


@functools.cache
def probe() -> Gluon:
    """The Gluon of the Triton that is installed."""
    return gluon_of(importlib.import_module)


@functools.cache
def offers_gluon() -> bool:
    """Whether the installed Triton offers what kernels in Gluon call. The first to ask is warned if it does not."""
    lacks = probe().lacks
    if lacks is not None:
        text = f"triton {triton.__version__} does not offer what kernels in Gluon call ({lacks}): portable kernels are taken"
        warnings.warn(text, RuntimeWarning, stacklevel=3)
    return lacks is None


def age(version: str) -> tuple[int, ...]:
    """Major and minor, by which versions are older or newer."""
    return tuple(int(part) for part in re.findall(r"\d{1,9}", version)[:2])


def release(version: str) -> str:
    """Of a version what measurements go by: `3.6` of 3.6.0."""
    return ".".join(map(str, age(version)))


def offered_gluon(version: str) -> bool:
    """Whether the Triton that something was measured with offers it: the installed one is asked, of others the tried are known."""
    if version == triton.__version__:
        return probe().lacks is None
    return version.startswith(TRIED)


def __getattr__(name: str) -> Any:
    """One of Gluon's names, for `from .triton_versions import gl`."""
    if name.startswith("__"):
        raise AttributeError(name)
    found = probe()
    if found.lacks is not None:
        return Absent()
    if name not in found.names:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return found.names[name]


# ---------------------------------------------------------------- wrong code


class Fault(NamedTuple):
    """Something that a tool, Triton or its assembler, makes wrong code of: releases before `mended`, or all where that is None."""

    tool: str
    mended: tuple[int, int] | None
    known_by: str


# By the module of `toolchain/` that finds code which suffers from it. A release that nobody tried, older than a right one, is
# taken for wrong.
FAULTS = {
    "reductions": Fault(
        "triton", (3, 7), "3.6 counts the bits of a layout, and an H200 gave wrong sums; 3.7 reads them"
    ),
    "registers": Fault("ptxas", (12, 9), "of one PTX 12.8 makes reads of what was never set, and 12.9 and 13.4 do not"),
    "stores": Fault("ptxas", (13, 4), "of the same lines of PTX 12.8 and 12.9 make a conversion, and 13.4 does not"),
    "conversions": Fault("ptxas", None, "12.8, 12.9 and 13.4 make it of the same fifteen lines of PTX"),
}


@functools.cache
def assembler(arch: int) -> str | None:
    """The release of ptxas that this Triton assembles with for a chip of NVIDIA's, `12.8`; None where it does not say."""
    try:
        return importlib.import_module("triton.backends.nvidia.compiler").get_ptxas(arch).version
    except (ImportError, AttributeError, RuntimeError):
        return None


def has_fault(name: str, ptxas: str | None = None) -> bool:
    """Whether the Triton that is installed, with this release of ptxas, has a fault; a ptxas that is not known has all."""
    fault = FAULTS[name]
    version = triton.__version__ if fault.tool == "triton" else ptxas
    return version is None or fault.mended is None or age(version) < fault.mended


MISREADS_REDUCTIONS = has_fault("reductions")

# ---------------------------------------------------------------- the compiler and its launcher

# Products may be contracted into sums: the default up to 3.9, and so what bits are promised with
COMPILED_WITH = {"enable_fp_fusion": True}
# What launchers are called with beside a kernel's own arguments, as Triton writes it down
ROW = "iiiKKppOOOOOO"
LIST = "gridX gridY gridZ stream function kernel_metadata launch_metadata launch_enter_hook launch_exit_hook args"


@functools.cache
def launcher_of(launcher: type) -> str | None:
    """How a class of compiled launchers of Triton's takes a kernel's arguments: in a `row` after its own (3.6), in a `list` (from
    3.7 on), or None if it is neither of these."""
    module = sys.modules.get(launcher.__module__)
    if launcher.__name__ != "CudaLauncher" or module is None:
        return None
    if getattr(module, "_BASE_ARGS_FORMAT", None) == ROW:
        return "row"
    if not all(hasattr(module, name) for name in ("annotate_arguments", "make_tensordesc_arg")):
        return None
    names = list(inspect.signature(launcher.__call__).parameters)[1:]
    return "list" if names == LIST.split() else None


def launches_directly() -> bool:
    """Whether the launcher of the Triton that is installed is a known one."""
    driver = importlib.import_module("triton.backends.nvidia.driver")
    return hasattr(driver, "CudaLauncher") and launcher_of(driver.CudaLauncher) is not None
