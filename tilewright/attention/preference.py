"""Where `backend="auto"` takes kernels for one chip: where they were measured to be right, and faster than the portable ones. And
where it leaves a forward to cuDNN: where that was measured to be faster than the faster of ours by 3 % or more.

`data/attention_<arch>.jsonl` has a row for each measured call that came out right, `{"direction": "forward", "kind":
"bf16_128_128_causal", "bucket": [64, 4096, 4096], "best": "hopper", "times": {"hopper": 101.5, "portable": 130.0}, "date":
"2026-11-17", "triton": "3.6.0"}`: bucket is batch times heads, queries and keys, or batch, rows and keys of a cache, rounded up to
powers of two, times are microseconds, of cuDNN too where it takes such calls and ran beside ours. The nearest row of a kind counts
if it is nearer than a factor of four in every size, among equals that of this release of Triton. Where there is none, the chip's
kernels are taken for calls with a tile for more than half of the SMs: of such calls none that was measured was slower by them. Of
codes that no row is of, nothing is known, and the portable ones are taken. Over caches the nearest row counts however far it is,
but for chunks of few queries, and the portable ones are taken where there is none of that kind. Where this Triton offers no kernels
for the chip, their times count for nothing. Rows are data: one that is damaged, or whose best is not the one that its times say, is
not believed.
`tilewright docs` writes them from the evidence.
"""

from __future__ import annotations

import functools
import json
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import triton

from ..core.target import Target
from ..core.tensor import cdiv
from ..core.triton_versions import age, release
from ..gemm.preference import FAR, LARGEST, Preference, bucket, distance
from ..runtime.choose import forced
from ..runtime.config import LONGEST, SHIPPED
from .cache_read import capacity_of, keys_together, value_columns
from .hopper.schedule import ROWS

PORTABLE, HOPPER, LIBRARY = "portable", "hopper", "cudnn"
GAIN = 1.03  # times as fast as the faster of ours: two runs of one kernel differ by nearly as much
DIRECTIONS = ("forward", "backward")
FIELDS = {"direction", "kind", "bucket", "best", "times", "date", "triton"}
NAMES = {"torch.bfloat16": "bf16", "torch.float16": "fp16", "torch.float32": "fp32"}
CODES = {"torch.int8": "int8", "torch.float8_e4m3fn": "fp8"}
CACHED = {"torch.int8": "integers", "torch.float8_e4m3fn": "e4m3"}  # codes in caches


def kind_of(a: SimpleNamespace) -> str:
    """What a call's kernels are like, in a word: dtype, columns of keys and of values, and all that changes their code."""
    window = "windowed" if a.left is not None or a.right is not None else "causal" if a.causal else "full"
    more = {"softcap": a.softcap, "slopes": a.slopes is not None, "sink": a.sink is not None}
    more |= {"kv_len": a.kv_len is not None, "packed": a.cu_seqlens_q is not None}
    words = [NAMES[str(a.q.dtype)], a.q.shape[-1], a.v.shape[-1], window, *(name for name, has in more.items() if has)]
    return "_".join(map(str, words))


def wanted(name: str, direction: str, target: Target, a: SimpleNamespace) -> bool:
    """Whether kernels of that name are to be taken if they take the arguments: they were asked for, or they are the faster."""
    return chosen(name, direction, target, a, kind_of)


def chosen(
    name: str, direction: str, target: Target, a: SimpleNamespace, kind: Callable[[SimpleNamespace], str]
) -> bool:  # fmt: skip
    """`wanted` of a call of that kind."""
    if name in (a.backend, forced.get()):
        return True
    row = nearest(target.arch, direction, kind(a), *sizes_of(a))
    if row is None:
        return busy(target, a) and measured_at_all(target.arch, direction, codes_in(kind(a)))
    return best_of(row["times"], library=False) == name


def library_wanted(target: Target, a: SimpleNamespace) -> bool:
    """Whether a forward that cuDNN takes is to be left to it where nothing is asked for: a row says so, of what there is."""
    return decide(target, "forward", a).best == LIBRARY


