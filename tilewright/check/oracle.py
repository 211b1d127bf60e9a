"""What an op's results should be, and how near to it they must come.

Truth is the op's own reference on float64 copies of the very inputs. The bars are relative root-mean-square errors by class
of op, beside a bound on every element and on the share of elements that are not correctly rounded:

    A elementwise · B row reduction · C column reduction · D loss · E, F matrix products · G copies · H backward of A and B ·
    I attention · J its backward · K attention whose weights are codes · L whose scores are of codes

`Bars` says which class an op is of. Noise is what an
honest fp32 computation of the same formula loses to cancellation, measured with the reference in fp32 on slightly moved
inputs: where four times that is more than the bar, it takes the bar's place.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..core.flat import as_tuple
from ..core.format import Format, Quantized
from ..core.signature import Row
from ..op import Op
from ..runtime import register
from .memory import reserve

ROW_DIMS = ("tokens", "batch", "length")
FLOATS = (torch.bfloat16, torch.float16, torch.float32)
IDEAL = 1.66e-3  # relative RMS of bf16 values that are all correctly rounded
SHARE_OF_BF16 = {torch.bfloat16: 1.0, torch.float16: 1 / 8}
JITTERS = 3
SPARSE = 2**20  # times as much memory as elements: of it no more is taken than is written
_where: ContextVar[tuple[str, int]] = ContextVar("where", default=("cpu", JITTERS))


@contextlib.contextmanager
def truth_on(device: str, jitters: int = 1) -> Iterator[None]:
    """Compute the truth on this device, not on the CPU, and the noise from so many jittered inputs: large tensors have many
    elements to take it from."""
    token = _where.set((device, jitters))
    try:
        yield
    finally:
        _where.reset(token)


class Bar(NamedTuple):
    """Relative RMS of bf16 and of fp32 results, and the share of bf16 and fp16 ones that may be rounded to a neighbour; None where
    they come from values that were rounded to their dtype, so that any may."""

    low: float
    single: float
    misrounded: float | None


BARS = {
    "A": Bar(1.70e-3, 3e-7, 0.005),
    "B": Bar(1.70e-3, 5e-7, 0.001),
    "C": Bar(1.70e-3, 2e-6, 0.005),
    "D": Bar(1.70e-3, 2e-6, 0.005),
    "E": Bar(1.75e-3, 2e-5, 0.02),  # fp32 by three TF32 products on tensor cores, which cut off: 1.5e-5 at 2053 terms
    "F": Bar(1.80e-3, 5e-4, 0.10),  # Hopper adds up products of FP8 with 14 bits or so
    "G": Bar(0.0, 0.0, 0.0),
    "H": Bar(2.0e-3, 2e-6, 0.005),
    # Weights are rounded before they multiply values, and their gradients before they multiply keys and queries
    "I": Bar(2.4e-3, 1e-5, None),
    "J": Bar(4.0e-3, 1e-5, None),
    # Weights are codes when they multiply values: e4m3 has errors of 2.6 %
    "K": Bar(3e-2, 3e-2, None),
    # Scores from FP8 codes, of whose products Hopper's tensor cores keep some 14 bits in sums: the lse of a row that sees one key
    # is such a sum, as in class F
    "L": Bar(2.4e-3, 5e-4, None),
    # As J, but from such gradients come those of fp32 arguments beside 16-bit ones as well: a sum of terms that nearly cancel
    "M": Bar(4.0e-3, 1e-5, None),
}
PRODUCTS = ("E", "F", "I", "J", "K", "L", "M")
FLUSHED = torch.finfo(torch.float32).tiny  # a GPU's exponentials, reciprocals and roots take what is smaller for 0


def result_bar(op: Op, values: Mapping[str, Any] | None = None) -> Bar:
    kind = op.bars.kind
    if values is not None and any(is_code(v) for v in values.values()):
        kind = op.bars.codes or kind
    bar = BARS[kind]
    return bar if op.bars.misrounded is None else bar._replace(misrounded=op.bars.misrounded)


def is_code(value: Any) -> bool:
    """FP8, of which tensor cores add up products less precisely, and which has no gradient: autograd would round that to FP8."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.element_size() == 1


