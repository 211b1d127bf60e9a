"""Every kernel compiled ahead of time: all variants for sm_90 held to a table, a few for every other chip; and how many
variants there can be.

The tables are in `sm_90/` and, for the other chips, in `others/`, a file for each family, made with Triton 3.6. `python -m
tests.compile.test_kernels --write [OP or FAMILY ...]`, with that Triton, makes them anew and prints what became worse.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import multiprocessing
import operator
import pkgutil
import random
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import triton

import tilewright as tw
from tests.compile import table
from tilewright.check import families
from tilewright.check.cases import formats, holds
from tilewright.check.compiled import all_launches, chip_variants, own_variants, variants
from tilewright.check.variants import (
    COMMON,
    FORWARD,
    HOT,
    ODD,
    WIDE,
    Call,
    Variant,
    drawn,
    hot_calls,
    is_gluon,
    launches,
    needed,
    variant,
)
from tilewright.core.nest import labels
from tilewright.core.target import TARGETS
from tilewright.op import Op
from tilewright.runtime.kernel import Kernel
from tilewright.toolchain.aot import CompileError

TABLE = Path(__file__).parent / "sm_90"
OTHERS = Path(__file__).parent / "others"
OPS: dict[str, Op] = tw.catalogue()
CHIPS = [a for a in TARGETS if a not in ("sm_86", "sm_90")]
IS_OLDEST = triton.__version__.startswith("3.6.")
OLDEST = pytest.mark.skipif(not IS_OLDEST, reason="needs Triton 3.6, by which the table was made")
every_op = pytest.mark.parametrize("op", OPS.values(), ids=list(OPS))

# Constants that may follow the number of tokens, and how many values each may take: all else must not.
LADDERS = {
    "quantize_tiles.ALIGN": 3,  # which whole words the rows of the transposed codes are made of: 1, 4, 16
    "quantize_tiles.FULL": 2,
    # Tiles of products follow the rows, by powers of two; tokens are the inner dimension of a weight's gradient
    "scaled_product.BLOCK_M": 4,
    "scaled_product.K": 3,
    "scaled_product.A.stride_r": 3,
    "scaled_product.B.stride_r": 3,
    "small_rows.K": 3,  # and of a bias's
    "small_rows.A.stride_r": 3,
    # Tiles are chosen by how many fill the chip
    "plain_hopper.CHUNKS": 2,
    "plain_hopper.OWN": 2,
    "plain_hopper.BOXES": 2,
    "plain_hopper.STAGES": 3,
    "hadamard_tiles.ALIGN": 3,
    "hadamard_tiles.FULL": 2,
    # The tokens are the inner dimension: whether codes lie in whole words
    "matmul_tiles.K": 3,
    # Tiles are smaller where SMs would have none, and narrower of fewer columns
    "matmul_tiles.BLOCK_M": 2,
    "matmul_tiles.BLOCK_N": 5,
    "matmul_tiles.BLOCK_K": 3,
    "matmul_tiles.STAGES": 5,
    "matmul_tiles.num_warps": 2,
    **{f"matmul_tiles.{name}": 12 for name in "AB"},  # boxes of them, or pointers
    "grouped_inner_fp8.T": 3,
    "grouped_inner_fp8.A.stride_r": 3,
    "grouped_inner_fp8.B.stride_c": 3,
    "cross_entropy_forward.SPLITS": 6,  # powers of two: few rows are split so that they fill the chip
    "cross_entropy_merge.SPLITS": 6,
    "sum_columns.ROWS": 10,  # powers of two
    "sum_norm_shares.ROWS": 2,
    "sparse_mm_parts.Y": 2,  # the result, or of few tokens parts of it, in fp32
    # Few tokens have small programs
    **{f"qkv_split_cache_rows.{name}": 2 for name in ("T", "HB", "TK", "KB")},
}
SHAPES, MOST = 60, 24  # random shapes, and variants of one kernel for one kind of call that they may need
MORE = {
    "rms_norm_forward": 32,
    "modulated_norm_forward": 32,
    ("rms_norm_router", "rms_norm_forward"): 64,  # twice beside codes, which it stores, and then the plain rows
}  # a row is held as pieces, whose size and number follow its width


# ---------------------------------------------------------------- what is compiled


@functools.cache
def kept(folder: Path) -> tuple[dict[str, table.Row], set[str]]:
    """The rows of a folder, and those that are compiled whatever their text is: hundreds of tests ask."""
    rows = table.load(folder)
    return rows, table.sampled(rows)


kept_texts = functools.cache(table.load_texts)


@OLDEST
@every_op
def test_hopper_variants_keep_to_the_table(op):
    """Each is compiled that is new, changed or sampled; the others are as recorded. A variant of several ops is the first's."""
    (recorded, sample), texts, wrong = kept(TABLE), kept_texts(), []
    for one in own_variants()[op.name]:
        try:
            wrong += table.checked(one, recorded, texts, sample)[1]
        except CompileError as error:
            wrong.append(f"{one.name}: {error}")
    assert not wrong, f"{op.name}: {len(wrong)} variants\n" + "\n".join(wrong)