def decide(target: Target, direction: str, a: SimpleNamespace, of: str = release(triton.__version__)) -> Preference:
    """What `auto` takes for a call without a cache that all backends take, by a release of Triton, and what that rests on."""
    kind, *sizes = known_as(a)
    row = nearest(target.arch, direction, kind, *sizes, of)
    if row is not None:
        times = offered(row["times"], target)
        said = ", ".join(f"{name} {us:g} us" for name, us in sorted(times.items()))
        size, when = "x".join(map(str, row["bucket"])), f"on {row['date']} with Triton {row['triton']}"
        return Preference(best_of(times), f"measured {when} at {size}: {said}", row)
    own = target.hopper_gluon and busy(target, a) and measured_at_all(target.arch, direction, codes_in(kind))
    return Preference(HOPPER if own else PORTABLE, f"nothing near is measured; the rule for {kind}")


def offered(times: Mapping[str, float], target: Target) -> dict[str, float]:
    """The times of what there is on a chip with this Triton: kernels for one chip are in Gluon."""
    return {name: us for name, us in times.items() if name in (PORTABLE, LIBRARY) or target.hopper_gluon}


def best_of(times: Mapping[str, float], library: bool = True) -> str:
    """The backend that these times speak for: the faster of ours or, where it may be, the library's that is clearly faster."""
    own = {name: us for name, us in times.items() if name != LIBRARY}
    best = min(own, key=lambda name: (own[name], name != PORTABLE))
    theirs = times.get(LIBRARY, math.inf) if library else math.inf
    return LIBRARY if theirs * GAIN <= own[best] else best


def kind_of_codes(a: SimpleNamespace) -> str:
    """`kind_of` a call whose keys are codes: also which, and whether values are."""
    return f"{kind_of(a)}_{CODES[str(a.k.dtype)]}{'' if a.v_scale is None else '_pv'}"


def codes_in(kind: str) -> tuple[str, ...]:
    """The words of a kind that say which operands are codes, and of what."""
    return tuple(word for word in kind.split("_") if word in (*CODES.values(), "pv"))


def measured_at_all(arch: str, direction: str, codes: tuple[str, ...]) -> bool:
    """Whether operands are numbers, or codes such as some row is of."""
    return not codes or any((row["direction"], codes_in(row["kind"])) == (direction, codes) for row in table(arch))


def wanted_of_codes(name: str, target: Target, a: SimpleNamespace) -> bool:
    """`wanted` of a call whose keys are codes."""
    return chosen(name, "forward", target, a, kind_of_codes)


def kind_of_cache(a: SimpleNamespace) -> str:
    """What a call over caches is like, in a word: bits of its queries, columns of keys and of values, what is read in another way,
    and how many keys lie together, which are copied one by one if they are few. Not what windows, sinks and softcaps do to scores,
    nor which of two 16-bit dtypes there is: that costs all kernels alike."""
    columns = value_columns(a.v_cache, a.k_cache, a.value_dim)
    more = {"latent": a.v_cache is None, "apart": a.k_rope is not None, "tree": a.tree is not None}
    # Not the words of CODES, by which rows of attention over codes of queries are known
    more |= {word: str(a.k_cache.dtype) == kind for kind, word in CACHED.items()}
    more |= {"packed": a.cu_seqlens_q is not None}
    together = keys_together(a.k_cache.shape[1], 64)
    pages = "fixed" if a.block_table is None else f"pages_{together if together >= 16 else 1}"
    words = ["cached", 8 * a.q.element_size(), a.q.shape[-1], columns, *(name for name, has in more.items() if has)]
    return "_".join(map(str, [*words, pages]))


def wanted_of_cache(
    name: str, target: Target, a: SimpleNamespace, others: tuple[str, ...] = (), far: float = math.inf
) -> bool:  # fmt: skip
    """`wanted` of a call over caches that `others`, kernels which are asked after these, take too, by a row that is not too far.
    With a split that is given, kernels of one chip are taken by name alone: which are the faster depends on sizes of the batch, and
    a sequence's bits would with it."""
    if name in (a.backend, forced.get()):
        return True
    if a.split is not None:
        return False
    row = nearest(target.arch, "forward", kind_of_cache(a), *sizes_of_cache(a), far=far, having=name)
    return row is not None and row["times"][name] <= min(row["times"].get(one, math.inf) for one in (PORTABLE, *others))


