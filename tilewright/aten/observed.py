"""Which of torch's operators a program calls, how often, and which of these calls would be ours in mode "auto".

    with tw.aten.observe() as calls:
        step()
    print(calls)  # a table: kinds of call, how many, whose they would be
    tw.aten.enable(observed=calls)

Counting slows every operator down: it is for one step. `calls.save(path)` keeps the counts as JSON, `observed=` takes such a file,
and the counts of several ranks add up with `+`.
"""

from __future__ import annotations

import json
import warnings
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ..core.target import INTERPRETING
from ..runtime.config import LONGEST
from . import table
from .row import Declined
from .signature import Signature, signature_of, tensors_of
from .table import name_of
from .verdicts import Place, Verdicts

SCHEMA = "tilewright aten calls 1"
COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd


def flash_attention(
    query: Tensor, key: Tensor, value: Tensor, dropout_p: float = 0.0, is_causal: bool = False, return_debug_mask: bool = False,
    *, scale: float | None = None,
) -> tuple[tuple, dict[str, Any]]:  # fmt: skip
    """What torch's kernel for flash attention hands on: heads after tokens, and how many of these there are."""
    q, k, v = (t.transpose(1, 2) for t in (query, key, value))
    return (q, k, v, None, None, q.shape[1], k.shape[1], dropout_p, is_causal, return_debug_mask), {"scale": scale}


# Calls that torch's kernels make of replaced overloads in C++, where no dispatch mode sees them, though a replacement is asked: by
# the overload that is seen, the one that it calls, and this one's arguments
INSIDE: dict[str, tuple[str, Callable[..., tuple[tuple, dict[str, Any]]]]] = {
    "_scaled_dot_product_flash_attention": ("_flash_attention_forward", flash_attention),
}


class Calls:
    """Calls that a program made on one GPU, by kind; bytes of a kind are rounded down to a power of two. `others` are those of
    operators that there is no replacement for, by name."""

    def __init__(
        self, gpu: str, counts: Mapping[Signature, int] | None = None, others: Mapping[str, int] | None = None
    ) -> None:
        self.gpu, self.counts, self.others = gpu, Counter(counts), Counter(others)

    def __add__(self, other: Calls) -> Calls:
        if self.gpu != other.gpu:
            raise ValueError(f"aten: calls on {self.gpu} and on {other.gpu} do not add up")
        return Calls(self.gpu, self.counts + other.counts, self.others + other.others)

    def note(self, overload: Any, args: Any, kwargs: Any) -> None:
        name = name_of(overload)
        if name in INSIDE:
            name, inner = INSIDE[name]
            args, kwargs = inner(*args, **kwargs)
        if name not in table.FORMS:
            self.others[name] += 1
            return
        call = signature_of(name, args, kwargs)
        self.counts[call._replace(bytes=1 << (call.bytes.bit_length() - 1) if call.bytes else 0)] += 1

    def rows(self) -> list[dict[str, Any]]:
        """A row for each kind of call, the most frequent first: whose it would be in mode "auto", if aten's why, and what all of
        them would gain."""
        verdicts = Verdicts.here()
        chosen = verdicts.chosen(self.counts)
        lost = (
            "other calls would lose more by falling back"
            if verdicts.fallback_us is not None
            else "falling back is not measured"
        )
        made = []
        for call, count in sorted(self.counts.items(), key=lambda one: (-one[1], one[0])):
            gain = 0.0
            try:
                us = verdicts.gain(call)
                gain, whose = (us, "ours") if call.overload in chosen else (0.0, f"aten's: {lost}")
            except Declined as why:
                whose = f"aten's: {why}"
            made.append({**call._asdict(), "calls": count, "whose": whose, "gain_us": round(count * gain, 1)})
        return made

    def __str__(self) -> str:
        """The rows as a table."""
        heads = ("overload", "dtype", "layout", "bytes", "calls", "gain_us", "whose")
        lines = [heads, *([str(row[name]) for name in heads] for row in self.rows())]
        widths = [max(map(len, column)) for column in zip(*lines)]
        table = ["  ".join(cell.ljust(n) for cell, n in zip(line, widths)).rstrip() for line in lines]
        rest = f"{sum(self.others.values())} calls of {len(self.others)} operators that have no replacement"
        return "\n".join([*table, rest])

    def save(self, path: str | Path) -> None:
        calls = [[*call, count] for call, count in sorted(self.counts.items())]
        made = {"schema": SCHEMA, "gpu": self.gpu, "calls": calls, "others": dict(sorted(self.others.items()))}
        Path(path).write_text(json.dumps(made) + "\n")

    @staticmethod
    def load(path: str | Path) -> Calls:
        """What `save` wrote. Raises `ValueError` for anything else."""
        try:
            with Path(path).open("rb") as file:
                text = file.read(LONGEST)
        except IsADirectoryError as error:
            raise ValueError(f"aten: {path} is a folder, and no file of calls") from error
        try:
            made = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"aten: {path} is not JSON") from error
        if not isinstance(made, dict) or made.get("schema") != SCHEMA:
            raise ValueError(f"aten: {path} does not hold calls that `tw.aten.observe` counted")
        calls, others = made.get("calls"), made.get("others")
        if not (isinstance(made.get("gpu"), str) and isinstance(calls, list) and all(map(is_call, calls))):
            raise ValueError(f"aten: {path} is damaged: it has a call that is none")
        if not (isinstance(others, dict) and all(type(n) is int for n in others.values())):
            raise ValueError(f"aten: {path} is damaged: its other calls are no counts")
        return Calls(made["gpu"], {Signature(*call[:4]): call[4] for call in calls}, others)


