"""The interpreter of these tests remembers what it has made, which halves their CPU time."""

from __future__ import annotations

from tilewright.toolchain import interpret, quicken

interpret.install()
quicken.install()
