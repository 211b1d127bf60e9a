"""The disassembler that Triton brings, by which machine code of NVIDIA's chips can be read."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import triton

__all__ = ["TOOL", "disassembled"]

TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"


def disassembled(binary: bytes) -> str:
    """The machine code of a kernel, a line an instruction. Raises OSError where the disassembler is not there or does not run, and
    CalledProcessError where it does not know the binary."""
    with tempfile.TemporaryDirectory() as folder:
        cubin = Path(folder) / "kernel.cubin"
        cubin.write_bytes(binary)
        return subprocess.run([TOOL, "-c", cubin], capture_output=True, text=True, check=True).stdout