def gradient_bar(op: Op, name: str, values: Mapping[str, Any] | None = None) -> Bar:
    """That of an argument's gradient. Behind sums of codes it is as far off as these are."""
    if op.bars.codes is not None and any(is_code(v) for v in (values or {}).values()):
        return BARS[op.bars.codes]
    rule = next(p.rule for p in op.signature.parameters if p.name == name)
    product = op.bars.kind in PRODUCTS  # whose gradients are products too, those of parameters included
    return BARS[op.bars.gradient if row_shaped(rule) or product else "C"]


def rounded_results(op: Op) -> tuple[str, ...]:
    """Results that go on from values rounded to the dtype of the arguments."""
    return op.bars.rounds if isinstance(op.bars.rounds, tuple) else ()


def row_shaped(rule: Any) -> bool:
    """Whether an argument with this rule has one row per token."""
    return isinstance(rule, Row) and not rule.many and (rule.leading or (bool(rule.dims) and rule.dims[0] in ROW_DIMS))


def with_rows(op: Op, values: Mapping[str, Any]) -> frozenset[str]:
    """The tensor arguments of a call with one row per token: those that always have, and those that might have been broadcast to
    all rows, and have one for each."""
    rules = {p.name: p.rule for p in op.signature.parameters if isinstance(values.get(p.name), Tensor)}
    found = {name for name, rule in rules.items() if row_shaped(rule)}
    heads = {values[n].shape[: values[n].dim() - len(rules[n].dims)] for n in found if rules[n].leading}
    for name, rule in rules.items():
        head = values[name].shape[: values[name].dim() - len(rule.dims)] if getattr(rule, "spread", False) else ()
        if head and any(len(head) == len(other) and head[0] == other[0] for other in heads):
            found.add(name)
    return frozenset(found)


# ---------------------------------------------------------------- running


def pieces(result: Any) -> dict[str, Tensor]:
    """A result as plain tensors: itself, what a Quantized one stores, or those in a list."""
    if isinstance(result, (list, tuple)):
        return {f"[{i}]": t for i, t in enumerate(result)}
    if isinstance(result, Quantized):
        return {f".{name}": t for name, t in zip(result.format.tensor_names, result.tensors())}
    return {"": result}


def leaves(op: Op, values: Mapping[str, Any]) -> dict[str, Tensor]:
    """The differentiable arguments as leaves over the same memory."""
    given = {n: values[n] for n in op.differentiable if isinstance(values[n], Tensor)}
    return {n: v.detach().requires_grad_() for n, v in given.items() if v.is_floating_point() and not is_code(v)}


def upstream(op: Op, results: tuple, seed: int = 0) -> list[Tensor | None]:
    """Gradients of the results: random, uneven between rows, an eighth of them zero, and never 1."""
    made: list[Tensor | None] = []
    for i in op.graded_results:
        like = results[i]
        where = _where.get()[0]
        drawn = {"generator": torch.Generator(where).manual_seed(1000 * seed + i), "device": where}
        g = torch.randn(like.shape, **drawn)
        if like.dim() > 0:
            g = g * torch.exp2(torch.randint(-2, 3, like.shape[:1], **drawn)).reshape(-1, *[1] * (like.dim() - 1))
            g = torch.where(torch.rand(like.shape, **drawn) < 0.125, 0.0, g)
        made.append(g.to(like.dtype).to(like.device))
    return made


def differentiate(
    op: Op, results: tuple, inputs: Mapping[str, Tensor], grads: list, **options: Any
) -> dict[str, Tensor | None]:
    """Gradients of `inputs` by name; a grad of None leaves that result out."""
    pairs = [(results[i], g) for i, g in zip(op.graded_results, grads) if g is not None and results[i].requires_grad]
    if not pairs:
        return {}
    found = torch.autograd.grad(
        [r for r, _ in pairs], list(inputs.values()), [g for _, g in pairs], allow_unused=True, **options
    )
    return dict(zip(inputs, found))