@functools.lru_cache(maxsize=4096)
def nearest(
    arch: str, direction: str, kind: str, heads: int, length: int, keys: int, of: str = release(triton.__version__),
    *, far: float = FAR, having: str = PORTABLE,
) -> Mapping[str, Any] | None:  # fmt: skip
    """The row that is nearest to a bucket, of those that have a time of some backend; None where none is near. Sizes matter more
    than the release."""
    rows = [
        row for row in table(arch) if (row["direction"], row["kind"]) == (direction, kind) and having in row["times"]
    ]
    away = [(distance(row["bucket"], (heads, length, keys)), release(row["triton"]) != of, row) for row in rows]
    within = [found for found in away if found[0] <= far]
    return min(within, key=lambda found: found[:2])[2] if within else None


def sizes_of(a: SimpleNamespace) -> tuple[int, int, int]:
    """Batch times heads, queries and keys of a call, in its bucket."""
    batch, length, heads, _ = a.q.shape
    return bucket(batch * heads, length, a.k.shape[1])


def busy(target: Target, a: SimpleNamespace) -> bool:
    """Whether tiles of 128 queries keep more than half of the SMs busy: with 128 of them for 132, Hopper's kernels took 14 to 18 us
    where portable ones took 24 to 28; with 80, both took 11, and with 32, 7 to 8."""
    return 2 * tiles_of(a) > target.sms


def tiles_of(a: SimpleNamespace) -> int:
    """Tiles of queries of all heads: of packed sequences as many as there would be of one."""
    batch, length, heads, _ = a.q.shape
    return cdiv(length, ROWS.value) * heads * batch


def sizes_of_cache(a: SimpleNamespace) -> tuple[int, int, int]:
    """Batch, heads times queries, which share what is read, and the keys that there is room for."""
    return bucket(a.q.shape[0], a.q.shape[1] * a.q.shape[2], capacity_of(a))


def known_as(a: SimpleNamespace) -> tuple[str, int, int, int]:
    """The kind and the sizes by which rows know a call."""
    if hasattr(a, "k_cache"):
        return kind_of_cache(a), *sizes_of_cache(a)
    return (kind_of_codes if str(a.k.dtype) in CODES else kind_of)(a), *sizes_of(a)


def made(
    direction: str, a: SimpleNamespace, times: Mapping[str, float], date: str, triton: str
) -> dict[str, Any]:  # fmt: skip
    """The row that measured microseconds, by backend, make of a call."""
    rounded = {name: round(float(us), 3) for name, us in sorted(times.items())}
    best = best_of(rounded)
    kind, *sizes = known_as(a)
    return {
        "direction": direction, "kind": kind, "bucket": sizes, "best": best, "times": rounded, "date": date,
        "triton": triton,
    }  # fmt: skip


def text_of(rows: Iterable[Mapping[str, Any]]) -> str:
    """A file of rows, sorted. Of several rows for one direction, kind, bucket and release of Triton the last one stays."""
    by_key = {(row["direction"], row["kind"], tuple(row["bucket"]), age(row["triton"])): row for row in rows}
    lines = [json.dumps(by_key[key]) for key in sorted(by_key)]
    bad = [line for line in lines if row_of(line) is None]
    if bad:
        raise ValueError(f"not a row: {bad[0]}")
    return "".join(f"{line}\n" for line in lines)


def path_of(arch: str) -> Path:
    return SHIPPED / f"attention_{arch}.jsonl"


@functools.cache
def table(arch: str) -> tuple[dict[str, Any], ...]:
    """The well-formed rows of a chip; anything else in its file costs a warning and nothing more."""
    path = path_of(arch)
    if not path.exists():
        return ()
    with path.open("rb") as file:
        lines = file.read(LONGEST).decode(errors="replace").splitlines()
    found = [row for row in map(row_of, lines) if row is not None]
    if len(found) < len(lines):
        warnings.warn(f"{path}: {len(lines) - len(found)} damaged row(s) ignored", stacklevel=2)
    return tuple(found)


def row_of(line: str) -> dict[str, Any] | None:
    """A line's row, None if it is none."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or set(row) != FIELDS or row["direction"] not in DIRECTIONS:
        return None
    sizes, times = row["bucket"], row["times"]
    if not isinstance(sizes, list) or len(sizes) != 3 or not all(type(n) is int and 1 <= n <= LARGEST for n in sizes):
        return None
    if not isinstance(times, dict) or PORTABLE not in times or len(times) < 2:
        return None
    if not all(type(us) in (int, float) and 0 < us < math.inf for us in times.values()):
        return None
    return row if row["best"] in times and times[row["best"]] == times[best_of(times)] else None
