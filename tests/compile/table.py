"""The tables of what each compiled variant costs: a folder of sorted JSON lines, a file for each family of kernels, held by a
test.

A variant may not gain a spill, a serialised matrix instruction, more than `SLACK` registers or `SLACK_SHARED` bytes of shared
memory; it may improve freely. `python -m tests.compile.test_kernels --write [OP or FAMILY ...]` replaces rows.

A row has the fingerprint of what it was made from. One compiler makes the same of the same, so a variant whose fingerprint
is that of its row needs no compiling to be known; one in `SAMPLE` is compiled all the same, as are all with
TILEWRIGHT_COMPILE=all and all that are new or changed.
"""

from __future__ import annotations

import json
import os
import zlib
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tilewright.check.variants import Variant
from tilewright.core.target import TARGETS
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


def kernel_of(name: str) -> str:
    """The kernel that a row is about: the first word of its name that is not a chip."""
    first, _, rest = name.partition(" ")
    return rest.partition(" ")[0] if first in TARGETS else first


def load(folder: Path) -> dict[str, Row]:
    """The recorded rows of all families by variant name."""
    rows = [json.loads(line) for path in sorted(folder.glob("*.jsonl")) for line in path.read_text().splitlines()]
    return {r.pop("variant"): r for r in rows}


def save(folder: Path, rows: Mapping[str, Row], families: Mapping[str, str]) -> None:
    """Replace the tables of a folder; `families` says which file the rows of a kernel go to."""
    lines: dict[str, list[str]] = defaultdict(list)
    for name in sorted(rows):
        lines[families[kernel_of(name)]].append(json.dumps({"variant": name, **rows[name]}))
    folder.mkdir(exist_ok=True)
    for path in folder.glob("*.jsonl"):
        if path.stem not in lines:
            path.unlink()
    for family, own in lines.items():
        (folder / f"{family}.jsonl").write_text("".join(line + "\n" for line in own))


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
