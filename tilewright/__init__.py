"""tilewright: GPU kernels in Triton and Gluon for training and running large language models.

Every op is a function here: `import tilewright as tw; y = tw.rms_norm(x, weight)`. Names are loaded on first use; importing
does no GPU work.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

from .names import NAMES, OPS

__version__ = "0.1.0"
FOLDERS = ("aten", "nn")  # which are public as they are
EXTRAS = ("jax",)  # likewise, where the package that each is for is installed


class Package(ModuleType):
    """A folder may have the name of an op: importing it does not put it in the op's place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if not (name in OPS and isinstance(value, ModuleType)):
            super().__setattr__(name, value)


sys.modules[__name__].__class__ = Package


def __getattr__(name: str) -> Any:
    if name in FOLDERS or name in EXTRAS:
        value = importlib.import_module(f"{__name__}.{name}")
    elif name in NAMES:
        value = getattr(importlib.import_module(f"{__name__}.{NAMES[name]}"), name)
    elif name in OPS:
        value = declaration(name).function
    elif name in _declared():
        return _declared()[name].function  # somebody's own op, which may be taken away again: it is not kept
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{_meant(name)}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *NAMES, *FOLDERS, *OPS, *_declared()})  # of extras only what has been loaded


def _meant(name: str) -> str:
    """The public names that are nearly this one, as the end of an error message."""
    if name.startswith("_"):
        return ""  # what Python itself asks every module for
    import difflib

    near = difflib.get_close_matches(name, [*NAMES, *OPS, *_declared()], n=3)
    return f": did you mean {' or '.join(near)}?" if near else ""


def _declared() -> dict[str, Any]:
    """The ops that have been declared so far, by name; nothing is loaded for it."""
    core = sys.modules.get(f"{__name__}.op")
    return {} if core is None else core.OPS


def declaration(name: str) -> Any:
    """The declaration of one op, from its module alone."""
    importlib.import_module(f"{__name__}.{OPS[name]}")
    return _declared()[name]


def catalogue() -> dict[str, Any]:
    """Every declared op by name."""
    for module in OPS.values():
        importlib.import_module(f"{__name__}.{module}")
    return _declared()