def fresh(op: Op, values: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments with copies of those that the op writes."""
    return {**values, **{n: copied(values[n]) for n in op.writes if isinstance(values.get(n), Tensor)}}


def copied(t: Tensor) -> Tensor:
    """A tensor of other memory with the same strides, which is written in its place."""
    span = 1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())) if t.numel() else 0
    if t.device.type == "cpu" and span > SPARSE * t.numel():
        return reserve(span, t.dtype, "cpu").as_strided(t.shape, t.stride()).copy_(t)
    return t.new_empty(span).as_strided(t.shape, t.stride()).copy_(t)


class Outcome(dict):
    """Tensors by name, and the upstream gradients that were used."""

    grads: list[Tensor | None] = []


def outcome(
    op: Op,
    values: Mapping[str, Any],
    seed: int = 0,
    grads: list | None = None,
    *,
    registered: bool = False,
    gradients: bool = True,
) -> Outcome:
    """Everything one call and, with `gradients`, its backward give, by name: results, pieces of quantised ones, `d_<argument>`, and
    `<argument> after` of those that are written."""
    inputs = leaves(op, values) if values.get("out") is None and gradients else {}
    given = fresh(op, {**values, **inputs})
    results = as_tuple(register.call(op, given) if registered else op.function(**given))
    made = Outcome(
        {f"{name}{tail}": t.detach() for name, r in zip(op.results, results) for tail, t in pieces(r).items()}
    )
    made.update({f"{n} after": given[n] for n in op.writes if values[n] is not None})
    if inputs:
        made.grads = upstream(op, results, seed) if grads is None else grads
        used = [g.clone() for g in made.grads] if grads is None else grads
        found = differentiate(op, results, inputs, used)
        made.update({f"d_{n}": g for n, g in found.items() if g is not None})
    return made


def lift(value: Any, dtype: torch.dtype | None) -> Any:
    """A tensor where the truth is computed, in `dtype` if it is a float one and that is given."""
    if isinstance(value, (list, tuple)):
        return [lift(t, dtype) for t in value]
    if not isinstance(value, Tensor):
        return value
    value = value.detach().to(_where.get()[0])
    return value.to(dtype) if dtype is not None and value.is_floating_point() else value


def lifted(op: Op, values: Mapping[str, Any], dtype: torch.dtype | None = torch.float64) -> dict[str, Any]:
    """The arguments that the truth is computed from."""
    return {n: None if n == "out_format" else lift(values[n], dtype) for n in op.signature.names}


def truth(
    op: Op, values: Mapping[str, Any], grads: list, dtype: torch.dtype | None = torch.float64
) -> dict[str, Tensor]:
    """Results and gradients by name from the reference in `dtype` (None: as given); of a quantised result, the value before."""
    plain = lifted(op, values, dtype)
    had = leaves(op, values) if grads else {}  # codes, which are numbers by now, have no gradient
    inputs = {n: t for n, t in leaves(op, plain).items() if n in had}
    results, becomes = op.apart(op.reference(**{**plain, **inputs}))
    results = as_tuple(results)
    named = zip(op.results[: len(op.results) - op.hidden], results)
    made = {f"{name}{tail}": t.detach() for name, r in named for tail, t in pieces(r).items()}
    made.update({f"{n} after": t.detach() for n, t in becomes.items() if t is not None})
    given = [None if g is None else g.detach().to(results[i]) for g, i in zip(grads, op.graded_results)]
    found = differentiate(op, results, inputs, given)
    made.update({f"d_{n}": g for n, g in found.items() if g is not None})
    return made


def resumed(op: Op, values: Mapping[str, Any], actual: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments that give the other results, where an op's definition rounds a result and goes on from it."""
    if op.resume is None:
        return dict(values)
    kept = {n: actual[n] for n in op.results if n in op.saves and n in actual}
    made = op.resume(SimpleNamespace(**{**values, **kept}))
    return {n: made[n] for n in op.signature.names}


# ---------------------------------------------------------------- comparing


def bits(t: Tensor) -> Tensor:
    """The bytes of a tensor's elements as integers."""
    kind = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[t.element_size()]
    return t.contiguous().view(kind)


def same_bits(label: str, actual: Tensor, expected: Tensor) -> None:
    """Equal bit for bit; one NaN is as good as another."""
    assert actual.dtype == expected.dtype, f"{label}: {actual.dtype}, not {expected.dtype}"
    assert actual.shape == expected.shape, f"{label}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    wrong = bits(actual) != bits(expected)
    if actual.dtype.is_floating_point:
        wrong &= ~(actual.float().isnan() & expected.float().isnan()) if actual.dtype != torch.float64 else wrong
    if bool(wrong.any()):
        at = tuple(wrong.nonzero()[0].tolist())
        example = f"at {at} {actual[at].item()}, not {expected[at].item()}"
        raise AssertionError(f"{label}: {int(wrong.sum())} of {wrong.numel()} elements differ; {example}")


def nearly_same(label: str, actual: Tensor, expected: Tensor) -> None:
    """Equal but for the order of sums: the last bits of fp32, one step of anything narrower."""
    assert actual.dtype == expected.dtype, f"{label}: {actual.dtype}, not {expected.dtype}"
    if actual.element_size() == 1:
        apart = (bits(actual).int() - bits(expected).int()).abs()
        assert int(apart.max()) <= 1 if apart.numel() else True, f"{label}: codes {int(apart.max())} apart"
    elif actual.dtype.is_floating_point:
        tolerance = {torch.float32: 1e-5, torch.float64: 1e-12}.get(actual.dtype, 2 * torch.finfo(actual.dtype).eps)
        torch.testing.assert_close(
            actual, expected, rtol=tolerance, atol=1e-6, equal_nan=True, msg=lambda m: f"{label}: {m}"
        )
    else:
        same_bits(label, actual, expected)


def same_outcome(
    label: str,
    actual: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    op: Op | None = None,
    values: Mapping[str, Any] | None = None,
    another_binary: bool = False,
) -> None:
    """Equal bit for bit in everything; with `op` and `values`, in everything that the contract of that call speaks of.

    `another_binary`: on a GPU other strides are other machine code, whose sums may go in another order.
    """
    assert actual.keys() == expected.keys(), f"{label}: gave {sorted(actual)}, not {sorted(expected)}"
    agreed = None if op is None or values is None else contract(op, values, expected)
    for name in expected:
        pair = actual[name], expected[name]
        if agreed is not None:
            pair = specified(agreed, name, pair[0]), specified(agreed, name, pair[1])
        on_gpu = another_binary and pair[0].is_cuda
        (nearly_same if on_gpu else same_bits)(f"{label}: {name}", *pair)


def spacing(exact: Tensor, dtype: torch.dtype) -> Tensor:
    """The distance between neighbours of `dtype` at each value."""
    info = torch.finfo(dtype)
    exponent = torch.frexp(exact.abs()).exponent - 1
    return torch.ldexp(torch.full_like(exact, info.eps), exponent).clamp(min=info.tiny * info.eps)


def rms(x: Tensor) -> float:
    return float(x.square().mean().sqrt()) if x.numel() else 0.0


def near(
    label: str,
    actual: Tensor,
    exact: Tensor,
    noise: Tensor,
    bar: Bar,
    negligible: float = 0.0,
    *,
    strict: bool = False,
) -> None:
    """`actual` is `exact` rounded once, but for what `bar` and `noise` (an error per row) allow; or both are `negligible`.

    `strict`: what is misrounded is not left out of the RMS. What is near so is near with any more noise, strict or not.
    """
    assert actual.shape == exact.shape, f"{label}: shape {tuple(actual.shape)}, not {tuple(exact.shape)}"
    actual, rounded = actual.to(exact.device), exact.to(actual.dtype)
    if bar == BARS["G"] or not actual.is_floating_point():
        return same_bits(label, actual, rounded)
    finite = rounded.isfinite()
    same_bits(f"{label}, not finite", actual[~finite], rounded[~finite])
    bad = int((~actual[finite].isfinite()).sum())
    assert bad == 0, f"{label}: {bad} values are not finite"
    negligible = max(negligible, FLUSHED)
    matters = finite & ((exact.abs() > negligible) | (actual.double().abs() > negligible))
    actual, rounded, exact, noise = (t.expand_as(exact)[matters] for t in (actual, rounded, exact, noise))
    if actual.numel():
        noise = noise.clamp(min=negligible / 8)  # no fp32 sum of terms of that size is nearer
        if actual.dtype in SHARE_OF_BF16:
            _near_low(label, actual, rounded, exact, noise, bar, strict)
        else:
            _near_single(label, actual, exact, noise, bar)
    return None


def _near_low(
    label: str, actual: Tensor, rounded: Tensor, exact: Tensor, noise: Tensor, bar: Bar, strict: bool
) -> None:
    error, step = (actual.double() - exact).abs(), spacing(exact, actual.dtype)
    # Where terms of a product cancel, its own precision shows, as it does in an fp32 result
    own = bar.single * rms(exact) if bar in [BARS[kind] for kind in PRODUCTS] else 0.0
    if bar.misrounded is None:
        share = 1.0 if bar == BARS["K"] else SHARE_OF_BF16[actual.dtype]  # codes are as coarse in any dtype
        # A rounded weight is in all columns of a row, and equal ones go wrong together: of few rows, or of a few that are large,
        # or of few values the error has its own spread
        count = min(weighty(exact), rounded.unique().numel())
        limit = bar.low * share * rms(exact) * (1 + 16 / count**0.5)
        # Terms that cancel are as large as the largest results, which rows of very different size have far above most: two
        # roundings of such a term
        most = 2 * bar.low * share * float(exact.abs().max())
        _within(label, actual, exact, error, step + (reach(error) * noise.clamp(min=limit)).clamp(min=most))
        return _rms_within(label, error, exact, max(limit, 4 * rms(noise)))
    _within(label, actual, exact, error, step + reach(error) * noise.clamp(min=own))
    wrong = (actual != rounded) & (64 * noise < step)
    # FP8 products' own errors are larger than fp16's steps
    share = bar.misrounded * (8 if bar == BARS["F"] and actual.dtype == torch.float16 else 1)
    count, mean = rounded[wrong].unique().numel(), share * error.numel()  # equal values go wrong together
    allowed = 1 + mean + 2 * mean**0.5  # of few values a share has its own spread
    assert count <= allowed, (
        f"{label}: {wrong.sum()} of {error.numel()} are not correctly rounded, {allowed:.0f} may be"
    )
    # The bars are for even rounding errors; sums of few short numbers have others, so the ideal is measured as well.
    ideal = rms(rounded.double() - exact) * bar.low / IDEAL
    limit = max(bar.low * SHARE_OF_BF16[actual.dtype] * rms(exact), ideal)
    left_out = 0.0 if strict else rms(torch.where(wrong, step, 0.0))
    _rms_within(label, error, exact, max(limit, 4 * rms(noise)) + left_out)


def _near_single(label: str, actual: Tensor, exact: Tensor, noise: Tensor, bar: Bar) -> None:
    error = (actual.double() - exact).abs()
    _within(label, actual, exact, error, reach(error) * torch.maximum(bar.single * exact.abs().max(), noise))
    _rms_within(label, error, exact, max(bar.single * rms(exact), 4 * rms(noise)))


def reach(error: Tensor) -> float:
    """How many times the noise of its row an element may be off: 16, and more where there are millions to be the worst of."""
    return 16.0 + 2.0 * max(0.0, math.log2(max(1, error.numel())) - 20)


def weighty(x: Tensor) -> float:
    """How many elements make the RMS what it is: all where they are of one size, one where it is far larger than the others."""
    squares = (x / x.abs().max().clamp(min=torch.finfo(x.dtype).tiny)).square()
    return max(1.0, float(squares.sum() ** 2 / squares.square().sum().clamp(min=torch.finfo(x.dtype).tiny)))


def _within(label: str, actual: Tensor, exact: Tensor, error: Tensor, bound: Tensor) -> None:
    worst = int((error - bound).argmax())
    text = f"{label}: {actual[worst].item()}, not {exact[worst].item()}"
    assert bool((error <= bound).all()), f"{text}; {int((error > bound).sum())} of {error.numel()} are too far"


def _rms_within(label: str, error: Tensor, exact: Tensor, allowed: float) -> None:
    found = rms(error)
    assert found <= allowed, f"{label}: RMS error {found:.3e} of values of {rms(exact):.3e}, allowed {allowed:.3e}"


def noises(
    op: Op, values: Mapping[str, Any], grads: list, here: Mapping[str, Tensor] | None = None
) -> dict[str, Tensor]:
    """For each result and gradient an error per row, the worst over a few jittered inputs: that of the reference in fp32, and
    what a quarter of an fp32 step of the inputs changes, which no fp32 exponential of a large number keeps. Where an op rounds
    on its way, what follows is no better than what such a rounding of the inputs and of upstream gradients changes, nor than
    what a step of fp32 changes at the inputs themselves, whose truth is `here`: large terms that just cancel there do so at none
    of the jittered ones."""
    worst: dict[str, Tensor] = {}
    # A long sum is kept to some 2^-21 of its terms, however small it comes out: 2000 fp32 additions, each rounded
    shake = 2.0**-21 if op.bars.kind in PRODUCTS else 2.0**-26
    low = next((v.dtype for v in values.values() if isinstance(v, Tensor) and v.is_floating_point()), torch.float32)
    where, jitters = _where.get()
    source = torch.Generator(where).manual_seed(7)
    for _ in range(jitters):
        moved = {n: each(lambda t: jitter(t, source, 2.0**-10).float(), v) for n, v in values.items()}
        exact = truth(op, moved, grads)
        shaken = {n: each(lambda t: jitter(t, source, shake), v) for n, v in moved.items()}
        others = [truth(op, moved, grads, torch.float32), truth(op, shaken, grads)]
        if op.bars.rounds and (grads or rounded_results(op)):
            share = torch.finfo(low).eps / 6  # four times it: over half a step, by which equal terms may all be off
            rounded = {n: each(lambda t, by=share: jitter(t, source, by), v) for n, v in moved.items()}
            upward = [g if g is None else jitter(g, source, share) for g in grads]
            after = truth(op, rounded, upward)
            others.append(
                {n: t if n.startswith("d_") or n in rounded_results(op) else exact[n] for n, t in after.items()}
            )
        if op.bars.drift and grads:
            change = op.bars.drift(lifted(op, moved), grads, low)
            others.append({n: t + change.get(n, 0.0) for n, t in exact.items()})
        for i, other in enumerate(others):
            for name, there in exact.items():
                error = (other[name].double() - there.double()).abs().nan_to_num(0.0, 0.0, 0.0)
                if error.dim() and error.numel():
                    square = error.square()
                    error = square.mean(-1, keepdim=True).sqrt()
                    if (
                        i > 1 and square.dim() > 1
                    ):  # where a column of what was rounded stands out, so does its rounding
                        error = torch.maximum(error, square.mean(-2, keepdim=True).sqrt())
                worst[name] = torch.maximum(worst[name], error) if name in worst else error
    if op.bars.rounds and here is not None:
        shaken = truth(op, {n: each(lambda t: jitter(t, source, 2.0**-24), v) for n, v in values.items()}, grads)
        for name, error in worst.items():
            if error.dim() and error.numel():
                change = (shaken[name].double() - here[name].double()).abs().nan_to_num(0.0, 0.0, 0.0)
                worst[name] = torch.maximum(error, change.square().mean(-1, keepdim=True).sqrt())
    return worst


def each(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A float tensor, or each of a list, changed; anything else as it is."""
    if isinstance(value, (list, tuple)):
        return [each(change, t) for t in value]
    return change(value) if isinstance(value, Tensor) and value.is_floating_point() else value


def jitter(t: Tensor, source: torch.Generator, share: float) -> Tensor:
    t = t.detach().to(source.device)
    return t.double() * (1 + share * torch.randn(t.shape, generator=source, dtype=torch.float64, device=t.device))


class Noise(dict):
    """Errors by name, all found when the first is asked for: that takes the reference a dozen times, and most outcomes are near
    without."""

    def __init__(self, find: Callable[[], dict[str, Tensor]]) -> None:
        self.find = find

    def __missing__(self, name: str) -> Tensor:
        found = self.find()
        self.update(found)
        return found[name]


def expectation(op: Op, values: Mapping[str, Any], actual: Outcome) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
    """(truth, noise) for an outcome; what follows a rounded result is computed from that result as it came."""
    if result_bar(op) == BARS["G"]:  # a bit contract is stated in the arithmetic of the op, not in float64
        exact = truth(op, values, actual.grads, None)
        return exact, {n: torch.zeros((), device=t.device) for n, t in exact.items()}
    onward = resumed(op, values, actual)
    exact = truth(op, onward, actual.grads)
    if op.resume is None:
        return exact, Noise(lambda: noises(op, onward, actual.grads, exact))
    first = truth(op, values, [])
    kept = [n for n in op.results if n in op.saves and n in first]

    def find() -> dict[str, Tensor]:
        rough = noises(op, values, [])
        return {**noises(op, onward, actual.grads, exact), **{n: rough[n] for n in kept}}

    return {**exact, **{n: first[n] for n in kept}}, Noise(find)


class Contract(NamedTuple):
    """What is specified of the results of one call, where that is not all of them."""

    format: Format | None  # of the first result
    ends: Tensor | None  # the end rows of groups, where rows come in groups
    live: Mapping[str, Tensor]  # how many there are of a dimension, or how many for each index of the dimension before
    rows: Mapping[str, Row]  # of results, of gradients and of what arguments become, as an `Outcome` names them
    shapes: Mapping[str, tuple[int, ...]]


def contract(op: Op, values: Mapping[str, Any], results: Mapping[str, Any]) -> Contract:
    """What `specified` goes by: what the op declares, and the numbers of this call, which may be among its results."""
    known = {**values, **results}
    ends, format = known.get(op.groups), values.get("out_format")
    live = {dim: known[name] for dim, name in op.out.live.items() if known.get(name) is not None}
    if not live:
        return Contract(format, ends, {}, {}, {})
    live = {dim: said[-1] if op.out.live[dim] == op.groups else said for dim, said in live.items()}
    rows, shapes = op.rows(values), {n: tuple(shape) for n, (shape, _) in op.expected(values).items()}
    for p in op.signature.parameters:
        if isinstance(p.rule, Row) and isinstance(values.get(p.name), Tensor):
            for name in (f"d_{p.name}", f"{p.name} after"):
                rows[name], shapes[name] = p.rule, tuple(values[p.name].shape)
    return Contract(format, ends, live, rows, shapes)


def specified(agreed: Contract, name: str, t: Tensor) -> Tensor:
    """The part of a result, or of a tensor like it, that the contract speaks of: rows past the last group, or past a group's
    count, are not, nor are spare blocks' scales."""
    base, _, part = name.partition(".")
    row = agreed.rows.get(base)
    if row is None:
        return t
    shape = agreed.shapes[base]
    head = len(shape) - len(row.dims)
    places = {dim: head + i for i, dim in enumerate(row.dims)} | ({"...": 0} if row.leading and head else {})
    dim = next((d for d in agreed.live if d in places), None)
    if dim is None:
        return t
    count, axis = agreed.live[dim], places[dim]
    if part:
        return _specified_piece(agreed, shape, part, t, int(count))
    if t.dim() != len(shape) or t.shape[axis] != shape[axis]:
        return t  # an error for all rows, say
    if count.dim():
        there = torch.arange(shape[axis], device=t.device) < count.to(t.device)[:, None]
        return t.masked_fill(~there.reshape(*there.shape, *(1 for _ in shape[axis + 1 :])), 0)
    rows = t.flatten(0, head - 1) if dim == "..." else t
    return rows.narrow(axis, 0, max(0, min(rows.shape[axis], int(count))))


def _specified_piece(agreed: Contract, shape: tuple[int, ...], part: str, t: Tensor, count: int) -> Tensor:
    """The same of one tensor of a quantised matrix, of which so many rows are there. How it grows with the rows says which of
    its axes has an index for each of them, or for each block of 128, which begin anew at each group."""
    groups, rows = 0 if agreed.ends is None else agreed.ends.shape[0], math.prod(shape[:-1])
    like, taller = (
        getattr(agreed.format.empty((n, shape[-1]), torch.float32, "meta", groups), part) for n in (rows, rows + 256)
    )
    t = t.flatten(0, -2) if t.dim() > 2 else t
    axis = next((i for i, (a, b) in enumerate(zip(like.shape, taller.shape)) if a != b), None)
    if axis is None or t.shape != like.shape:
        return t
    grown = taller.shape[axis] - like.shape[axis]
    if grown == 256:
        return t.narrow(axis, 0, max(0, min(rows, count)))
    if grown == 2 and agreed.ends is not None:
        ends = [0, *agreed.ends.tolist()]
        return t.narrow(axis, 0, sum(-(-(end - start) // 128) for start, end in zip(ends, ends[1:])))
    return t
