"""Properties of an op as it meets torch and its callers: errors, fakes, registration, torch.compile, gradients of the reference."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

from ..core.format import Quantized
from ..op import Op
from . import malformed
from .cases import SMALL, Net, choices, draw, formats, put, tensors, ungrouped
from .families import of_the_machinery, of_the_op
from .oracle import (
    Outcome,
    as_tuple,
    differentiate,
    fresh,
    leaves,
    lift,
    outcome,
    pieces,
    same_bits,
    same_outcome,
    upstream,
)

FEWEST = 20  # malformed calls per op

ALL_CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@of_the_op("`where` and `check` are the op's own", "reference")
@of_the_machinery("they are checked before anything asks for a kernel", "kernels")
def refusals(op: Op, net: Net) -> None:
    """Malformed calls raise TypeError or ValueError naming the argument, before anything is written or remembered."""
    case = draw(op, net, 80, torch.float32, SMALL, full=True)
    with net.kernels(), torch.no_grad():
        good = named(op, op.function(**fresh(op, case.values)))
    kept = {n: t.clone() for n, t in tensors(op, case.values).items()}
    bad = list(malformed.calls(op, case.values))
    assert len(bad) >= FEWEST, f"{op.name}: only {len(bad)} malformed calls, {FEWEST} wanted"
    wrong = []
    for call in bad:
        try:
            with net.kernels():
                op.function(*call.args, **call.kwargs)
            wrong.append(f"{call.what}: accepted")
        except (TypeError, ValueError) as error:
            if not any(re.search(rf"\b{re.escape(n)}\b", str(error)) for n in call.names):
                wrong.append(f"{call.what}: {type(error).__name__} does not name it: {error}")
        except Exception as error:
            wrong.append(f"{call.what}: {type(error).__name__}: {error}")
    assert not wrong, f"{op.name}: {len(wrong)} of {len(bad)} malformed calls:\n" + "\n".join(w[:300] for w in wrong)
    for n, t in kept.items():
        same_bits(f"{op.name}: {n} after malformed calls", tensors(op, case.values)[n], t)
    with net.kernels(), torch.no_grad():
        again = named(op, op.function(**fresh(op, case.values)))
    same_outcome(f"{op.name}: a good call after malformed ones", again, good, op, case.values)


def named(op: Op, results: Any) -> dict[str, Tensor]:
    return {f"{n}{tail}": t for n, r in zip(op.results, as_tuple(results)) for tail, t in pieces(r).items()}


@of_the_op("a kernel's results lie in memory as its host code lets them", "kernels")
@of_the_machinery(
    "without kernels both are the reference, and only the flattening between them can be wrong", "reference"
)
def fakes(op: Op, net: Net) -> None:
    """Fake tensors give the shapes, strides, dtypes and devices of what really comes, gradients included."""
    for seed in range(4):
        some = choices(op, net.device)
        fmt = some[seed % len(some)]
        case = draw(op, net, 90 + seed, torch.bfloat16, SMALL if seed % 2 else None, {"out_format": fmt}, full=seed > 1)
        values = {**case.values, "out_format": fmt} if fmt else dict(case.values)
        with net.kernels():
            real = outcome(op, values, gradients=not op.writes)
        with FakeTensorMode() as mode:
            unreal = put(values, {n: mode.from_tensor(t) for n, t in tensors(op, values).items()})
            if fmt is not None and fmt.tensor is not None:
                unreal["out_format"] = fmt.bare().with_scale(mode.from_tensor(fmt.tensor))
            grads = [None if g is None else mode.from_tensor(g) for g in real.grads]
            fake = outcome(op, unreal, grads=grads, gradients=not op.writes)
        assert fake.keys() == real.keys(), f"{case.label}: {sorted(fake)}, not {sorted(real)}"
        _as_declared(op, case.label, values, real)
        for name, t in real.items():
            found, wanted = (kind_of(u) for u in (fake[name], t))
            assert found == wanted, f"{case.label}: fake {name} is {found}, really {wanted}"


def _as_declared(op: Op, label: str, values: Mapping[str, Any], real: Mapping[str, Tensor]) -> None:
    """Results have the shape and the dtype that their rows say; what is quantised has a shape of its own."""
    for name, (shape, dtype) in op.expected(values).items():
        if name in real:
            found = tuple(real[name].shape), real[name].dtype
            assert found == (tuple(shape), dtype), f"{label}: {name} is declared {(tuple(shape), dtype)}, is {found}"


def kind_of(t: Tensor) -> tuple:
    """What torch.compile relies on; the stride of a dimension of one element means nothing."""
    return t.shape, tuple(s for n, s in zip(t.shape, t.stride()) if n > 1), t.dtype, t.device


def checks_of(values: Iterable[Any]) -> tuple[str, ...]:
    """torch compares arguments before and after by arithmetic, of which float8 has none."""
    codes = any(isinstance(v, Tensor) and v.is_floating_point() and v.element_size() == 1 for v in values)
    return ("test_autograd_registration", "test_faketensor") if codes else ALL_CHECKS


@of_the_machinery("schema, autograd and fake are made from the declaration, for every op alike")
def registered(op: Op, net: Net) -> None:
    """torch's own check of the registered op and of its backward: schema, mutation, autograd, fake, AOT with dynamic shapes."""
    # Every row is a token's: torch compares whole results, and rows that are nobody's hold whatever memory held
    case = draw(op, net, 100, torch.float32, SMALL, {"best": True, "form": "best"}, full=True)
    numbers = {n: v for n, v in case.values.items() if n not in ("out", "out_format")}
    inputs = leaves(op, case.values)
    flat = list({**numbers, **inputs}.values())
    every = checks_of(flat)
    with net.kernels():
        if None in choices(op, net.device):
            torch.library.opcheck(op.overloads["default"], flat, test_utils=every)
        for fmt in formats(op, net.device)[:1]:
            # torch's AOT check sums every result, which CPU float8 cannot; `compiled` goes that way instead
            kinds = [kind for kind in every if kind != "test_aot_dispatch_dynamic"]
            torch.library.opcheck(op.overloads["quantized"], [*flat, fmt.key], test_utils=kinds)
        if not op.result_rows:
            return
        with torch.no_grad():
            results = as_tuple(op.function(**fresh(op, case.values)))
        if isinstance(results[0], Quantized):
            return  # memory for a quantised result is for eager calls alone
        single = len(results) == 1
        like = [[torch.empty_like(t) for t in r] if op.signature.listed else torch.empty_like(r) for r in results]
        given = {"out" if single else f"out_{name}": t for name, t in zip(op.results, like)}
        plain = [v.detach() if isinstance(v, Tensor) else v for v in flat]
        memory = [t for r in like for t in (r if op.signature.listed else [r])]
        torch.library.opcheck(op.overloads["out"], plain, given, test_utils=checks_of([*flat, *memory]))


