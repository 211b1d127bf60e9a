"""Compile a kernel for a chip that is not here, and say what the machine code costs.

Neither a GPU nor a driver is needed: Triton's own pipeline runs to object code with the assembler that Triton brings.
Registers, spills and serialised tensor-core instructions come from that assembler's report on the very code that would
run (kept beside the binary in Triton's cache, so a second compile costs nothing).
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
import re
import tempfile
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import triton
from triton import knobs
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, make_backend
from triton.runtime.cache import get_cache_manager

from ..core import triton_versions
from ..core.nest import labels
from ..core.target import TARGETS
from .disassembler import disassembled

__all__ = ["CompileError", "Compiled", "compile_for", "fingerprint", "gpu_target"]

_LOG = "tilewright.assembler.log"
# In the names of functions and, mangled, of those given to them: the same code may move
_MODULES = re.compile(r"\btilewright((\.\w+)*[.:]|(_d_\w+?)*:)(?=\w)")


class CompileError(RuntimeError):
    """The compiler refused; the message is one line."""


@dataclass(frozen=True)
class Compiled:
    """One variant of one kernel as it was compiled, and what its machine code costs."""

    name: str
    arch: str
    registers: int  # a thread
    spills: int  # bytes a thread, stores and loads together
    shared: int  # bytes a block
    threads: int  # a block
    serialised: bool  # warpgroup matrix instructions run one at a time (ptxas C7515)
    ir: str = field(repr=False)  # TTGIR: tiles with their layouts
    text: str = field(repr=False)  # PTX or AMD assembly
    binary: bytes = field(repr=False)

    @property
    def shared_is_there(self) -> bool:
        """Whether the chip has as much shared memory as a block takes."""
        return self.shared <= TARGETS[self.arch].shared_memory

    @cached_property
    def instructions(self) -> Counter[str]:
        """Machine instructions by name, as they stand in the code (a loop's body counts once)."""
        if self.arch.startswith("gfx"):
            return Counter(re.findall(r"^\s+([a-z]+_[a-z0-9_]+)", self.text, re.MULTILINE))
        return Counter(re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)", self.sass))

    @cached_property
    def sass(self) -> str:
        """The machine code of an NVIDIA chip, disassembled."""
        return disassembled(self.binary)

    def count(self, prefix: str) -> int:
        """How many instructions begin with `prefix`: `LDG`, `STG.E.128`, `FFMA`, `buffer_load` …"""
        return sum(n for name, n in self.instructions.items() if name.startswith(prefix))


def gpu_target(arch: str) -> GPUTarget:
    """Triton's name for one of the chips of `TARGETS`."""
    if arch not in TARGETS:
        raise ValueError(f"arch is {arch!r}; it should be one of {', '.join(TARGETS)}")
    if arch.startswith("gfx"):
        return GPUTarget("hip", arch, TARGETS[arch].warp)
    return GPUTarget("cuda", int(arch.removeprefix("sm_")), TARGETS[arch].warp)


def compile_for(
    function: Any,
    signature: Mapping[str, str | tuple],
    constants: Mapping[str, Any],
    arch: str,
    *,
    divisible: Collection[str] = (),
    num_warps: int = 4,
    num_stages: int | None = None,
    maxnreg: int | None = None,
    **options: Any,
) -> Compiled:
    """Compile a `triton.jit` or `gluon.jit` function for `arch`.

    `signature` gives the type of each runtime argument (`*bf16`, `*fp8e4nv`, `i32`, `fp32`, `tensordesc<...>`), of a tuple the
    types in it, with `constexpr` for what is constant; `constants` the value of every other one: constexprs, injected functions,
    `None` for an absent pointer, 1 for an integer that is specialised to it. `divisible` names the pointers and integers that are
    multiples of 16. What lies in a tuple is named `WAY.codes` or `SOURCE.0`. `options` go to the backend.
    """
    source = _source(function, signature, constants, divisible)
    chosen = _options(arch, num_warps=num_warps, num_stages=num_stages, maxnreg=maxnreg, **options)
    kernel, log = _compile(source, arch, chosen)
    if gpu_target(arch).backend == "hip":
        return _from_amd(kernel, arch)
    return Compiled(
        name=source.name,
        arch=arch,
        registers=max(map(int, re.findall(r"Used (\d+) registers", log)), default=0),
        spills=sum(map(int, re.findall(r"(\d+) bytes spill (?:stores|loads)", log))),
        shared=kernel.metadata.shared,
        threads=_threads(kernel),
        serialised="C7515" in log or "serialized" in log,
        ir=kernel.asm["ttgir"],
        text=kernel.asm["ptx"],
        binary=kernel.asm["cubin"],
    )


def fingerprint(
    function: Any,
    signature: Mapping[str, str | tuple],
    constants: Mapping[str, Any],
    arch: str,
    *,
    divisible: Collection[str] = (),
    **options: Any,
) -> str:
    """Sixteen hexadecimal digits of all that the machine code of `compile_for` follows from: the function as Triton has read it,
    the options, the chip and the release of Triton. Comments, lines and where functions are kept do not count.

    Only Triton's front end runs, about a tenth of a compilation; what it refuses raises as there.
    """
    source, target = _source(function, signature, constants, divisible), gpu_target(arch)
    backend = make_backend(target)
    with _captured() as (_, errors):
        try:
            parsed = backend.parse_options({**_options(arch, **options), **source.parse_options()})
            context = ir.context()
            ir.load_dialects(context)
            backend.load_dialects(context)
            parts = parsed, backend.get_codegen_implementation(parsed), backend.get_module_map(), context
            text = source.make_ir(target, *parts).str_nodebug()
        except Exception as error:
            errors.seek(0)
            raise CompileError(f"{source.name} for {arch}: {_reason(error, errors.read())}") from error
    # The paths of libraries are this machine's
    settled = sorted((k, str(v)) for k, v in vars(parsed).items() if k != "extern_libs")
    text = _MODULES.sub("", text)
    return hashlib.sha256(f"{triton.__version__} {target} {settled}\n{text}".encode()).hexdigest()[:16]


def _options(
    arch: str, *, num_warps: int = 4, num_stages: int | None = None, maxnreg: int | None = None, **options: Any
) -> dict[str, Any]:
    """The options that the backend of a chip is given."""
    chosen: dict[str, Any] = {"num_warps": num_warps, **triton_versions.COMPILED_WITH, **options}
    if num_stages is not None:
        chosen["num_stages"] = num_stages
    if maxnreg is not None and not arch.startswith("gfx"):
        chosen["maxnreg"] = maxnreg
    return chosen


def _source(
    function: Any, signature: Mapping[str, str | tuple], constants: Mapping[str, Any], divisible: Collection[str]
) -> ASTSource:
    if not hasattr(function, "is_gluon"):
        kind = type(function).__name__
        raise TypeError(
            f"function is a {kind}; it should be a compiled kernel (is TRITON_INTERPRET set in this process?)"
        )
    names = function.arg_names
    inner = {
        label: (at, *path)
        for at, name in enumerate(names)
        for path, label in labels(name, signature.get(name, "constexpr")).items()
    }
    unknown = sorted((set(signature) - set(names)) | (set(constants) | set(divisible)) - set(inner))
    missing = [name for name in names if name not in signature and name not in constants]
    twice = sorted(set(signature) & set(constants))
    for problem, which in (
        ("does not take", unknown),
        ("needs a type or a value for", missing),
        ("has both for", twice),
    ):
        if which:
            raise ValueError(f"{function.__name__} {problem} {', '.join(which)}")
    types = {name: "constexpr" if name in constants else signature[name] for name in names}
    attributes = {inner[name]: [["tt.divisibility", 16]] for name in inner if name in divisible}
    values = {inner[name]: value for name, value in constants.items()}
    source = triton_versions.GluonASTSource if function.is_gluon() else ASTSource
    return source(fn=function, signature=types, constexprs=values, attrs=attributes)


@contextlib.contextmanager
def _captured() -> Iterator[tuple[io.StringIO, Any]]:
    """Captures what the compiler prints: Python's part on sys.stdout, MLIR's on the process's own standard error."""
    out = io.StringIO()
    with tempfile.TemporaryFile("w+", errors="replace") as errors:
        saved = os.dup(2)
        os.dup2(errors.fileno(), 2)
        try:
            with contextlib.redirect_stdout(out):
                yield out, errors
        finally:
            os.dup2(saved, 2)
            os.close(saved)


def _compile(source: ASTSource, arch: str, options: dict[str, Any]) -> tuple[Any, str]:
    """The kernel, and what the assembler said about it."""
    target = gpu_target(arch)
    with _captured() as (out, errors), knobs.nvidia.scope(), knobs.compilation.scope():
        knobs.nvidia.dump_ptxas_log = True
        try:
            kernel = triton.compile(source, target=target, options=options)
            beside = get_cache_manager(kernel.hash)
            stored = beside.get_file(_LOG)
            if target.backend == "cuda" and stored is None and "Used" not in out.getvalue():
                # Compiled before by somebody who did not keep the report.
                knobs.compilation.always_compile = True
                kernel = triton.compile(source, target=target, options=options)
        except Exception as error:
            errors.seek(0)
            raise CompileError(f"{source.name} for {arch}: {_reason(error, errors.read())}") from error
        log = out.getvalue() if stored is None else Path(stored).read_text()
        if stored is None:
            beside.put(log, _LOG, binary=False)
    return kernel, log


def _reason(error: Exception, printed: str) -> str:
    """The one line that says what is wrong."""
    lines = [line.strip() for line in f"{printed}\n{error}".splitlines()]
    for mark in ("fatal   :", "error   :", "error:", "Error", "not supported", "Unsupported"):
        for line in lines:
            if mark in line:
                return re.sub(r"^\S*?:\d+:\d+: ", "", line)
    text = [line for line in lines if line and set(line) != {"^"}]
    return f"{type(error).__name__}: {text[-1] if text else 'no message'}"


def _threads(kernel: Any) -> int:
    stated = re.search(r"\.reqntid (\d+)", kernel.asm.get("ptx", ""))
    return int(stated.group(1)) if stated else kernel.metadata.num_warps * kernel.metadata.target.warp_size


def _from_amd(kernel: Any, arch: str) -> Compiled:
    text = kernel.asm["amdgcn"]

    def stated(key: str) -> int:
        return max(map(int, re.findall(rf"\.{key}:\s*(\d+)", text)), default=0)

    return Compiled(
        name=kernel.name,
        arch=arch,
        registers=stated("vgpr_count"),
        spills=4 * (stated("vgpr_spill_count") + stated("sgpr_spill_count")),
        shared=kernel.metadata.shared,
        threads=_threads(kernel),
        serialised=False,
        ir=kernel.asm["ttgir"],
        text=text,
        binary=kernel.asm["hsaco"],
    )
