"""Whether programs that begin early wait before they touch memory: their PTX tells (`device/dependent.py` says why they must).

All ways through a kernel are walked from its entry to the first wait. On none of them may global memory be read or written, but for
bytes that the L2 is asked for, and none may end. A wait that only some threads come to is none.

Where warps of a program take different ways (Gluon's `warp_specialize`), all but the first four go round in a loop, in which they
meet the others at a barrier, and then do what those tell them to, or end. So a way on which there is such a barrier may end: the
program does not, until the ways are over on which it does something, and these are looked at as all others are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

__all__ = ["unawaited"]

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|^\s*\.(?:loc|file)\b[^\n]*", re.MULTILINE | re.DOTALL)
_PARTS = re.compile(r"[{};]|[^{};]+")
_LABEL = re.compile(r"\s*([\w$%.]+)\s*:(?!:)")
_GUARD = re.compile(r"@!?[\w$%]+\s+")
WAIT, MEETING = "griddepcontrol.wait", "barrier.sync"  # all other barriers are `bar.sync`, of the warps on one way
# Spaces of memory that no other launch sees, or that nobody writes
OWN = ("param", "shared", "local", "const")
ACCESS = re.compile(r"ldu?|st|atom|red|multimem|prefetchu?|discard|applypriority|tensormap")
OPAQUE = re.compile(r"call|tex|tld4|suld|sust|sured")  # a function may do anything, and our kernels have no textures


class Line(NamedTuple):
    """An instruction: its name, what follows it, whether only some threads take it, and the braces that it stands in."""

    name: str
    operands: str
    guarded: bool
    scope: tuple[int, ...]


def unawaited(text: str, early_reads: bool = False) -> list[str]:
    """A sentence for each instruction of a kernel's PTX that comes too early. `early_reads`: only ends do, as in the second kernel
    of a pair that reads what was there before the pair."""
    lines, labels = _read(text)
    found: dict[int, str] = {}
    seen: set[tuple[int, bool]] = set()
    ways = [(0, False)]
    while ways:
        at, met = ways.pop()
        if (at, met) in seen:
            continue
        seen.add((at, met))
        if at == len(lines):  # past the last instruction a kernel ends, too
            found.setdefault(at, "it ends before it waits")
            continue
        line, kind = lines[at], lines[at].name.partition(".")[0]
        if line.name == WAIT and not line.guarded:
            continue
        met |= line.name == MEETING
        if kind in ("ret", "exit") and not met:
            found[at] = "it ends before it waits"
        if _touches(line.name) and not early_reads:
            found[at] = f"{line.name} {line.operands}: before it waits"
        if kind == "brx":
            ways += [(labels[target], met) for target in _table(lines, labels, line)]
        elif kind == "bra":
            ways.append((labels[_resolved(line.operands, line.scope, labels)], met))
        if line.guarded or kind not in ("ret", "exit", "trap", "bra", "brx"):
            ways.append((at + 1, met))
    return [found[at] for at in sorted(found)]


def _touches(name: str) -> bool:
    """Whether an instruction reads or writes memory that another launch may write or read."""
    kind, *words = name.split(".")
    if kind == "cp":
        return "global" in words and "prefetch" not in words
    if kind == "prefetch" and words:
        return not (words[0] == "tensormap" or "L2" in {word.partition("::")[0] for word in words})
    own = any(word.partition("::")[0] in OWN for word in words)
    return bool(OPAQUE.fullmatch(kind) or (ACCESS.fullmatch(kind) and not own))


Labels = dict[tuple[tuple[int, ...], str], int]


def _resolved(name: str, scope: tuple[int, ...], labels: Labels) -> tuple[tuple[int, ...], str]:
    """The label that a name means inside some braces: the innermost one."""
    while (scope, name) not in labels:
        if not scope:
            raise ValueError(f"no label {name}")
        scope = scope[:-1]
    return scope, name


def _table(lines: list[Line], labels: Labels, jump: Line) -> Iterator[tuple[tuple[int, ...], str]]:
    """The labels that a jump by a table may go to."""
    table = lines[labels[_resolved(jump.operands.rpartition(",")[2].strip(), jump.scope, labels)]]
    return (_resolved(name.strip(), table.scope, labels) for name in table.operands.split(","))


def _read(text: str) -> tuple[list[Line], Labels]:
    """The instructions of the one kernel of a PTX, and where its labels are."""
    text = _COMMENT.sub("", text)
    if text.count(".entry") != 1:
        raise ValueError(f"this PTX has {text.count('.entry')} kernels, not one")
    body = text.index("{", text.index(")", text.index(".entry"))) + 1
    lines: list[Line] = []
    labels: Labels = {}
    scope: tuple[int, ...] = ()
    scopes = inside = 0  # braces of operands, as of four numbers, are no scopes
    current = ""
    for part in _PARTS.findall(text, body):
        while (label := _LABEL.match(current)) and part in ("{", "}", ";"):
            labels[scope, label[1]] = len(lines)
            current = current[label.end() :]
        if part == "{" and not current.strip():
            scopes += 1
            scope = (*scope, scopes)
        elif part == "}" and not inside:
            if not scope:
                return lines, labels
            scope = scope[:-1]
        elif part == ";":
            words = " ".join(current.split())
            guard = _GUARD.match(words)
            name, _, operands = words[guard.end() if guard else 0 :].partition(" ")
            if name and (not name.startswith(".") or name == ".branchtargets"):
                lines.append(Line(name, operands, guard is not None, scope))
            current = ""
        else:
            inside += (part == "{") - (part == "}")
            current += part
    raise ValueError("this PTX ends within a kernel")
