"""The properties that every op must have, each written once as a function of an op and a net.

A net says where kernels run: nowhere (`host`: the reference on a CPU), in the interpreter, or on a GPU. Each property raises
AssertionError, naming the op, the seed and what was drawn, so that a failure can be had again. `VALUES` are about numbers and
memory and run wherever kernels do; `FACES` are about calls, registration and errors and run everywhere. Above each stands
whether it is a property of the op, tried on every op, or of the machinery, tried on a few (`families.py`), and why.
"""

from __future__ import annotations

import functools
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import tilewright as tw

from ..op import Op
from ..runtime import config
from . import far_apart as wide
from . import layouts, memory
from .calls import gradients, modes, paths, repeatable, repeated_argument, replayed, unlike
from .cases import (
    SMALL,
    Case,
    Net,
    choices,
    dims_of,
    draw,
    draw_in,
    formats,
    holds,
    kinds,
    put,
    row_arguments,
    rule_of,
    tensors,
    ungrouped,
    unpacked,
)
from .compare import check
from .families import of_the_op
from .model_run import hold, sample
from .models import PLACES
from .oracle import (
    FLOATS,
    PRODUCTS,
    Outcome,
    as_tuple,
    bits,
    contract,
    fresh,
    outcome,
    pieces,
    row_shaped,
    same_bits,
    same_outcome,
    specified,
    truth,
    with_rows,
)

ROOT = Path(__file__).resolve().parents[2]
EDGES = (0, 1, 2, 17, 129)  # the last is more than one block of rows, more groups or heads than a tile has
LONG_ROW, LONGER_ROW = 2053, 16389  # more than one block of columns; more than one program of a row reduction holds
LONG_SUM = (
    517  # more than one step of a product, whose operands are 128 wide or more: the interpreter takes seconds for many
)
# Sizes that whole tiles would divide; of what is no row or column, a few
WHOLE = {**dict.fromkeys(SMALL, 128), "batch": 2, "heads": 2, "experts": 2}


# ---------------------------------------------------------------- numbers


FAMILIES = 7


