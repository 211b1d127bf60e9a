"""Which constants a kernel runs with: a tuned row, else the nearest tuned bucket, else the kernel's own default.

Rows are JSON lines, `{"kernel": ..., "key": {"N": 4096}, "config": {...}}`, shipped in `data/<arch>.jsonl` and, by
`tilewright tune`, in the user's cache folder. They are data: a row is believed only if its config is one of the kernel's own
candidates, so a damaged or hostile file can at worst choose another tested variant. Nothing is ever tuned during a call.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import stat
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ..core.target import Target

SHIPPED = Path(__file__).parent.parent / "data"
LONGEST = 4 * 1024 * 1024  # bytes of a tuning file that are read
Rows = dict[str, list[tuple[dict[str, int], dict[str, Any]]]]


class Tunable(Protocol):
    """What is asked of a kernel (`kernel.py`) here."""

    name: str
    tune_by: tuple[str, ...]
    default: Callable[[Any], Mapping[str, Any]]
    candidates: Callable[[Any], Any] | None


Override = Callable[[Tunable, Any], "Mapping[str, Any] | None"]
_override: ContextVar[Override | None] = ContextVar("override", default=None)


def config_for(kernel: Tunable, a: Mapping[str, Any], target: Target) -> Mapping[str, Any]:
    """The constants and launch options for one call."""
    instead = _override.get()
    if instead is not None:
        config = instead(kernel, a)
        if config is not None:
            return config
    default = kernel.default(a)
    if kernel.candidates is None or not kernel.tune_by:
        return default
    rows = table(target.arch).get(kernel.name, ())
    allowed = [dict(c) for c in kernel.candidates(a)] if rows else ()
    near = [(distance(key, a, kernel.tune_by), config) for key, config in rows if config in allowed]
    near = [(d, c) for d, c in near if d <= 1.0]  # further than a factor of two says nothing
    return min(near, key=lambda row: row[0])[1] if near else default


@contextlib.contextmanager
def overridden(instead: Override) -> Iterator[None]:
    """Ask `instead` first; None from it is the usual choice. For tuning: a plan recorded before, or inside, keeps the config
    that it was recorded with."""
    token = _override.set(instead)
    try:
        yield
    finally:
        _override.reset(token)


def distance(key: Mapping[str, int], a: Mapping[str, Any], names: tuple[str, ...]) -> float:
    """How far a row's key is from a call, in doublings of its farthest dimension."""
    if set(key) != set(names):
        return math.inf
    return max(abs(math.log2(max(1, key[n]) / max(1, int(a[n])))) for n in names)


@cache
def table(arch: str) -> Rows:
    """All rows for a chip: the shipped ones, then the user's (which win)."""
    rows: Rows = {}
    for path in (SHIPPED / f"{arch}.jsonl", folder() / f"{arch}.jsonl"):
        for kernel, key, config in read(path):
            rows.setdefault(kernel, []).insert(0, (key, config))
    return rows


def folder() -> Path:
    """Where the user's own rows live: never a shared temporary folder."""
    base = os.environ.get("TILEWRIGHT_CACHE") or os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError:  # an account without a home folder has no rows of its own
            return SHIPPED
    return Path(base) / "tilewright"


def distrusted(path: Path) -> str | None:
    """Why a file of rows is not to be read, if so."""
    info = path.stat()
    if not stat.S_ISREG(info.st_mode):  # reading a pipe would wait for ever
        return "it is not a file"
    if path.parent != SHIPPED and (info.st_uid != os.geteuid() or info.st_mode & (stat.S_IWGRP | stat.S_IWOTH)):
        return "it must belong to you and be writable by you alone"
    return None


def read(path: Path) -> list[tuple[str, dict[str, int], dict[str, Any]]]:
    """The well-formed rows of a file; anything else in it costs a warning and nothing more."""
    try:
        why = distrusted(path)
    except OSError:
        return []
    if why is not None:
        warnings.warn(f"{path} ignored: {why}", stacklevel=2)
        return []
    rows, bad = [], 0
    try:
        with path.open("rb") as file:
            text = file.read(LONGEST).decode()
    except (OSError, UnicodeDecodeError):
        text, bad = "", 1
    for line in text.splitlines():
        try:
            row = _checked(json.loads(line))
        except (ValueError, RecursionError):
            row = None
        if row is None:
            bad += 1
        else:
            rows.append(row)
    if bad:
        warnings.warn(f"{path}: {bad} damaged row(s) ignored; `tilewright tune` writes it anew", stacklevel=2)
    return rows


def _checked(row: Any) -> tuple[str, dict[str, int], dict[str, Any]] | None:
    if not isinstance(row, dict) or set(row) != {"kernel", "key", "config"} or not isinstance(row["kernel"], str):
        return None
    key, config = row["key"], row["config"]
    if not isinstance(key, dict) or not isinstance(config, dict):
        return None
    if not all(type(v) is int and 0 <= v < 2**63 for v in key.values()):
        return None
    if not all(type(v) in (int, bool, str) for v in config.values()):
        return None
    return row["kernel"], key, config
