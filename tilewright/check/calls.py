"""Properties of calling an op: the same result however, whenever and with whatever gradients it is called."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ..op import Op
from ..runtime import register
from .cases import SMALL, Case, Net, choices, draw, put, tensors, ungrouped
from .compare import check
from .families import of_the_machinery, of_the_op
from .oracle import (
    FLOATS,
    Outcome,
    as_tuple,
    bits,
    contract,
    copied,
    differentiate,
    fresh,
    leaves,
    nearly_same,
    outcome,
    pieces,
    same_bits,
    same_outcome,
    specified,
    upstream,
)


@of_the_op("each kernel may race, and each host code may keep something from the last call")
def repeatable(op: Op, net: Net) -> None:
    """The same bits every time, also with the programs run in another order."""
    for seed in range(2):
        case = draw(op, net, 30 + seed, FLOATS[seed], {"tokens": 45, "hidden": 40} if seed else None, full=True)
        with net.kernels():
            first = outcome(op, case.values)
            for _ in range(2 if net.interpreter else 20):
                same_outcome(f"{case.label}: again", outcome(op, case.values), first, op, case.values)
            if net.interpreter:
                from ..toolchain.interpret import reversed_programs

                with reversed_programs():
                    actual = outcome(op, case.values)
                same_outcome(f"{case.label}: programs backwards", actual, first, op, case.values)


@of_the_op("host code that reads what a tensor holds, or the clock, is frozen in its plan")
def replayed(op: Op, net: Net) -> None:
    """What was recorded of one call gives the next one, with other data, its own result: forward and backward."""
    case = draw(op, net, 40, torch.bfloat16, SMALL, full=True)
    other = draw(op, net, 41, torch.bfloat16, case.dims, case.options)
    with net.kernels():
        outcome(op, case.values)
        actual = outcome(op, other.values, 1)
        again = outcome(op, case.values, 2)
    check(op, f"{other.label}: replayed", other.values, actual)
    check(op, f"{case.label}: replayed", case.values, again)


@of_the_machinery("the ways to call are the public function's and the registered op's, for every op alike")
def paths(op: Op, net: Net) -> None:
    """Recorded, replayed, by keyword in any order, with gradients, through the registered op: one result."""
    for fmt in choices(op, net.device)[:2]:
        case = draw(op, net, 40, torch.bfloat16, SMALL, {"out_format": fmt}, full=True)
        other = draw(op, net, 41, torch.bfloat16, case.dims, case.options)
        chosen = {"out_format": fmt} if fmt else {}
        calls = [{**drawn.values, **chosen} for drawn in (case, other)]
        with net.kernels():
            expected = [outcome(op, values) for values in calls]
            for turn, (values, right) in itertools.product(range(3), zip(calls, expected)):
                for label, made in _ways_to_call(op, values, backwards=bool(turn)):
                    agreed = contract(op, values, right)
                    for name, t in made.items():
                        pair = specified(agreed, name, t), specified(agreed, name, right[name])
                        same_bits(f"{case.label}: {label}, turn {turn}: {name}", *pair)


def _ways_to_call(op: Op, values: Mapping[str, Any], backwards: bool) -> Iterator[tuple[str, dict[str, Tensor]]]:
    def named(results: Any) -> dict[str, Tensor]:
        return {f"{n}{tail}": t for n, r in zip(op.results, as_tuple(results)) for tail, t in pieces(r).items()}

    first = op.signature.names[: op.signature.positional]
    order = list(values)[::-1] if backwards else list(values)
    with torch.no_grad():  # each over arguments of its own, for those that are written another call would find changed
        given = fresh(op, values)
        yield "by keyword", named(op.function(**{n: given[n] for n in order}))
        given = fresh(op, values)
        yield (
            "by position",
            named(op.function(*[given[n] for n in first], **{n: given[n] for n in order if n not in first})),
        )
        yield "registered", named(register.call(op, fresh(op, values)))


@of_the_op("each backward decides what to leave out when a gradient is not wanted or not given")
def gradients(op: Op, net: Net) -> None:
    """What autograd may ask: one upstream gradient for two results, twice over one graph, some arguments only, some results
    only, zeros, twice as much."""
    case = draw(op, net, 50, torch.float32, {**SMALL, "tokens": 6}, ungrouped(op), full=True)
    inputs = leaves(op, case.values)
    if not inputs or case.values.get(op.overwrites):
        return
    with net.kernels():
        expected = outcome(op, case.values)
        grads = expected.grads
        results = as_tuple(op.function(**{**case.values, **inputs}))
        for turn in range(2):
            _same_gradients(
                f"{case.label}: turn {turn} over one graph", op, results, inputs, grads, expected, retain_graph=True
            )
        for name in inputs:
            alone = {**case.values, name: inputs[name]}
            made = as_tuple(op.function(**alone))
            _same_gradients(f"{case.label}: only {name}", op, made, {name: inputs[name]}, grads, expected)
        double = [None if g is None else 2 * g for g in grads]
        twice = Outcome({n: 2 * t if n.startswith("d_") else t for n, t in expected.items()})
        same_outcome(
            f"{case.label}: twice the gradient", outcome(op, case.values, grads=double), twice, op, case.values
        )
        zero = outcome(op, case.values, grads=[None if g is None else torch.zeros_like(g) for g in grads])
        for n, t in zero.items():
            assert not n.startswith("d_") or not bool(t.any()), f"{case.label}: zero upstream, {n} is not zero"
        _shared_gradient(op, case, grads)
        for only, registered in itertools.product(range(len(grads)) if len(grads) > 1 else (), (False, True)):
            some = [g if i == only else None for i, g in enumerate(grads)]
            label = f"{case.label}: only {op.results[op.graded_results[only]]} used" + registered * ", registered op"
            check(op, label, case.values, outcome(op, case.values, grads=some, registered=registered))


def _same_gradients(
    label: str, op: Op, results: tuple, inputs: dict, grads: list, expected: Outcome, **options: Any
) -> None:
    """Equal bit for bit; but on a GPU a backward that gives fewer gradients is other machine code, whose sums may go otherwise."""
    found = differentiate(op, results, inputs, grads, **options)
    fewer = len(found) < sum(n.startswith("d_") for n in expected)
    for n, t in found.items():
        assert t is not None, f"{label}: there is no d_{n}"
        (nearly_same if fewer and t.is_cuda else same_bits)(f"{label}: d_{n}", t, expected[f"d_{n}"])


def _shared_gradient(op: Op, case: Case, grads: list) -> None:
    """One tensor as the gradient of several results, then several: no plan may take one for the other."""
    shapes = {(g.shape, g.dtype) for g in grads}
    if len(grads) < 2 or len(shapes) > 1:
        return
    first = grads[0]
    apart = outcome(op, case.values, grads=[first.clone() for _ in grads])
    kept = first.clone()
    for _ in range(2):
        same_outcome(f"{case.label}: one gradient for all", outcome(op, case.values, grads=[first] * len(grads)), apart)
    assert torch.equal(bits(first), bits(kept)), f"{case.label}: the upstream gradient was written"
    again = outcome(op, case.values, grads=grads)
    check(op, f"{case.label}: after one gradient for all, one each", case.values, again)


@of_the_machinery("the key of a plan holds all that host code reads, for every op alike")
def unlike(op: Op, net: Net) -> None:
    """Calls of equal shapes that differ in numbers, dtype, format or in which gradients are wanted: no plan may take one for
    another."""
    some = choices(op, net.device)
    kinds = [
        (170, torch.bfloat16, 0),
        *((seed, torch.float32, at) for seed, at in ((171, 0), (172, 1), (172, 2), (173, 0))),
    ]
    for seed, dtype, at in kinds:
        fmt = some[at % len(some)]
        case = draw(op, net, seed, dtype, SMALL, {"out_format": fmt, **ungrouped(op)}, full=True)
        values = {**case.values, "out_format": fmt} if fmt is not None else case.values
        with net.kernels():
            with torch.no_grad():
                op.function(**values)
            for name, leaf in list(leaves(op, values).items())[:1]:  # fewer gradients than the next call
                results = as_tuple(op.function(**{**values, name: leaf}))
                differentiate(op, results, {name: leaf}, upstream(op, results))
            actual = outcome(op, values, seed)
        check(op, f"{case.label}: after others, {fmt}", values, actual)


@of_the_op("each host code copies what lies otherwise than its kernels read, and torch may call a copy a view")
def modes(op: Op, net: Net) -> None:
    """In inference mode, without gradients, with them, and back: the same bits, and gradients. Each call is over other memory, as
    drawn and spread out, so that a plan which takes a copy for a part of an argument reads what is not there."""
    case = draw(op, net, 46, torch.bfloat16, {**SMALL, "tokens": 4}, ungrouped(op), full=True)
    given = {n: t for n, t in tensors(op, case.values).items() if t.dim() and n not in op.writes}
    spread = {n: t.unsqueeze(-1).repeat(*[1] * t.dim(), 2)[..., 0] for n, t in given.items()}
    for label, values in ((case.label, case.values), (f"{case.label}, spread out", put(case.values, spread))):
        with net.kernels():
            _in_every_mode(op, label, values)


def _in_every_mode(op: Op, label: str, values: Mapping[str, Any]) -> None:
    expected = None
    order = (torch.inference_mode, torch.no_grad, torch.enable_grad, torch.inference_mode)
    for mode, turn in itertools.product(order, range(3)):
        others = put(values, {n: copied(t) for n, t in tensors(op, values).items()})
        if mode is torch.no_grad and not op.writes:  # of tensors that want gradients elsewhere
            others = {**others, **leaves(op, others)}
        with mode():
            made = outcome(op, others, gradients=mode is torch.enable_grad and not op.writes)
        if mode is torch.enable_grad and turn == 0:
            check(op, f"{label}: with gradients", others, made)
        results = Outcome({n: t for n, t in made.items() if not n.startswith("d_")})
        expected = results if expected is None else expected
        same_outcome(f"{label}: {mode.__name__}, turn {turn}", results, expected, op, values)


@of_the_machinery("the key of a plan tells aliases apart, for every op alike")
def repeated_argument(op: Op, net: Net) -> None:
    """One tensor given for two arguments, then two tensors: no plan may take one for the other."""
    case = draw(op, net, 60, torch.float32, {**SMALL, "tokens": 9}, ungrouped(op), full=True)
    by_kind: dict[Any, list[str]] = {}
    for n, t in tensors(op, case.values).items():
        if n not in op.writes:  # which may share no memory
            by_kind.setdefault((t.shape, t.dtype), []).append(n)
    with net.kernels(), torch.no_grad():
        for names in by_kind.values():
            if len(names) < 2:
                continue
            one = tensors(op, case.values)[names[0]]
            op.function(**fresh(op, put(case.values, dict.fromkeys(names, one))))
            for _ in range(2):
                values = fresh(op, case.values)
                results = as_tuple(op.function(**values))
                actual = Outcome(
                    {f"{n}{tail}": t for n, r in zip(op.results, results) for tail, t in pieces(r).items()}
                )
                actual.update({f"{n} after": values[n] for n in op.writes})
                check(op, f"{case.label}: after {names} were one tensor", case.values, actual)
