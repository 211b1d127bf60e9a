"""Which low bits of numbers ptxas converts to integers before it stores them; its PTX tells.

A store of 8 or 16 bits takes the low ones of a 32-bit register. Where a floating-point instruction wrote that register, as it does
when an integer is read off the low bits of a number, ptxas 12.8 and 12.9 convert the number to an integer first, on every chip, and
store what that gives; 13.4 does not. An integer instruction in between, which LLVM cannot leave out, prevents it.
"""

from __future__ import annotations

import re

__all__ = ["narrowed"]

_NUMBER = re.compile(r"^\s*(?:@!?%p\d+\s+)?[a-z][\w.]*\.f32\s+(%r\d+),", re.MULTILINE)
_NARROW = re.compile(r"\bst\.[\w.:]*\.[bus](?:8|16)\s+\[[^\]]*\],\s*(\{[^}]*\}|%r\d+)")
_WIDE = re.compile(r"%r\d+\b")


def narrowed(text: str) -> list[str]:
    """The 32-bit registers of a kernel's PTX that a floating-point instruction writes and a store of fewer bits takes."""
    stored = [name for taken in _NARROW.findall(text) for name in _WIDE.findall(taken)]
    numbers = set(_NUMBER.findall(text)) if stored else set()
    return [
        f"{name}: low bits of a number, which ptxas converts before it stores them"
        for name in sorted(numbers.intersection(stored), key=lambda name: int(name[2:]))
    ]
