"""Which uniform registers of a compiled kernel are read although nothing wrote them.

A warpgroup's product finds its factors by descriptors in uniform registers: the tile's place in shared memory, and how it is laid
out. Where tiles of two layouts have the same place at different times, ptxas 12.8 may make the second descriptor by adding to a
register that it never set. The kernel compiles, runs and multiplies whatever lies there; only its machine code tells.
"""

from __future__ import annotations

import re
from typing import NamedTuple

__all__ = ["unset"]

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)\s*([^;]*);")
_LABEL = re.compile(r"^\s*(\.L_\w+):")
_REGISTER = re.compile(r"\bUR(\d+)\b")
_DESCRIPTORS = re.compile(r"gdesc\[UR(\d+)\]")
_TARGET = re.compile(r"`\((\.L_\w+)\)")
_ANYWHERE = {"BRX", "BRXU", "JMX", "BSYNC", "RET"}  # jumps whose targets stand in registers
_LAST = {"EXIT", "BRA", "BRX", "BRXU", "JMX", "RET"}
_STORES = ("UTMA", "UBLK", "UST")  # their first operand is an address


class Instruction(NamedTuple):
    text: str
    reads: frozenset[int]
    writes: frozenset[int]
    nexts: tuple[int, ...]


def unset(sass: str) -> list[str]:
    """The instructions of a kernel's disassembly that read a uniform register which no way to them writes."""
    code = _code(sass)
    if not code:
        return []
    reached: dict[int, frozenset[int]] = {0: frozenset()}  # what may have been written before each instruction
    waiting = [0]
    while waiting:
        at = waiting.pop()
        written = reached[at] | code[at].writes
        for following in code[at].nexts:
            joined = written | reached.get(following, frozenset())
            if joined != reached.get(following):
                reached[following] = joined
                waiting.append(following)
    found = ((one, sorted(one.reads - reached[at])) for at, one in enumerate(code) if at in reached)
    return [f"{one.text}: UR{missing[0]} is read and was never written" for one, missing in found if missing]


def _code(sass: str) -> list[Instruction]:
    lines: list[tuple[str, str, list[str], bool]] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(lines)
        elif found := _INSTRUCTION.search(line):
            guard, name, operands = found.groups()
            lines.append(
                (" ".join(found[0].split()), name, [o.strip() for o in operands.split(",")], guard is not None)
            )
    found = []
    for at, (text, name, operands, guarded) in enumerate(lines):
        kind = name.split(".")[0]
        result = 1 if kind == "ELECT" and len(operands) > 1 else 0  # after the lane's own predicate
        writes = _written(name, operands[result])
        reads = frozenset(n for i, o in enumerate(operands) if i != result or not writes for n in _read(o, i))
        target = _TARGET.search(operands[-1])
        nexts = {labels[target[1]]} if target and target[1] in labels else set()
        nexts |= {*labels.values()} if kind in _ANYWHERE else set()
        # A guard may also be the first of two operands: BRA !UP0, `(.L_1)
        conditional = guarded or (len(operands) > 1 and kind != "RET")
        if kind not in _LAST or conditional:
            nexts.add(at + 1)
        found.append(Instruction(text, reads, writes, tuple(n for n in nexts if n < len(lines))))
    return found


def _written(name: str, first: str) -> frozenset[int]:
    register = re.fullmatch(r"UR(\d+)", first)
    if register is None or name.startswith(_STORES):
        return frozenset()
    count = 4 if ".128" in name else 2 if ".64" in name or "WIDE" in name else 1
    return frozenset(range(int(register[1]), int(register[1]) + count))


def _read(operand: str, at: int) -> list[int]:
    """The uniform registers of an operand. Four make the descriptors of both factors; the first two are of no meaning where the
    first factor is in the threads' registers, and so the descriptors are not the operand after the sums."""
    if found := _DESCRIPTORS.search(operand):
        first = int(found[1])
        return [first + i for i in ((0, 1, 2, 3) if at == 1 else (2, 3))]
    return [int(n) for n in _REGISTER.findall(operand)]