@of_the_op("a reference that asks for a size as a number makes torch compile anew for each")
def traced(op: Op, net: Net) -> None:
    """torch.compile(fullgraph=True) gives the bits of eager for many shapes with one compilation."""
    # Of a number that may change torch makes one that may not, and traces the call once more; `compiled` goes that way
    with torch._dynamo.config.patch(specialize_float=True):
        _compiled(op, net, choices(op, net.device)[0], dynamic=True)


@of_the_machinery("packing, unpacking and the choice of an overload under torch.compile are the public function's")
def compiled(op: Op, net: Net) -> None:
    """torch.compile(fullgraph=True) gives the bits of eager, plain and in a format, for one shape and for many."""
    for fmt in choices(op, net.device)[:2]:
        for dynamic in (False, True):
            _compiled(op, net, fmt, dynamic)


def _compiled(op: Op, net: Net, fmt: Any, dynamic: bool) -> None:
    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    case = draw(op, net, 110, torch.float32, SMALL, {"out_format": fmt, **ungrouped(op)}, full=True)
    chosen = {"out_format": fmt} if fmt else {}
    fixed = {n: v for n, v in case.values.items() if not isinstance(v, (Tensor, list))}

    def call(given: Mapping[str, Tensor]) -> Any:
        return op.function(**{**fixed, **chosen, **given})

    made = torch.compile(call, fullgraph=True, dynamic=dynamic, backend=counter)
    first = 0  # graphs of the first call: torch may start it over, but later shapes must add none
    for tokens in (11, 9, 14) if dynamic else (5,):  # 11 is the size of nothing else: to torch equal sizes are one
        again = draw(op, net, 111 + tokens, torch.float32, {**case.dims, "tokens": tokens}, case.options)
        values = {**again.values, **fixed, **chosen}
        with net.kernels():
            expected = outcome(op, values, gradients=not op.writes)
            inputs = {} if op.writes else leaves(op, values)
            given = fresh(op, values)
            moving = {n: v for n, v in given.items() if n in op.signature.tensors and v is not None}
            results = as_tuple(made({**moving, **inputs}))
            actual = Outcome({n: t.detach() for n, t in named(op, results).items()})
            actual.update({f"{n} after": moving[n] for n in op.writes if n in moving})
            if inputs:
                found = differentiate(op, results, inputs, upstream(op, results))
                actual.update({f"d_{n}": g for n, g in found.items() if g is not None})
        same_outcome(f"{again.label}: compiled, dynamic={dynamic}, {fmt}", actual, expected, op, values)
        first = first or counter.frame_count
    assert counter.frame_count == first, f"{case.label}: new shapes were compiled anew"


@of_the_op("each reference is its own formula")
def reference_gradients(op: Op, net: Net) -> None:
    """The gradients of the reference against finite differences, in float64."""
    for seed in range(2):
        # Two calls for each element of each argument
        dims = {**SMALL, "tokens": 3, "hidden": 4, "vocab": 5, "head_dim": 4}
        case = draw(op, Net(), 120 + seed, torch.float64, dims, ungrouped(op), full=seed == 0)
        values = {n: lift(v, torch.float64) for n, v in case.values.items()}
        inputs = leaves(op, values)
        if not inputs or None not in choices(op, net.device) or op.bars.steps:
            return  # there is nothing to differentiate, or it is a rounding

        def call(*given: Tensor, values: Any = values, inputs: Any = inputs) -> tuple:
            results = as_tuple(op.reference(**{**op.arguments(values), **dict(zip(inputs, given))}))
            return tuple(results[i] for i in op.graded_results)

        assert torch.autograd.gradcheck(call, tuple(inputs.values())), case.label


FACES = (refusals, fakes, registered, traced, compiled, reference_gradients)