def is_call(row: Any) -> bool:
    return (
        isinstance(row, list) and [type(value) for value in row] == [str, str, str, int, int] and min(row[3:]) >= 0
    )  # fmt: skip


def calls_of(given: Calls | str | Path, gpu: str) -> Calls:
    """Calls for `observed=`, which must be of this GPU. Names that torch does not define, or no replacement has, are left out."""
    if not isinstance(given, (Calls, str, Path)):
        raise ValueError(
            f"aten: observed must be what `tw.aten.observe` counted, or a file of it, got {type(given).__name__}"
        )
    calls = given if isinstance(given, Calls) else Calls.load(given)
    if calls.gpu != gpu:
        raise ValueError(f"aten: observed is of {calls.gpu}, and this is {gpu}")
    unknown = sorted({call.overload for call in calls.counts} - table.FORMS.keys())
    if unknown:
        warnings.warn(f"aten: observed has calls of {', '.join(unknown)}, which are left out", stacklevel=4)
    return Calls(calls.gpu, {call: n for call, n in calls.counts.items() if call.overload in table.FORMS}, calls.others)


class observe(TorchDispatchMode):
    """`with tw.aten.observe() as calls:` counts the calls of torch's operators inside, on a GPU where there is one."""

    def __init__(self) -> None:
        super().__init__()
        self.kind = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
        self.key = getattr(torch._C.DispatchKey, self.kind.upper())
        self.within: set[Any] = set()  # composites that are being taken apart
        self.calls = Calls(Place.here().gpu)

    def __enter__(self) -> Calls:
        super().__enter__()
        return self.calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace != "aten":
            return func(*args, **kwargs)
        if self.leaves(func):  # count what it calls, which is what a replacement is of
            self.within.add(func)
            try:
                with self:
                    return func._op_dk(COMPOSITE, *args, **kwargs)
            finally:
                self.within.discard(func)
        tensors = [t for value in (*args, *kwargs.values()) for t in tensors_of(value)]
        if tensors and all(is_plain(t) and t.device.type == self.kind for t in tensors[:1]):
            self.calls.note(func, args, kwargs)
        return func(*args, **kwargs)

    def leaves(self, func: Any) -> bool:
        """Whether torch makes a call of others."""
        return (
            name_of(func) not in table.FORMS
            and func not in self.within
            and func.has_kernel_for_dispatch_key(COMPOSITE)
            and not func.has_kernel_for_dispatch_key(self.key)
        )


def is_plain(t: Tensor) -> bool:
    return type(t) in (Tensor, torch.nn.Parameter)
