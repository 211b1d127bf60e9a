"""Which is preferred for a product, our kernels or the vendor's library: the faster one, by measurements.

`data/preference_<arch>.jsonl` has a row for each measured product, `{"op": ..., "pair": "fp8_block", "bucket": [4096, 4096, 8192],
"best": "own", "times": {"own": 101.5, "cublaslt": 108.0}, "date": "2026-11-15", "triton": "3.6.0"}`: bucket is M, N and K rounded
up to powers of two, times are microseconds. The nearest row of a pair counts if it is nearer than a factor of four in every size,
of rows as near the one of the installed release of Triton; where there is none, a rule does. Rows are data: one that is damaged, or
whose best is not its fastest, is not believed.

On Hopper our kernels are in Gluon, and so were measured. Where Triton does not offer them, rows say nothing of what would run.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import triton

from ..core.target import Target
from ..core.tensor import power_of_two
from ..core.triton_versions import age, release
from ..runtime.config import LONGEST, SHIPPED

OWN, LIBRARY = "own", "cublaslt"
LARGEST = 65536  # sizes above count as this
FAR = 2.0  # doublings
FEW = 64  # rows up to which a product is bound by reading the other factor
WIDE = "_f32"  # ends the names of pairs whose result is fp32, which takes longer to write
FIELDS = {"op", "pair", "bucket", "best", "times", "date", "triton"}
# Where nothing was measured: H200, November 2026, on large products. Ours win on block-scaled FP8 and INT8 (1.6 times), theirs by
# a few percent where scales do not change along the inner dimension and sums stay in the tensor cores, and several times where
# the first factor has 128x128 blocks, which only the portable kernel multiplies.
DELEGATED = {"bf16", "fp16", "fp8_row_fast", "fp8_tensor_fast", "fp8_block_both", "fp8_block_left"}
DELEGATED_FEW = {"bf16", "fp16"}
# Pairs that portable kernels multiply on Hopper too; of all others they take twice the time of ours in Gluon, or more
PORTABLE = {"bf16", "fp16", "fp8_block_left"}


class Preference(NamedTuple):
    """The preferred backend, why it is preferred, and the row that says so, if one does."""

    best: str
    why: str
    row: Mapping[str, Any] | None = None


def bucket(M: int, N: int, K: int) -> tuple[int, int, int]:
    return tuple(min(LARGEST, power_of_two(n)) for n in (M, N, K))


def preferred(target: Target, pair: str, M: int, N: int, K: int) -> str:
    """`own` or `cublaslt`, for a pair of operands as `pair_of` in `library.py` names them, or bf16, fp16 … of plain products."""
    return decide(target, pair, M, N, K).best


def decide(target: Target, pair: str, M: int, N: int, K: int, of: str = release(triton.__version__)) -> Preference:
    """What is preferred for a product on a chip, with the kernels that there are for it and `of` a release of Triton."""
    if target.wgmma and pair.removesuffix(WIDE) not in PORTABLE and not target.hopper_gluon:
        return Preference(LIBRARY, f"our kernels for {pair} are in Gluon, which this Triton does not offer")
    return nearest(target.arch, pair, *bucket(M, N, K), of)


@functools.lru_cache(maxsize=4096)
def nearest(arch: str, pair: str, M: int, N: int, K: int, of: str) -> Preference:
    """What is preferred for a bucket, by the row that is nearest or by the rule. Sizes matter more than the release."""
    away = [
        (distance(row["bucket"], (M, N, K)), release(row["triton"]) != of, row)
        for row in table(arch)
        if row["pair"] == pair
    ]
    within = [found for found in away if found[0] <= FAR]
    if within:
        *_, row = min(within, key=lambda found: found[:2])
        times = ", ".join(f"{name} {us:g} us" for name, us in sorted(row["times"].items()))
        size = "x".join(map(str, row["bucket"]))
        when = f"on {row['date']} with Triton {row['triton']}"
        return Preference(row["best"], f"measured {when} at {size}: {times}", row)
    few = M <= FEW
    best = LIBRARY if pair.removesuffix(WIDE) in (DELEGATED_FEW if few else DELEGATED) else OWN
    return Preference(best, f"not measured; the rule for {pair}{' of few rows' if few else ''}")


def distance(there: Sequence[int], here: Sequence[int]) -> float:
    """How far one bucket is from another: by the size that is farthest, in doublings, and among equals by all three."""
    apart = [abs(math.log2(a / b)) for a, b in zip(there, here)]
    return max(apart) + 1e-3 * sum(apart) / 64


def path_of(arch: str) -> Path:
    return SHIPPED / f"preference_{arch}.jsonl"


@functools.cache
def table(arch: str) -> tuple[dict[str, Any], ...]:
    """The well-formed rows of a chip."""
    return tuple(read(path_of(arch)))


def read(path: Path) -> list[dict[str, Any]]:
    """The well-formed rows of a file; anything else in it costs a warning and nothing more."""
    try:
        with path.open("rb") as file:
            lines = file.read(LONGEST).decode(errors="replace").splitlines()
    except OSError:
        return []
    found = [row for row in map(_row, lines) if row is not None]
    if len(found) < len(lines):
        warnings.warn(f"{path}: {len(lines) - len(found)} damaged row(s) ignored", stacklevel=2)
    return found


def _row(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or set(row) != FIELDS:
        return None
    if not all(isinstance(row[n], str) for n in ("op", "pair", "date", "triton")):
        return None
    sizes, times = row["bucket"], row["times"]
    if not isinstance(sizes, list) or len(sizes) != 3 or not all(type(n) is int and 1 <= n <= LARGEST for n in sizes):
        return None
    if not isinstance(times, dict) or set(times) != {OWN, LIBRARY}:
        return None
    if not all(type(us) in (int, float) and 0 < us < math.inf for us in times.values()):
        return None
    return row if row["best"] in times and times[row["best"]] == min(times.values()) else None


def made(
    op: str, pair: str, sizes: tuple[int, int, int], times: Mapping[str, float], date: str, triton: str
) -> dict[str, Any]:
    """The row that times in microseconds, by backend, make; `triton` is the version that our kernels were compiled with."""
    rounded = {name: round(float(us), 3) for name, us in sorted(times.items())}
    best = min(rounded, key=lambda name: (rounded[name], name != OWN))
    sides = {"op": op, "pair": pair, "bucket": list(bucket(*sizes)), "best": best, "times": rounded}
    return {**sides, "date": date, "triton": triton}


def text_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A file of rows, sorted. Of several rows for one pair, bucket and release of Triton the last one stays."""
    by_key = {(row["pair"], tuple(row["bucket"]), age(row["triton"])): row for row in rows}
    lines = [json.dumps(by_key[key]) for key in sorted(by_key)]
    bad = [line for line in lines if _row(line) is None]
    if bad:
        raise ValueError(f"not a row: {bad[0]}")
    return "".join(f"{line}\n" for line in lines)
