"""What `tilewright explain aten` says: verdicts of overloads that are measured on a chip, and the rows that they are made of."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import torch

from ..aten import table, verdicts
from ..aten.row import Declined
from ..aten.signature import Signature
from ..aten.verdicts import Place, Verdicts

SEVERAL = ("flat", "turned", "strided")  # of which every tensor has the shape of the first


def places(arch: str) -> list[Verdicts]:
    """What rows of a chip say on each GPU that they are of, with the torch and the Triton that are installed."""
    rows = verdicts.table(arch)
    return [Verdicts(Place(arch, gpu), rows) for gpu in sorted({row["gpu"] for row in rows})]


def overview(arch: str, names: Collection[str]) -> list[dict[str, Any]]:
    """A row for each of these overloads that is measured, on each GPU."""
    return [
        {
            "gpu": found.place.gpu, "overload": name, "engine": table.ENGINE[name], "verdict": found.verdict(name),
            "kinds": len(found.rules[name]), "ours in some sizes": sum(rule is not None for rule in found.rules[name].values()),
            "note": found.foreign(name) or "",
        }
        for found in places(arch)
        for name in sorted(found.rules.keys() & names)
    ]  # fmt: skip


def measured(arch: str, names: Collection[str], dtype: str) -> list[dict[str, Any]]:
    """The rows of these overloads: how long either takes, and how many times as fast ours is at the least."""
    return [
        {
            **{name: row[name] for name in (*verdicts.KIND, "gpu")},
            **{
                f"{way} {what}": None if row[way] is None else row[way][what]
                for way in verdicts.WAYS
                for what in ("own", "aten", "least")
            },
            **{name: row[name] for name in ("torch", "triton", "date")},
        }
        for found in places(arch)
        for row in sorted(found.rows, key=lambda row: [row[name] for name in verdicts.KIND])
        if row["overload"] in names and is_of(row["dtype"], dtype)
    ]


def is_of(words: str, dtype: str) -> bool:
    """Whether a kind of call is of a dtype, which is that of its first tensor."""
    return not dtype or words.partition("+")[0] == dtype


def whose(arch: str, names: Collection[str], dtype: str, shape: Sequence[int]) -> list[dict[str, Any]]:
    """Of every measured kind of call of these overloads, whose a call over tensors of that shape would be if they are replaced."""
    made = []
    for found in places(arch):
        for name in sorted(found.rules.keys() & names):
            for words, layout in sorted(found.rules[name]):
                if is_of(words, dtype):
                    call = Signature(name, words, layout, bytes_of(words, layout, shape))
                    try:
                        says = f"ours, {found.gain(call):.1f} us sooner at the least"
                    except Declined as why:
                        says = f"aten's: {why}"
                    made.append(
                        {"gpu": found.place.gpu, **call._asdict(), "verdict": found.verdict(name), "whose": says}
                    )
    return made


def bytes_of(words: str, layout: str, shape: Sequence[int]) -> int:
    """Those of a call whose first tensor has that shape; of several, the others count where they are as large."""
    count, how = layout.partition(",")[0].split()
    itemsize = getattr(torch, words.partition("+")[0]).itemsize
    return math.prod(shape) * itemsize * (int(count) if how in SEVERAL else 1)
