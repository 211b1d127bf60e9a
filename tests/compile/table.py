"""The table of what each compiled variant costs, kept as sorted JSON lines and held by a test.

A variant may not gain a spill, a serialised matrix instruction, more than `SLACK` registers or `SLACK_SHARED` bytes of shared
memory; it may improve freely. `python -m tests.compile.test_kernels --write` replaces it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.core.aot import Compiled

SLACK = 8
SLACK_SHARED = 1024
Row = dict[str, Any]


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
