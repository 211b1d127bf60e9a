"""Wrong code that compilers are known to make: found in what was compiled, before it runs.

`core/triton_versions.py` says which releases have which fault and how that is known; a module here finds each in what was
compiled: `reductions.py` in TTGIR, `conversions.py` and `stores.py` in PTX, `registers.py` in machine code. The compile net asks of
the variants that it draws, and a process of every variant that it loads, once: scanning text takes milliseconds. Only `registers`
needs a disassembler, which takes most of a second, and is asked of products by warpgroups alone; its verdict is kept beside the
binary in Triton's cache.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import triton
from triton.runtime.cache import get_cache_manager

from ..core import triton_versions
from . import registers
from .conversions import misplaced
from .disassembler import TOOL, disassembled
from .reductions import misread
from .stores import narrowed

__all__ = ["MiscompiledError", "refuse", "unread", "wrong"]

KEPT = "tilewright.registers.json"
SCHEMA = (
    1  # {"schema": 1, "rule": digest of registers.py, "binary": digest of what was disassembled, "found": sentences}
)


class MiscompiledError(RuntimeError):
    """A kernel was compiled to code that gives wrong numbers, and is not run."""


def wrong(ir: str, text: str, unset: Callable[[], list[str]], ptxas: str | None = None) -> list[str]:
    """One sentence for each place where a kernel's TTGIR, its PTX or its machine code, which `unset` reads, has a fault of this
    Triton and of this ptxas, or of any where that is not named."""
    found = looks(ir, text, unset, ptxas)
    return [f"{line} (toolchain/{fault}.py)" for fault, look in found.items() for line in look()]


def looks(ir: str, text: str, unset: Callable[[], list[str]], ptxas: str | None) -> dict[str, Callable[[], list[str]]]:
    """By fault, what looks for it; faults that are not to be feared are left out."""
    every = {
        "reductions": lambda: misread(ir),
        "conversions": lambda: misplaced(text),
        "stores": lambda: narrowed(text),
        "registers": lambda: unset() if "wgmma" in text else [],
    }
    return {fault: look for fault, look in every.items() if triton_versions.has_fault(fault, ptxas)}


def refuse(name: str, compiled: Any) -> None:
    """Raise if a kernel of this name that Triton has compiled for a chip of NVIDIA's is wrong."""
    if "cubin" not in compiled.asm:
        return
    arch = compiled.metadata.target.arch
    ptxas = triton_versions.assembler(arch)
    found = looks(compiled.asm["ttgir"], compiled.asm["ptx"], lambda: unset(compiled), ptxas)
    for fault, look in found.items():
        try:
            lines = look()
        except Exception as error:  # what cannot be read may be right: nothing is known against it
            text = f"{name}: triton {triton.__version__} is known for wrong code, and this could not be read: {error}"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
            continue
        if lines:
            more = f", and {len(lines) - 1} more" if lines[1:] else ""
            raise MiscompiledError(
                f"{name} is not run: {maker(fault, ptxas)} made wrong code of it for sm_{arch}: {lines[0]}{more}"
                f" (toolchain/{fault}.py). {way_out(fault)}"
            )


def maker(fault: str, ptxas: str | None) -> str:
    """The tool that has a fault, with its release."""
    own = f"triton {triton.__version__}"
    return own if triton_versions.FAULTS[fault].tool == "triton" else f"the ptxas ({ptxas or 'unknown'}) of {own}"


def way_out(fault: str) -> str:
    """What helps against a fault."""
    tool, mended, _ = triton_versions.FAULTS[fault]
    if mended is None:
        return f"No {tool} is known to be right: call with another format, dtype or size, and report this line"
    release = ".".join(map(str, mended))
    return (
        f"Install triton {release} or later"
        if tool == "triton"
        else f"Install a triton whose {tool} is {release} or later"
    )


# ---------------------------------------------------------------- machine code


def unread(ptxas: str | None) -> str | None:
    """Why machine code that this ptxas makes is not looked at although it may be wrong; None if it is, or need not be."""
    if not triton_versions.has_fault("registers", ptxas) or TOOL.is_file():
        return None
    return "this Triton comes without nvdisasm, by which machine code is read"


def unset(compiled: Any) -> list[str]:
    """What `registers.unset` finds in a compiled kernel, now or when its binary was looked at first; nothing where it cannot look,
    which `tilewright doctor` says."""
    if not TOOL.is_file():
        return []
    binary = compiled.asm["cubin"]
    key = {"schema": SCHEMA, "rule": _digest(Path(registers.__file__).read_bytes()), "binary": _digest(binary)}
    beside = get_cache_manager(compiled.hash)
    found = _kept(beside.get_file(KEPT), key)
    if found is None:
        found = registers.unset(disassembled(binary))
        with contextlib.suppress(OSError, RuntimeError):  # where a cache cannot be written the next process looks again
            beside.put(
                json.dumps({**key, "found": found}), KEPT, binary=False
            )  # to a file of its own, and then renamed
    return found


def _kept(path: str | None, key: dict[str, Any]) -> list[str] | None:
    """The verdict of a file that is of this key; None if there is none."""
    try:
        row = json.loads(Path(path).read_text()) if path else None
    except (OSError, ValueError):
        return None
    if not isinstance(row, dict) or row.keys() != {*key, "found"} or any(row[name] != key[name] for name in key):
        return None
    found = row["found"]
    return found if isinstance(found, list) and all(isinstance(line, str) for line in found) else None


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