@OLDEST
@every_op
def test_hot_variants_do_not_spill(op):
    """But Gluon ones may, which hold their tiles as they were measured best. No variant spills more than its row says."""
    recorded, _ = kept(TABLE)
    hot = [one.name for one in needed(op, hot_calls(op)) if not is_gluon(one.kernel) and one.name in recorded]
    spilled = [f"{name}: {recorded[name]['spills']} bytes" for name in hot if recorded[name]["spills"]]
    assert not spilled, "\n".join(spilled)


@OLDEST
def test_the_table_has_no_other_rows():
    wanted = {one.name for op in OPS.values() for one in variants(op)}
    stale = sorted(table.load(TABLE).keys() - wanted)
    assert not stale, f"{len(stale)} rows of variants that no call needs:\n" + "\n".join(stale)


# test_aten.py, test_latent.py, test_decode.py, test_hopper_attention.py, test_given_codes.py
ELSEWHERE = (
    "tilewright.aten.",
    "tilewright.attention.hopper.coded_values",
    "tilewright.attention.hopper.decode",
    "tilewright.attention.hopper.latent",
    "tilewright.attention.hopper.schedule",
    "tilewright.formats.given",
)
# Of calls that none here is like: rows that are wider (test_shared_memory.py), packed sequences that crowd a chip without the delta
# rule (test_linear_attention.py)
UNLIKE = {"rms_norm_shared", "linear_attention_rest"}


def test_every_kernel_is_compiled():
    declared: dict[str, Kernel] = {}
    for module in pkgutil.walk_packages(tw.__path__, "tilewright."):
        if module.name.rpartition(".")[2] != "__main__" and not module.name.startswith(ELSEWHERE):
            found = vars(importlib.import_module(module.name)).values()
            own = [k for k in found if isinstance(k, Kernel) and not k.jit.__module__.startswith(ELSEWHERE)]
            declared.update({k.name: k for k in own})
    assert declared, "no kernel was found"
    missing = declared.keys() - {one.kernel.name for op in OPS.values() for one in variants(op)} - UNLIKE
    assert not missing, f"no call of any op needs {sorted(missing)}"


def test_some_kernels_of_every_chip_are_compiled_again():
    """However few have changed; and of no kernel more than one for sm_90 and one for another chip."""
    for folder, chips in ((TABLE, ["sm_90"]), (OTHERS, CHIPS)):
        sample = table.sampled(table.load(folder))
        assert {table.chip_of(name) for name in sample} == {*chips}
        assert len({table.kernel_of(name) for name in sample}) == len(sample)


def families_of_kernels() -> dict[str, str]:
    kernels = {one.kernel for op in OPS.values() for one in variants(op)}
    return {kernel.name: families.of_module(kernel.jit.fn.__module__) for kernel in kernels}


@OLDEST
@pytest.mark.parametrize("folder", [TABLE, OTHERS], ids=lambda path: path.name)
def test_every_row_is_in_its_family_s_file(folder, tmp_path):
    table.save(tmp_path, table.load(folder), families_of_kernels())
    kept, wanted = ({path.name: path.read_text() for path in where.iterdir()} for where in (folder, tmp_path))
    assert kept.keys() == wanted.keys()
    wrong = [name for name in wanted if kept[name] != wanted[name]]
    assert not wrong, f"not sorted, or with rows of other families' kernels: {wrong}"


@every_op
@pytest.mark.parametrize("arch", CHIPS)
def test_other_chips_compile_every_kernel(op, arch):
    """Each kernel; and where it quantises, has the longest rows or many experts: if that is new, changed or sampled."""
    ((recorded, sample), texts), wrong = ((kept(OTHERS), kept_texts()) if IS_OLDEST else (({}, ()), {})), []
    for one in chip_variants(arch)[op.name]:
        try:
            row, found = table.checked(one, recorded, texts, sample)
        except CompileError as error:
            wrong.append(f"{one.name}: {error}")
            continue
        wrong += found
        if row["shared"] > TARGETS[arch].shared_memory:
            wrong.append(f"{one.name}: {row['shared']} bytes of shared memory do not exist on {arch}")
    assert not wrong, f"{op.name} on {arch}: {len(wrong)} variants\n" + "\n".join(wrong)


