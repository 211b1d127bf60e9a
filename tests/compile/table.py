"""The table of what each compiled variant costs, kept as sorted JSON lines and held by a test.

A variant may not gain a spill, a serialised matrix instruction, more than `SLACK` registers or `SLACK_SHARED` bytes of shared
memory; it may improve freely. `python -m tests.compile.test_kernels --write` replaces it.

A row has the fingerprint of what it was made from. One compiler makes the same of the same, so a variant whose fingerprint
is that of its row needs no compiling to be known; one in `SAMPLE` is compiled all the same, as are all with
TILEWRIGHT_COMPILE=all and all that are new or changed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.check.variants import Variant
from tilewright.toolchain.aot import Compiled

EVERY = os.environ.get("TILEWRIGHT_COMPILE") == "all"
SAMPLE = 12
SLACK = 8
SLACK_SHARED = 1024
Row = dict[str, Any]


def sampled(one: Variant) -> bool:
    """One in SAMPLE, the same ones every time."""
    return EVERY or zlib.crc32(f"{one.arch} {one.name}".encode()) % SAMPLE == 0


def known(one: Variant, table: Mapping[str, Row]) -> bool:
    """Whether the variant's row was made from what it is now. Raises CompileError if Triton cannot even read it."""
    return label(one) in table and one.fingerprint() == table[label(one)].get("source")


def label(one: Variant) -> str:
    """What a row is called: the table of sm_90 has that chip alone."""
    return one.name if one.arch == "sm_90" else f"{one.arch} {one.name}"


def row(compiled: Compiled) -> Row:
    """What is kept of one variant."""
    return {
        "registers": compiled.registers,
        "spills": compiled.spills,
        "shared": compiled.shared,
        "serialised": compiled.serialised,
    }


def load(path: Path) -> dict[str, Row]:
    """The recorded rows by variant name."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return {r.pop("variant"): r for r in rows}


def save(path: Path, rows: Mapping[str, Row]) -> None:
    """Replace the table."""
    lines = [json.dumps({"variant": name, **rows[name]}) for name in sorted(rows)]
    path.write_text("".join(line + "\n" for line in lines))


def problems(name: str, compiled: Compiled, table: Mapping[str, Row]) -> list[str]:
    """Why `compiled` is worse than its recorded row; empty if it is not."""
    out = []
    if not compiled.fits:
        out.append(f"{name}: {compiled.shared} bytes of shared memory do not exist on {compiled.arch}")
    if name not in table:
        return [*out, f"{name}: no recorded row (python -m tests.compile.test_kernels --write)"]
    was = table[name]
    if compiled.spills > was["spills"]:
        out.append(f"{name}: spills {compiled.spills} bytes, recorded {was['spills']}")
    if compiled.registers > was["registers"] + SLACK:
        out.append(f"{name}: {compiled.registers} registers, recorded {was['registers']}")
    if compiled.serialised and not was["serialised"]:
        out.append(f"{name}: matrix instructions became serialised")
    if compiled.fits and compiled.shared > was["shared"] + SLACK_SHARED:
        out.append(f"{name}: {compiled.shared} bytes of shared memory, recorded {was['shared']}")
    return out