def _families(t: Tensor, kind: int) -> Tensor:
    """The same tensor with other data: numbers that break sums, padding and exponents."""
    if kind == 1:  # rows of very different size
        reach = 6 if t.dtype == torch.float16 else 20
        power = torch.arange(t[..., :1].numel(), device=t.device).reshape(t[..., :1].shape) % (2 * reach + 1) - reach
        return (t.float() * torch.exp2(power.float())).to(t.dtype)
    if kind == 2 and t.numel():  # one value far above the rest
        t = t.clone()
        t[..., t.shape[-1] // 2] = 50.0
        return t
    if kind == 3:  # all far below zero: a column padded with 0 would win
        return t - 60
    if kind == 4:  # nearly cancelling neighbours
        sign = 1 - 2 * (torch.arange(t.shape[-1], device=t.device) % 2)
        return (t.abs().mean() * sign + t.float() * 2.0**-6).to(t.dtype)
    if kind == 5:  # heavy tail
        return (t.float() ** 3).to(t.dtype)
    if kind == 6:  # all equal
        return torch.full_like(t, 0.75)
    return t


@of_the_op("formulas, kernels and tails are the op's own")
def accuracy(op: Op, net: Net) -> None:
    """Results and gradients within the bars of the op's class, over dtypes, options and seven families of data."""
    for seed in range(net.cases):
        pair = 8 * seed % (3 * FAMILIES)  # goes through all pairs of a dtype and a family
        dtype, family = FLOATS[pair % 3], pair % FAMILIES
        case = draw(op, net, seed, dtype)
        values = dict(case.values)
        for n, t in tensors(op, values).items():
            rule = rule_of(op, n)
            if (row_shaped(rule) or rule.many) and t.dtype == dtype and t.dim() > 1:
                values = put(values, {n: _families(t, family)})
        if op.bars.sensible is not None:
            values = put(values, op.bars.sensible(SimpleNamespace(**values)))
        for n, t in tensors(op, values).items():  # parameters are often kept in another precision
            rule = rule_of(op, n)
            if t.dtype == dtype and not row_shaped(rule) and rule.dtype == "float":
                values = put(values, {n: t.to(FLOATS[(seed // 3) % 3])})
        with net.kernels():
            actual = outcome(op, values, seed)
        check(op, f"{case.label}, data {family}", values, actual)


@of_the_op("every op masks its own tails and takes its own way out where there is nothing")
def sizes(op: Op, net: Net) -> None:
    """Nothing, one, odd and long in every dimension: right, or refused by name."""
    names = dims_of(op)
    chosen = [{**SMALL, n: size} for n in names for size in EDGES]
    chosen += [{**WHOLE, n: 0} for n in names]  # nothing, of a size that whole tiles would divide
    # None of these is refused
    chosen = [dims for dims in chosen if all(dims.get(name) for name in op.signature.filled)]
    row = LONGER_ROW if op.bars.kind in "BD" else LONG_SUM if op.bars.kind in PRODUCTS and net.interpreter else LONG_ROW
    chosen += [{**dict.fromkeys(SMALL, 2), n: row} for n in names if n in ("hidden", "vocab")]
    drawn = [{n: dims[n] for n in names} for dims in chosen]
    for seed, dims in enumerate(drawn):
        if dims in drawn[:seed]:
            continue
        case = draw(op, net, seed, FLOATS[seed % 3], dims)
        try:
            with net.kernels():
                actual = outcome(op, case.values, seed)
        except ValueError as error:
            assert op.name in str(error) and 0 in case.dims.values(), f"{case.label}: {error}"
            continue
        check(op, case.label, case.values, actual)


@of_the_op("the constants that models give a kernel are its own")
def as_in_models(op: Op, net: Net, stands_for: str = "") -> None:
    """Right with the constants that real models' sizes and options give its kernels: with few rows in the interpreter, with more
    on a GPU. `stands_for` is the op whose places it has, if not its own."""
    places = PLACES.get(stands_for or op.name)
    if places is None:  # no op of the library: a test holds that each of those has places
        return
    chosen = sample(op, net, places=places)
    assert chosen, f"{op.name}: no call in any model"
    for one in chosen:
        hold(op, one, net)


@of_the_op("each op feeds the shared store of codes in its own way")
def quantised(op: Op, net: Net) -> None:
    """Every format of the result: codes and scales those of the true value, whatever memory held, nothing written outside of
    them, gradients those of the plain op."""
    for seed, fmt in enumerate(formats(op, net.device)):
        case = draw_in(op, net, fmt, seed, FLOATS[seed % 3])
        if case is None:
            continue
        with net.kernels(), memory.guarded_allocations(memory.FILLS[seed % 3]) as guards:
            actual = outcome(op, case.values, seed)
        for guard in guards:
            guard.check(case.label)
        check(op, case.label, case.values, actual)


@of_the_op("the configs are those of the op's kernels")
def every_config(op: Op, net: Net) -> None:
    """Every config that a tuned row may name gives right results, none by leave of what another left in memory."""
    counts = {"": 1}
    at = 0
    long = {"hidden": 4112, "vocab": 4112}
    if long.keys() <= set(dims_of(op)):
        del long["hidden"]  # its arguments would be that large in both
    while at < max(counts.values()):

        def config_for(kernel: Any, a: Any, target: Any, at: int = at) -> dict[str, Any]:
            some = [dict(c) for c in kernel.candidates(a)] if kernel.candidates else [dict(kernel.default(a))]
            counts[kernel.name] = max(len(some), counts.get(kernel.name, 0))
            return some[at % len(some)]

        case = draw(op, net, 9, torch.bfloat16, {**SMALL, "tokens": 3, **long})
        op.plans.clear()
        op.backward_plans.clear()
        with net.kernels(), mock.patch.object(config, "config_for", config_for):
            actual = outcome(op, case.values)
        check(op, f"{case.label}: config {at} of {counts}", case.values, actual)
        at += 1
    op.plans.clear()
    op.backward_plans.clear()


@of_the_op("which rows a program sees together is the kernel's choice")
def isolation(op: Op, net: Net) -> None:
    """A NaN or Inf in one row leaves every other row of results and gradients as it was, bit for bit."""
    plain = [None] if None in choices(op, net.device) else []
    # Of each kind of scale that rows do not share, for that carries the poison to all of them
    kept = {
        (f.reach, f.small): f
        for f in reversed(formats(op, net.device))
        if f.ways == "row" and f.reach in ("block", "row")
    }
    for fmt in (*plain, *kept.values()):
        case = draw(op, net, 3, torch.float32, {**SMALL, "tokens": 6}, {"out_format": fmt, **unpacked(op)}, full=True)
        values = {**case.values, "out_format": fmt} if fmt is not None else case.values
        with net.kernels():
            clean = outcome(op, values)
        shaped = {n: t for n, t in row_arguments(op, values).items() if t.is_floating_point()}
        poisons = (float("nan"), float("inf"), float("-inf")) if fmt is None else (float("nan"), float("inf"))
        for (name, t), poison in itertools.product(shaped.items(), poisons):
            bad, row = t.clone(), min(2, t.shape[0] - 1)
            bad[row].reshape(-1)[-1 if poison > 0 else 0] = poison
            with net.kernels():
                dirty = outcome(op, {**values, name: bad}, grads=clean.grads)
            label = f"{case.label}: {poison} in row {row} of {name}" + (f", {fmt}" if fmt else "")
            assert t.shape[0] > 1, f"{label}: it has no other row"
            _rows_kept(op, label, clean, dirty, t.shape[0], row, fmt is not None and fmt.small)


def _rows_kept(op: Op, label: str, clean: Outcome, dirty: Outcome, count: int, row: int, small: bool = False) -> None:
    """All rows but one are the same in two outcomes; `small`: scales are those of small blocks, which lie row by row."""
    others = [i for i in range(count) if i != row]
    for part, before in clean.items():
        argument = part.removesuffix(" after").removeprefix("d_")
        if part not in op.results and argument in op.signature.names and not _has_rows(rule_of(op, argument)):
            continue  # pages of a cache, of which the row says what changes, or a number of each head, a sum over all rows
        after = dirty[part]
        if part.endswith(".scale") and before.dim() == 2 and not small:  # one column of scales per row
            before, after = before.t(), after.t()
        if before.dim() and before.shape[0] == count:
            same_bits(f"{label}: other rows of {part}", after[others], before[others])


def _has_rows(rule: Any) -> bool:
    """Whether an argument has one row per token, or may have."""
    return row_shaped(rule) or _leads(rule)


@of_the_op("each formula has its own NaN and its own ways to lose one")
def special_values(op: Op, net: Net) -> None:
    """NaN, infinities, zeros and subnormals at the first, last and a tail element: NaN just where the reference has it."""
    case = draw(op, net, 5, torch.float32, {**SMALL, "hidden": 65}, ungrouped(op))
    for name, t in row_arguments(op, case.values).items():
        if not (t.is_floating_point() and t.dim() > 1):
            continue
        depends = functools.cache(functools.partial(_depends, op, case.values, name))
        for value, at in itertools.product((float("nan"), float("inf"), float("-inf"), -0.0, 1e-42), (0, -1, 64)):
            if at >= t.numel():
                continue
            bad = t.clone()
            bad.reshape(-1)[at] = value
            values = {**case.values, name: bad}
            with net.kernels(), torch.no_grad():
                actual = as_tuple(op.function(**fresh(op, values)))
            agreed = contract(op, values, dict(zip(op.results, actual)))
            for part, result, exact in zip(op.results, actual, truth(op, values, [], torch.float32).values()):
                if isinstance(result, tw.Quantized):
                    result, exact = result.dequantize(), values["out_format"].quantize(exact).dequantize()
                found, wanted = (specified(agreed, part, t).isnan() for t in (result.cpu(), exact))
                label = f"{case.label}: {value} at {at} of {name}: {part}"
                if op.bars.felt:
                    _felt(op, values, label, part, found, wanted, depends(at)[part])
                    continue
                assert torch.equal(found, wanted), (
                    f"{label} has {int(found.sum())} NaN, the reference {int(wanted.sum())}"
                )


def _depends(op: Op, values: Mapping[str, Any], name: str, at: int) -> dict[str, Tensor]:
    """Which elements of each result depend on an element of an argument: those that two values of it make differ."""
    made = []
    for value in (0.25, 1.75):
        moved = values[name].double()
        moved.reshape(-1)[at] = value
        made.append(truth(op, {**values, name: moved}, []))
    return {part: made[0][part] != made[1][part] for part in made[0]}


def _felt(
    op: Op, values: Mapping[str, Any], label: str, part: str, found: Tensor, wanted: Tensor, depends: Tensor
) -> None:
    """NaN that may show along `felt` dimensions: it is found where the result depends on its cause, and in no slice along these
    dimensions that has none in the reference."""
    axes = [i for i, dim in enumerate(op.rows(values)[part].dims) if dim in op.bars.felt]
    missing, stray = wanted & depends & ~found, found & ~wanted.any(axes, keepdim=True)
    assert not bool(missing.any()), f"{label} lost {int(missing.sum())} of {int((wanted & depends).sum())} NaN"
    assert not bool(stray.any()), f"{label} has {int(stray.sum())} NaN in slices where the reference has none"


# ---------------------------------------------------------------- memory


@of_the_op("each op's host code passes strides, and each kernel multiplies by them")
def strides(op: Op, net: Net) -> None:
    """Every layout of every tensor argument, and of each upstream gradient, gives the bits that a contiguous one gives: each of
    them alone in one layout, then all at once, no two in the same one, until each was in all of them. What one alone changes is
    what host code does; where that is the same for every chip, the interpreter's net has seen it, and a GPU compiles no binaries
    for it."""
    case, single = (draw(op, net, 11, torch.bfloat16, {**SMALL, "tokens": n}, full=True) for n in (6, 1))
    with net.kernels():
        plain = outcome(op, case.values)
        places = list(_places(op, case, plain))
        for place in places if net.interpreter or op.composite or len(op.implementations) > 1 else ():
            _laid_out(op, case, plain, {place: "every other column"})
        for some in (
            layouts.KEEPING,
            layouts.EXPANDED,
        ):  # apart, for what changes no value is compared with the plain call
            for turn in range(len(some)):
                _laid_out(op, case, plain, {place: some[(turn + i) % len(some)] for i, place in enumerate(places)})
        plain = plain if single.dims == case.dims else outcome(op, single.values)  # of an op whose rows are no tokens
        _laid_out(op, single, plain, dict.fromkeys(_places(op, single, plain), "size one"))


def _places(op: Op, case: Case, plain: Outcome) -> dict[str, Tensor]:
    """The tensor arguments of a call and its upstream gradients, by name."""
    return {**tensors(op, case.values), **{f"gradient {i}": g for i, g in enumerate(plain.grads) if g is not None}}


def _written_once(op: Op, place: str, t: Tensor) -> bool:
    """Whether elements of an argument may not be one: those that a call writes share no memory, and of two that are written to one
    place, because indices name it twice, it is not said which stays."""
    return place in op.writes or (bool(op.writes) and not t.is_floating_point())


def _laid_out(op: Op, case: Case, plain: Outcome, chosen: Mapping[str, str]) -> None:
    """A call with tensors in these layouts gives the bits of one whose tensors are contiguous and hold the same."""
    there = _places(op, case, plain)
    views = {
        place: layouts.LAYOUTS[name](there[place])
        for place, name in chosen.items()
        if not ("expanded" in name and _written_once(op, place, there[place]))
    }
    views = {place: view for place, view in views.items() if view is not None}
    if not views:
        return

    def called(some: Mapping[str, Tensor]) -> tuple[dict[str, Any], Outcome]:
        values = put(case.values, {n: t for n, t in some.items() if not n.startswith("gradient ")})
        return values, outcome(op, values, grads=[some.get(f"gradient {i}", g) for i, g in enumerate(plain.grads)])

    same = all(torch.equal(bits(view), bits(there[place])) for place, view in views.items())
    expected = plain if same else called({place: view.contiguous().clone() for place, view in views.items()})[1]
    label = ", ".join(f"{place} {chosen[place]}" for place in views)
    values, actual = called(views)
    same_outcome(f"{case.label}: {label}", actual, expected, op, values, True)


@of_the_op("each op's host code flattens rows")
def leading(op: Op, net: Net) -> None:
    """Any number of leading dimensions: the bits of the flattened call."""
    case = draw(op, net, 12, torch.float32, {**SMALL, "tokens": 6}, ungrouped(op), full=True)
    names = [n for n in tensors(op, case.values) if n in with_rows(op, case.values) and _leads(rule_of(op, n))]
    if not names:
        return
    with net.kernels():
        flat = outcome(op, case.values)
        for shape in ((2, 3), (1, 2, 3), (3, 1, 2)):
            lifted = {n: case.values[n].reshape(*shape, *case.values[n].shape[1:]) for n in names}
            grads = [g.reshape(*shape, *g.shape[1:]) if g.dim() and g.shape[0] == 6 else g for g in flat.grads]
            turned = {n: t.transpose(0, 1).contiguous().transpose(0, 1) for n, t in lifted.items()}
            for label, given in (("contiguous", lifted), ("not mergeable", turned)):
                actual = outcome(op, {**case.values, **given}, grads=grads)
                for part, expected in flat.items():
                    same_bits(f"{case.label}: {shape} {label}: {part}", actual[part].reshape(expected.shape), expected)


def _leads(rule: Any) -> bool:
    """Whether leading dimensions of a tensor may be any number."""
    return rule.leading or rule.spread


@of_the_op("each op's host code passes the strides of its results")
def outs(op: Op, net: Net) -> None:
    """Memory for results is filled and returned, in any layout that shares none, for all of them or one: its bits are those of
    a call that allocates, and nothing between the elements is touched. So is an argument that a result may lie on."""
    if not op.result_rows:
        return
    case = draw(op, net, 13, torch.float32, {**SMALL, "tokens": 6, "hidden": 34, "columns": 34}, ungrouped(op))
    with net.kernels(), torch.no_grad():
        plain = as_tuple(op.function(**fresh(op, case.values)))
        if op.signature.listed:
            _list_outs(op, case, plain[0])
            return
        if None in choices(op, net.device):
            dense = {"dense": torch.clone, "one element further": layouts.one_further}
            strided = not {*op.result_rows} <= {*op.out.contiguous}
            for name, make in {**dense, **(layouts.LAYOUTS if strided else {})}.items():
                if "expanded" not in name and name != "size one":
                    _outs_in(op, case, plain, name, make)
            for result, arguments in op.out.lies_on.items():
                for argument in arguments:
                    _out_over(op, case, plain, result, argument)
        for fmt in kinds(op, net.device):
            if not holds(op, fmt, case.values):
                continue
            expected = as_tuple(op.function(**{**fresh(op, case.values), "out_format": fmt}))
            groups = expected[0].offsets
            out = fmt.empty(
                plain[0].shape, plain[0].dtype, plain[0].device, 0 if groups is None else len(groups), groups
            )
            given = (out, *(None for _ in plain[1:]))
            for _ in range(2):  # recorded, then replayed
                values = {**fresh(op, case.values), "out_format": fmt, "out": given if plain[1:] else out}
                made = as_tuple(op.function(**values))
                assert made[0] is out, f"{case.label}: out in {fmt} was not returned"
                agreed = contract(op, {**case.values, "out_format": fmt}, dict(zip(op.results, expected)))
                name = op.results[0]
                there, here = ({f"{name}{tail}": t for tail, t in pieces(q).items()} for q in (expected[0], out))
                for part, wanted in there.items():
                    found, wanted = (specified(agreed, part, t) for t in (here[part], wanted))
                    same_bits(f"{case.label}: out in {fmt}: {part}", found, wanted)


def _outs_in(op: Op, case: Case, plain: tuple, name: str, make: Callable[[Tensor], Tensor | None]) -> None:
    """`out` in one layout: all results, where it is dense or has gaps twice, recorded and replayed, and each alone."""
    agreed = contract(op, case.values, dict(zip(op.results, plain)))

    def memory_for(result: str, like: Tensor) -> Tensor:
        dense = torch.zeros_like(like, memory_format=torch.contiguous_format)
        made = None if result in op.out.contiguous and name != "one element further" else make(dense)
        return dense if made is None else made

    given = [memory_for(result, like) for result, like in zip(op.results, plain)]
    guards = [memory.Gaps(t) for t in given]
    alone = [[t if i == k else None for i, t in enumerate(given)] for k in range(len(given))]
    alone = alone if plain[1:] and name == "dense" else []
    for outs in (given, *([given] if name in ("dense", "every other column") else []), *alone):
        label = f"{case.label}: out {name}" + (f" {[t is not None for t in outs]}" if plain[1:] else "")
        chosen = [t for t in outs if t is not None]
        for t in chosen:
            t.fill_(float("nan") if t.is_floating_point() else 1)
        versions = [t._version for t in chosen]
        made = as_tuple(op.function(**{**fresh(op, case.values), "out": tuple(outs) if plain[1:] else outs[0]}))
        for result, out, found, wanted in zip(op.results, outs, made, plain):
            assert out is None or found is out, f"{label}: {result} was not returned"
            same_bits(f"{label}: {result}", *(specified(agreed, result, t) for t in (found, wanted)))
        moved = all(t._version > v for t, v in zip(chosen, versions))
        assert moved, f"{label}: writing out does not show in its version"
    for guard, result in zip(guards, op.results):
        guard.check(f"{case.label}: out {name}: {result}")


def _out_over(op: Op, case: Case, plain: tuple, result: str, argument: str) -> None:
    """A result in the memory of an argument that it may lie on."""
    at = op.results.index(result)
    if not isinstance(case.values[argument], Tensor) or case.values[argument].dtype != plain[at].dtype:
        return
    for _ in range(2):
        over = case.values[argument].clone()
        outs = [over if i == at else None for i in range(len(plain))]
        values = {**case.values, argument: over, "out": tuple(outs) if plain[1:] else over}
        made = as_tuple(op.function(**values))
        assert made[at] is over, f"{case.label}: {result} over {argument} was not returned"
        for name, found, wanted in zip(op.results, made, plain):
            same_bits(f"{case.label}: {result} over {argument}: {name}", found, wanted)


def _list_outs(op: Op, case: Case, plain: list[Tensor]) -> None:
    """`out` as a list: in every layout, and over the arguments themselves."""
    source = next(n for n in op.signature.tensors if isinstance(case.values[n], list))
    for name, make in layouts.LAYOUTS.items():
        if "expanded" in name:
            continue
        for over in (False, True):
            given = [make(t.clone()) for t in (case.values[source] if over else plain)]
            outs = [torch.empty_like(p) if t is None else t for t, p in zip(given, plain)]
            if over:
                outs = [t.copy_(v) for t, v in zip(outs, case.values[source])]
            guards, versions = [memory.Gaps(t) for t in outs], [t._version for t in outs]
            values = {**case.values, "out": outs, source: outs if over else case.values[source]}
            made = op.function(**values)
            label = f"{case.label}: out {name}{', over its arguments' * over}"
            assert len(made) == len(outs), f"{label}: {len(made)} results, not {len(outs)}"
            for i, (out, there) in enumerate(zip(outs, plain)):
                assert made[i] is out, f"{label}: out[{i}] was not returned"
                same_bits(f"{label}: out[{i}]", out, there)
                guards[i].check(f"{label}: out[{i}]")
                assert out._version > versions[i], f"{label}: writing out[{i}] does not show in its version"


@of_the_op("each kernel clamps its own indices")
def wild_indices(op: Op, net: Net) -> None:
    """Indices are device data, which no host code can check: whatever they hold, no other row and no other memory is touched."""
    case = draw(op, net, 14, torch.bfloat16, {**SMALL, "tokens": 6}, full=True)
    shaped = row_arguments(op, case.values)
    with net.kernels():
        clean = outcome(op, case.values)
        for n, t in tensors(op, case.values).items():
            if t.dtype not in (torch.int32, torch.int64) or not t.numel():
                continue
            top = torch.iinfo(t.dtype)
            for value in (-1, t.numel() + 1, 1 << 20, top.max, top.min):
                bad = t.clone()
                row = min(2, t.shape[0] - 1) if n in shaped else -1
                bad[row] = value
                label = f"{case.label}: {value} in {n}"
                with memory.guarded_allocations(0xFF) as guards:
                    dirty = outcome(op, {**case.values, n: bad}, grads=clean.grads)
                for guard in guards:
                    guard.check(label)
                if n in shaped:
                    _rows_kept(op, label, clean, dirty, t.shape[0], row)
            if n == op.groups:  # groups that do not reach the last row
                short = {**case.values, n: t.clamp(max=4)}
                check(op, f"{case.label}: {n} end at row 4", short, outcome(op, short))


@of_the_op("each kernel masks its own loads and stores")
def guarded_memory(op: Op, net: Net) -> None:
    """Whatever memory held before and lies around it: same bits, nothing written outside the results, no input written."""
    for seed in range(max(2, net.cases // 3)):
        case = draw(
            op, net, 20 + seed, FLOATS[seed % 3], {"tokens": 7, "hidden": 65} if seed == 0 else None, full=seed % 2 == 0
        )
        fmts = formats(op, net.device)
        values = {**case.values, "out_format": fmts[seed % len(fmts)]} if fmts and seed % 2 else dict(case.values)
        with net.kernels():
            expected = outcome(op, values, seed)
            for fill in memory.FILLS:
                if fill != memory.FILLS[0]:  # replayed allocations on a GPU do not come this way
                    op.plans.clear()
                    op.backward_plans.clear()
                fenced = {n: memory.Fenced(t) for n, t in tensors(op, values).items()}
                grads = [None if g is None else memory.Fenced(g) for g in expected.grads]
                given = put(values, {n: f.tensor for n, f in fenced.items()})
                with memory.guarded_allocations(fill) as guards:
                    actual = outcome(op, given, seed, [g and g.tensor for g in grads])
                label = f"{case.label}: memory filled with {fill:#04x}"
                for n, fence in fenced.items():
                    fence.check(f"{label}: {n}")
                for i, fence in enumerate(grads):
                    if fence is not None:
                        fence.check(f"{label}: upstream gradient {i}")
                for guard in guards:
                    guard.check(label)
                same_outcome(label, actual, expected, op, values)


@of_the_op("each kernel widens its own offsets")
def wide_strides(op: Op, net: Net, source: str = "") -> None:
    """Rows and columns more than 2^31 elements apart, on a view of memory that is never touched; its own process, since a
    32-bit offset may read anywhere. `source` is a file that declares the op, if the library does not."""
    if net.interpreter and hasattr(os, "fork"):  # no GPU's driver lives on in one; else 5 s each
        status, said = wide.in_a_fork(op)
    else:
        command = [sys.executable, "-m", wide.__name__, op.name, net.device, *([source] if source else [])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])}
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300)
        status, said = done.returncode, done.stdout + done.stderr
    assert status == 0, f"{op.name}: status {status}\n{said[-2000:]}"


VALUES: tuple[Callable, ...] = (
    accuracy, sizes, as_in_models, quantised, every_config, isolation, special_values, strides, leading, outs, wild_indices,
    guarded_memory, wide_strides, repeatable, replayed, paths, gradients, modes, repeated_argument, unlike,
)  # fmt: skip