@every_op
def test_every_chip_has_an_implementation_of_every_call(op):
    """Gluon kernels are for sm_90 alone: what they do there, Triton ones do elsewhere."""
    for arch in TARGETS:
        for call, launched in all_launches(op, arch):
            assert launched, f"{op.name} on {arch} launches nothing for {call}"
            gluon = [wanted.kernel.name for wanted in launched if is_gluon(wanted.kernel)]
            assert arch == "sm_90" or not gluon, f"{op.name} on {arch} launches {gluon}"


# ---------------------------------------------------------------- how many there are


def kinds_of_call(op: Op) -> list[dict[str, Any]]:
    """Settings of `drawn` and an output format: with and without optional tensors, plain and in every format."""
    return [{"full": full, "fmt": fmt} for full in (False, True) for fmt in (None, *formats(op, "meta"))]


def keyed(op: Op, dims: dict[str, int], full: bool, fmt: Any) -> list[tuple[Kernel, dict[str, Any]]]:
    """The launches of a call and its backward: kernels, and the parts of their variant keys by name. None of a format that cannot
    hold the call's result."""
    values = drawn(op, dims, full=full)
    if fmt is not None and not holds(op, fmt, values):
        return []
    call = Call(values) if fmt is None else Call({**values, "out_format": fmt}, FORWARD)
    out = []
    for wanted in launches(op, call):
        _, parts, options = wanted.kernel.key(wanted.ordered, wanted.options, 0)
        named = {
            label: functools.reduce(operator.getitem, path, part)  # of a tuple, that of each thing in it
            for name, value, part in zip(wanted.kernel.names, wanted.ordered, parts)
            for path, label in labels(name, value).items()
        }
        out.append((wanted.kernel, {**named, **dict(options)}))
    return out


def in_turn(found: list[tuple[Kernel, dict[str, Any]]]) -> dict[tuple[str, int], dict[str, Any]]:
    """Launches by kernel and how many of that kernel come after: a composite op has several, of different shapes, and of few tokens
    a forward may take another kernel than its backward does."""
    made: dict[tuple[str, int], dict[str, Any]] = {}
    for kernel, parts in reversed(found):
        made[kernel.name, sum(name == kernel.name for name, _ in made)] = parts
    return made


@every_op
def test_token_counts_share_variants(op):
    wrong = set()
    for dims in (HOT[0], ODD, WIDE):
        for kind in kinds_of_call(op):
            # Two codes a byte, down the columns, want an even number of rows
            many = keyed(op, {**dims, "tokens": 127}, **kind) or keyed(op, {**dims, "tokens": 126}, **kind)
            for tokens in (1, 2, 16):
                few = keyed(op, {**dims, "tokens": tokens}, **kind)
                shared = in_turn(many)
                for (name, turn), parts in in_turn(few).items():
                    other = shared.get((name, turn), parts)
                    wrong |= {
                        f"{name}.{n} is {parts[n]} for {tokens} tokens, {other[n]} for many"
                        for n in parts
                        if parts[n] != other[n] and f"{name}.{n}" not in LADDERS
                    }
    assert not wrong, f"{op.name}: the variant depends on the number of tokens:\n" + "\n".join(sorted(wrong))


def shapes() -> list[dict[str, int]]:
    """Few and many tokens by narrow, wide and whole widths; of experts a few numbers, for a model has one."""
    source = random.Random(1)
    found = []
    for _ in range(SHAPES):
        width = source.choice((source.randrange(1, 400), source.randrange(1, 20000), 128 * source.randrange(1, 64)))
        tokens = source.choice((source.randrange(1, 300), source.randrange(1, 20000)))
        found.append(
            {
                **COMMON,
                "tokens": tokens,
                "hidden": width,
                "vocab": 8 * width,
                "experts": source.choice((1, 7, 8, 60, 64)),
            }
        )
    return found


@every_op
def test_variants_are_bounded(op):
    wrong = set()
    for fmt in (None, *formats(op, "meta")[:1]):
        keys: dict[str, set] = defaultdict(set)
        rungs: dict[str, set] = defaultdict(set)
        for dims in shapes():
            for kernel, parts in keyed(op, dims, True, fmt):
                keys[kernel.name].add(tuple(parts.items()))
                for name, value in parts.items():
                    rungs[f"{kernel.name}.{name}"].add(value)
        wrong |= {
            f"{name}: {len(k)} variants for {SHAPES} shapes"
            for name, k in keys.items()
            if len(k) > MORE.get((op.name, name), MORE.get(name, MOST))
        }
        wrong |= {f"{name}: takes {sorted(rungs[name])}" for name, most in LADDERS.items() if len(rungs[name]) > most}
    assert not wrong, f"{op.name}: more variants or rungs than stated:\n" + "\n".join(sorted(wrong))


