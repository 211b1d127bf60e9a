"""The op that CONTRIBUTING.md shows, in a family of its own that no folder of the library is."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tilewright.ops
from tilewright.op import OPS, Op

PAGE = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
FAMILY, NAME = "contributed", "squared_relu"


@contextmanager
def contributed(folder: Path) -> Iterator[Op]:
    """The op, declared from the page's own text, for as long as this lasts."""
    family = folder / FAMILY
    family.mkdir()
    (family / "__init__.py").write_text('"""Operations that somebody added."""\n')
    text = PAGE.read_text()
    (whole,) = (
        block for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL) if f'"{NAME}", reference' in block
    )
    (family / f"{NAME}.py").write_text(whole)
    package = f"tilewright.ops.{FAMILY}"
    tilewright.ops.__path__.append(str(folder))
    try:
        importlib.import_module(f"{package}.{NAME}")
        yield OPS[NAME]
    finally:
        tilewright.ops.__path__.remove(str(folder))
        OPS.pop(NAME, None)
        for module in [name for name in sys.modules if name.startswith(package)]:
            del sys.modules[module]
        vars(tilewright.ops).pop(FAMILY, None)
