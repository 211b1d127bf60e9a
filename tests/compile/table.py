"""The tables of what each compiled variant costs: a folder of sorted JSON lines, a file for each family of kernels, held by a
test.

A variant may not gain a spill, a serialised matrix instruction, more than `SLACK` registers or `SLACK_SHARED` bytes of shared
memory, nor have a reduction that Triton lowers wrongly; it may improve freely. `python -m tests.compile.test_kernels --write
[OP or FAMILY ...]` replaces rows.

A row has the fingerprint of what it was made from, Triton's front-end code. One compiler makes the same of the same, so a variant
whose fingerprint is that of its row needs no compiling to be known; and none needs reading by the front end whose kernel, with
the functions that it calls and is given, has the text that `texts.json` keeps. A few are compiled all the same, of each
kernel one for sm_90 and one for another chip at most, as are all with TILEWRIGHT_COMPILE=all and all that are new or changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import triton

from tilewright.check.variants import Variant
from tilewright.core.target import TARGETS
from tilewright.runtime.source import sources
from tilewright.toolchain import faults, registers
from tilewright.toolchain.aot import Compiled
from tilewright.toolchain.waits import unawaited

EVERY = os.environ.get("TILEWRIGHT_COMPILE") == "all"
SAMPLE = 12
SLACK = 8
SLACK_SHARED = 1024
TEXTS = Path(__file__).parent / "texts.json"
Row = dict[str, Any]
Texts = dict[str, str]  # digests by function; the kernel's own has no name
# Kernels of which Triton 3.6 makes wrong code for a chip, and that no process runs there (`toolchain/faults.py`): with their fault.
REFUSED = {"sm_100 hadamard_tiles": "reductions"}


def sampled(table: Iterable[str]) -> set[str]:
    """Of the rows of a table, the same ones every time: of each kernel that has one in SAMPLE of all rows one alone, for the chip
    of that row, so that of several chips each gets some kernels. What they show is that a kernel whose text is as it was compiles
    to what it did; of one text any variant shows it, and one with few arguments and small constants is compiled soonest."""
    names = [*table]
    chosen: dict[str, tuple[int, str]] = {}
    for name in names:
        place, kernel = zlib.crc32((name if chip_of(name) != "sm_90" else f"sm_90 {name}").encode()), kernel_of(name)
        if place % SAMPLE == 0:
            chosen[kernel] = min(chosen.get(kernel, (place, chip_of(name))), (place, chip_of(name)))
    found: dict[str, tuple[int, str]] = {}
    for name in names:
        kernel = kernel_of(name)
        if kernel in chosen and chosen[kernel][1] == chip_of(name):
            found[kernel] = min(found.get(kernel, (len(name), name)), (len(name), name))
    return {name for _, name in found.values()}


def known(one: Variant, table: Mapping[str, Row], texts: Mapping[str, Texts]) -> bool:
    """Whether the variant's row was made from what it is now. Raises CompileError if Triton cannot even read it."""
    if label(one) not in table:
        return False
    return same_text(one, texts) or one.fingerprint() == table[label(one)].get("source")


def same_text(one: Variant, texts: Mapping[str, Texts]) -> bool:
    """Whether all that the variant is made from reads as it did when the rows of its kernel were written."""
    kept = texts.get(one.kernel.name, {})
    return all(kept.get(name) == digest for name, digest in text(one).items())


def text(one: Variant) -> Texts:
    """Digests of the kernel and of the functions that the variant is given, each with all that it calls."""
    given = {f"{v.fn.__module__}.{v.fn.__name__}": v for v in _functions(one.constants.values())}
    return {"": digest(one.kernel.jit), **{name: digest(function) for name, function in given.items()}}


def _functions(values: Iterable[Any]) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _functions(value)
        elif callable(getattr(value, "fn", None)):
            yield value


@cache
def digest(function: Any) -> str:
    """Sixteen hexadecimal digits of a function's text and of those it calls, for this Triton; comments do not count."""
    lines = [triton.__version__, *sources(function)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


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


def chip_of(name: str) -> str:
    """The chip that a row is about: rows of sm_90 do not name it."""
    first = name.partition(" ")[0]
    return first if first in TARGETS else "sm_90"


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


def load_texts(path: Path = TEXTS) -> dict[str, Texts]:
    """By kernel, what its rows were made from."""
    return json.loads(path.read_text()) if path.exists() else {}


def save_texts(texts: Mapping[str, Texts], path: Path = TEXTS) -> None:
    path.write_text(json.dumps(texts, indent=1, sort_keys=True) + "\n")


def checked(
    one: Variant, table: Mapping[str, Row], texts: Mapping[str, Texts], sample: Collection[str]
) -> tuple[Row, list[str]]:
    """The row of a variant, compiled if it is new, changed or in the sample, and what is wrong with it."""
    if not EVERY and label(one) not in sample and known(one, table, texts):
        return table[label(one)], []
    compiled = one.compile()
    wrong = problems(one.name, compiled, table) if one.arch == "sm_90" else []
    wrong = [*unexpected(one, compiled), *wrong]
    if label(one) in table and same_text(one, texts) and one.fingerprint() != table[label(one)]["source"]:
        wrong.append(f"{label(one)}: changed although nothing that texts.json knows did (--write)")
    return row(compiled), wrong


def wrong_code(name: str, compiled: Compiled) -> list[str]:
    """What this release of Triton, or any of its assembler, makes wrong of a variant for NVIDIA chips (`toolchain/faults.py`)."""
    if not compiled.arch.startswith("sm_"):
        return []
    found = faults.wrong(compiled.ir, compiled.text, lambda: registers.unset(compiled.sass))
    return [f"{name}: {line}" for line in found]


def unexpected(one: Variant, compiled: Compiled) -> list[str]:
    """The same, but for what is known to be refused where it would run; and what comes too early."""
    refused = REFUSED.get(f"{one.arch} {one.kernel.name}")
    found = [line for line in wrong_code(one.name, compiled) if not refused or f"toolchain/{refused}.py" not in line]
    return [*found, *too_early(one, compiled)]


def too_early(one: Variant, compiled: Compiled) -> list[str]:
    """What a variant that begins early does before it has waited (`toolchain/waits.py`). Only the second kernel of a pair, which is
    not dependent on whatever comes before, may read before; end it may not either."""
    if not one.options.get("launch_pdl"):
        return []
    return [f"{one.name}: {line}" for line in unawaited(compiled.text, not one.constants.get("DEPENDENT", False))]


def problems(name: str, compiled: Compiled, table: Mapping[str, Row]) -> list[str]:
    """Why `compiled` is worse than its recorded row; empty if it is not."""
    out = []
    if not compiled.shared_is_there:
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
    if compiled.shared_is_there and compiled.shared > was["shared"] + SLACK_SHARED:
        out.append(f"{name}: {compiled.shared} bytes of shared memory, recorded {was['shared']}")
    return out
