"""Which codes of a compiled kernel ptxas takes from a register that does not hold them, or makes others of; its PTX tells.

`misplaced`: an instruction converts two numbers to FP8 codes, 16 bits. Where two such results are joined into one word, ptxas makes
the second conversion write into the register of the first. If the first result is read elsewhere as well, ptxas 12.8 and 12.9 read
a register that nothing was written to, on sm_89 and all later chips. The kernel compiles, runs and gives wrong numbers.

`narrowed`: a store of 8 or 16 bits takes the low ones of a 32-bit register. Where a floating-point instruction wrote that register,
as it does when an integer is read off the low bits of a number, ptxas 12.8 and 12.9 convert the number to an integer first, on
every chip, and store what that gives. An integer instruction in between, which LLVM cannot leave out, prevents it.
"""

from __future__ import annotations

import re
from collections import Counter

__all__ = ["misplaced", "narrowed"]

_CONVERTED = re.compile(r"cvt\.rn\.satfinite\.e[45]m[32]x2\.f32\s+(%rs\d+),")
_JOINED = re.compile(r"\{\s*(%rs\d+(?:\s*,\s*%rs\d+)+)\s*\}")
_REGISTER = re.compile(r"%rs\d+\b")
_NUMBER = re.compile(r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.]*\.f32\s+(%r\d+),", re.MULTILINE)
_NARROW = re.compile(r"\bst\.[\w.:]*\.[bus](?:8|16)\s+\[[^\]]*\],\s*(\{[^}]*\}|%r\d+)")
_WIDE = re.compile(r"%r\d+\b")


def misplaced(text: str) -> list[str]:
    """The 16-bit registers of a kernel's PTX that hold converted codes, are part of a word, and are read by others besides."""
    converted = set(_CONVERTED.findall(text))
    if not converted:
        return []
    uses, joined = Counter(_REGISTER.findall(text)), Counter()
    for group in _JOINED.findall(text):
        joined.update(_REGISTER.findall(group))
    # One more use is the conversion itself
    return [
        f"{name}: codes joined into a word and read again, which ptxas gets wrong (toolchain/conversions.py)"
        for name in sorted(converted, key=lambda name: int(name[3:]))
        if joined[name] and uses[name] > joined[name] + 1
    ]


def narrowed(text: str) -> list[str]:
    """The 32-bit registers of a kernel's PTX that a floating-point instruction writes and a store of fewer bits takes."""
    stored = [name for taken in _NARROW.findall(text) for name in _WIDE.findall(taken)]
    numbers = set(_NUMBER.findall(text)) if stored else set()
    return [
        f"{name}: low bits of a number, which ptxas converts before it stores them (toolchain/conversions.py)"
        for name in sorted(numbers.intersection(stored), key=lambda name: int(name[2:]))
    ]