@every_op
def test_the_key_tells_triton_s_variants_apart(op):
    """One key, one binary: where Triton reads two launches differently, so does the key; and not without need."""
    compiled: dict[tuple, set[str]] = defaultdict(set)
    keys: dict[str, set[tuple]] = defaultdict(set)
    for _, launched in all_launches(op):
        for wanted in launched:
            name, key = (
                variant(wanted).name,
                (wanted.kernel.name, *wanted.kernel.key(wanted.ordered, wanted.options, 0)),
            )
            compiled[key].add(name)
            keys[name].add(key)
    mixed = [names for names in compiled.values() if len(names) > 1]
    assert not mixed, f"{op.name}: one key for\n" + "\n".join(sorted(mixed[0]))
    twice = [name for name, found in keys.items() if len(found) > 1]
    assert not twice, f"{op.name}: compiled twice under two keys: {twice[0]}"


# ---------------------------------------------------------------- the table


def measure(at: int) -> tuple[str, table.Row | None, list[str]]:
    """A variant's name, its row and what is worse in it. A row that is known is kept; of wrong code there is none."""
    one = _wanted[at]
    recorded = _recorded if one.arch == "sm_90" else _others
    if not table.EVERY and table.known(one, recorded, _texts):
        return table.label(one), recorded[table.label(one)], []
    compiled = one.compile()
    if wrong := table.unexpected(one, compiled):
        return table.label(one), None, wrong
    row = {**table.row(compiled), "source": one.fingerprint()}
    if one.arch != "sm_90":
        return table.label(one), {k: row[k] for k in ("shared", "source")}, []
    return one.name, row, table.problems(one.name, compiled, recorded)


def write(processes: int) -> int:
    """Compile what has changed and replace its rows and those that no call needs; say what is new, gone or worse on sm_90. Gives
    how many rows are left out since the compiler makes wrong code there."""
    rows: dict[str, table.Row | None] = {}
    with multiprocessing.get_context("fork").Pool(processes) as pool:
        for name, row, problems in pool.imap_unordered(measure, range(len(_wanted))):
            rows[name] = row
            print(f"\r{len(rows)} of {len(_wanted)}", end="", file=sys.stderr, flush=True)
            for line in problems:
                print(f"\r{line}")
    hopper = {one.name for op in OPS.values() for one in variants(op)}
    others = {table.label(one) for arch in CHIPS for mine in chip_variants(arch).values() for one in mine}
    for name in sorted(_recorded.keys() - hopper):
        print(f"gone: {name}")
    for folder, old, kept in ((TABLE, _recorded, hopper), (OTHERS, _others, others)):
        new = {**old, **rows}
        table.save(folder, {name: new[name] for name in kept if new.get(name) is not None}, families_of_kernels())
    kernels = families_of_kernels()
    texts = {
        name: own for name, own in _texts.items() if name in kernels and name not in {o.kernel.name for o in _wanted}
    }
    for one in _wanted:
        texts.setdefault(one.kernel.name, {}).update(table.text(one))
    table.save_texts(texts)
    return sum(row is None for row in rows.values())


def of_these(names: list[str]) -> list[Variant]:
    """All variants, for every chip, of the kernels that the ops or families of these names launch; without names, of all."""
    unknown = [name for name in names if name not in OPS and name not in families.members()]
    if unknown:
        raise ValueError(f"no such op or family: {', '.join(unknown)}")
    every = list({one.name: one for op in OPS.values() for one in variants(op)}.values())
    every += [one for arch in CHIPS for mine in chip_variants(arch).values() for one in mine]
    chosen = [op for op in OPS if not names or {op, families.of(op)} & set(names)]
    kernels = {one.kernel for op in chosen for one in variants(OPS[op])}
    return [one for one in every if one.kernel in kernels]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--write", nargs="*", metavar="NAME", required=True, help="replace rows of these ops or families"
    )
    parser.add_argument("--processes", type=int, default=2)
    arguments = parser.parse_args()
    if not IS_OLDEST:
        parser.error(f"the table is Triton 3.6's, this is {triton.__version__}")
    _recorded, _others, _texts = table.load(TABLE), table.load(OTHERS), table.load_texts()
    try:
        _wanted = of_these(arguments.write)
    except ValueError as error:
        parser.error(str(error))
    if left_out := write(arguments.processes):
        sys.exit(f"{left_out} rows are not written: the compiler makes wrong code of these variants")
