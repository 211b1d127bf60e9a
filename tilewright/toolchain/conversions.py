"""Which FP8 codes of a compiled kernel ptxas takes from a register that does not hold them; its PTX tells.

An instruction converts two numbers to FP8 codes, 16 bits. Where two such results are joined into one word, ptxas makes
the second conversion write into the register of the first. If the first result is read elsewhere as well, ptxas 12.8, 12.9 and
13.4 read a register that nothing was written to, on sm_89 and all later chips. The kernel compiles, runs and gives wrong numbers.
Single bytes of results that are stored together are not joined so.
"""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["misplaced"]

_CONVERTED = re.compile(r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32\s+(%rs\d+),")
_JOINED = re.compile(r"\{\s*(%rs\d+(?:\s*,\s*%rs\d+)+)\s*\}")
_REGISTER = re.compile(r"%rs\d+\b")


def misplaced(text: str) -> list[str]:
    """The 16-bit registers of a kernel's PTX that hold converted codes, are part of a word, and are read by others besides."""
    converted = set(_CONVERTED.findall(text))
    if not converted:
        return []
    uses, joined = Counter(_REGISTER.findall(text)), Counter()
    for group in _JOINED.finditer(text):
        begin = max(text.rfind(mark, 0, group.start()) for mark in ";\n")  # of the instruction
        if ".b8" not in text[begin : group.start()]:
            joined.update(_REGISTER.findall(group[1]))
    # One more use is the conversion itself
    return [
        f"{name}: codes joined into a word and read again, which ptxas gets wrong"
        for name in sorted(converted, key=lambda name: int(name[3:]))
        if joined[name] and uses[name] > joined[name] + 1
    ]
