"""The table of `gemm/choice.py`, from the evidence: every recorded product that our kernels and cuBLASLt made in one run.

`python3 -m tilewright.bench.choose` writes `data/choice_<arch>.jsonl` anew for each chip that there is evidence of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..gemm import choice
from ..gemm.library import RECIPES
from ..gemm.scaled_mm import PAIRS
from . import evidence
from .cases import CASES, Case

PLAIN = {"bfloat16": "bf16", "float16": "fp16"}


def pair_of(case: Case) -> str | None:
    """The name under which `choice.py` knows a case's operands; None if the case does not say which of two is faster."""
    if not case.ours or case.direction != "forward":
        return None
    if case.op == "matmul":
        return PLAIN.get(case.dtype) if case.options.get("kind", "float") == "float" else None
    if case.op != "scaled_mm" or "pair" not in case.options:
        return None
    *kinds, first, second = PAIRS[case.options["pair"]]
    pair = RECIPES.get((first, second)) if {*kinds} <= {"e4m3", "e5m2"} else None
    fast = "fast" in (case.options.get("accumulate"), case.arguments.get("accumulate"))
    return f"{pair}_fast" if pair and fast and "block" not in pair else pair


def rows_of(
    recorded: Iterable[Mapping[str, Any]], arch: str, cases: Mapping[str, Case] = CASES
) -> list[dict[str, Any]]:
    """Rows of the table for a chip."""
    made = []
    for row in recorded:
        case = cases.get(row["case"])
        pair = pair_of(case) if case is not None and row["arch"] == arch else None
        theirs = row["rivals"].get(choice.LIBRARY, row["rivals"].get("cublas"))
        if pair is None or theirs is None:
            continue
        sizes = tuple(row["dims"][name] for name in ("tokens", "columns", "hidden"))
        times = {choice.OWN: row["us"], choice.LIBRARY: theirs}
        made.append(choice.made(row["op"], pair, sizes, times, row["date"][:10]))
    return made


def main() -> None:
    recorded = evidence.everything(evidence.folder())
    for arch in sorted({row["arch"] for row in recorded}):
        rows, path = rows_of(recorded, arch), choice.path_of(arch)
        if rows:
            path.unlink(missing_ok=True)
            choice.write(path, rows)
            print(f"{path}: {len(choice.read(path))} products of {len(rows)} recorded")


if __name__ == "__main__":
    main()
