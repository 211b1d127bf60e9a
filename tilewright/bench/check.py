"""Whether a timed output is right: the op's reference in float64 beside it, and no element left unwritten anywhere.

Where every argument and result has a row per token, a few bands of rows are compared, or all rows in turn where a gradient
sums over them; otherwise everything at once, or those parts of a call that its op names: the float64 scores of attention over
4096 tokens would not fit a chip, but those of a few heads do. That the references are right is for the tests, which hold them to
formulas written out and to torch's own operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..check.codes import near_pieces
from ..check.oracle import (
    BARS,
    IDEAL,
    Bar,
    Contract,
    bits,
    contract,
    differentiate,
    gradient_bar,
    leaves,
    result_bar,
    resumed,
    rounded_results,
    row_shaped,
    specified,
    with_rows,
)
from ..core.flat import as_tuple
from ..core.format import Format, Quantized
from ..op import Op, Part

BLOCK = 128
ULPS = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}  # of anything wider, 1e-5
ROUNDED = Bar(6e-3, 6e-3, 1.0)  # of what goes on from rounded values
COARSE = Bar(8e-2, 8e-2, 1.0)  # of FP8 products of FP8 products: each factor of each is off by 2.6 %
STATE = 2e-5  # relative, of what a call leaves in arguments of fp32: two orders of one sum
GAIN = 1e-2  # of those: rounding to codes makes noise, which hides no factor


class Absent(Exception):
    """There is no such rival here, or none for this case, or nothing of what a case is of; the message says why."""


class Wrong(Exception):
    """The output is not what it should be; the message says where."""


def bands(rows: int, height: int = BLOCK, count: int = 6) -> list[slice]:
    """At most `count` bands of rows that begin at multiples of `height`: the first, the last (maybe short) and others."""
    blocks = -(-rows // height)
    picked = sorted({i * (blocks - 1) // max(count - 1, 1) for i in range(count)})
    return [slice(i * height, min((i + 1) * height, rows)) for i in picked]


def chunks(rows: int, columns: int, elements: int = 1 << 25) -> Iterator[slice]:
    """Slices of about `elements` elements that make up all rows."""
    step = max(1, elements // max(columns, 1))
    return (slice(i, min(i + step, rows)) for i in range(0, rows, step))


def poison(nbytes: int, device: str = "cuda") -> None:
    """Leave free memory full of NaN behind, for the next outputs to be carved from: what a kernel skips will show."""
    if device != "cuda":
        return
    torch.cuda.empty_cache()
    large = torch.empty(2 * nbytes + (64 << 20), dtype=torch.uint8, device=device)
    small = [torch.empty(1 << 19, dtype=torch.uint8, device=device) for _ in range(16)]
    for block in (large, *small):
        block.fill_(0xFF)
    torch.cuda.synchronize()


def all_written(tensor: Tensor, what: str) -> None:
    """Raise if any element is NaN, which finite inputs never give, or if a row of integers is nothing but poison."""
    flat = tensor.reshape(1, -1) if tensor.dim() < 2 else tensor
    for part in chunks(flat.shape[0], flat.shape[-1], 1 << 28):
        piece = flat[part]
        if piece.dtype == torch.int8:
            nan = (piece == -1).all(-1)
        elif piece.element_size() == 1:  # torch has no isnan for float8; both formats' NaN codes end in seven ones
            nan = (piece.view(torch.uint8) & 0x7F) == 0x7F
        else:
            nan = piece.isnan()
        if bool(nan.any()):
            raise Wrong(f"{what}: {int(nan.sum())} elements from row {part.start} on are NaN or were never written")


def pieces(result: Any) -> Iterator[Any]:
    """What a call returned, one by one, and of quantised values their tensors."""
    for one in as_tuple(result):
        yield from one.tensors() if isinstance(one, Quantized) else (one,)


def copied(result: Any) -> list[Any]:
    """A copy of what a call returned, for `same_bits`."""
    return [one.clone() if isinstance(one, Tensor) else one for one in pieces(result)]


def same_bits(result: Any, known: Sequence[Any]) -> bool:
    """Whether a result is what was copied, bit by bit."""
    found = list(pieces(result))
    return len(found) == len(known) and all(map(equal, found, known))


def equal(one: Any, other: Any) -> bool:
    if not (isinstance(one, Tensor) and isinstance(other, Tensor)):
        return not isinstance(one, Tensor) and not isinstance(other, Tensor) and one == other
    return (one.dtype, one.shape) == (other.dtype, other.shape) and torch.equal(bits(one), bits(other))


def compare(pairs: Iterable[tuple[Tensor, Tensor]], bar: Bar, what: str, slack: float = 1e-4) -> float:
    """Relative RMS error of (got, float64 truth) pairs. Raises where it is above the bar, an element is off by over an ulp, or
    more are rounded to a neighbour than the bar allows, which shows an error of small elements beside large ones. `slack` is what
    an element may be off beside that, in typical elements."""
    wrong = total = ideal = along = 0.0
    count = misrounded = 0
    if bar == BARS["F"]:  # where terms of a product cancel, the tensor cores' own precision shows
        slack = max(slack, 16 * bar.single)
    if bar.misrounded is None:  # made of rounded values, whose errors are in every element: as far as tests allow
        slack = max(slack, 16 * bar.low)
    dtype = torch.float32
    for got, want in pairs:
        dtype = got.dtype
        if bar == BARS["G"]:
            if not torch.equal(got, want.to(dtype)):
                raise Wrong(f"{what}: {int((got != want.to(dtype)).sum())} elements are not what they should be")
            continue
        difference = (got.double() - want).abs()
        typical = want.square().mean().sqrt()
        if not bool((difference <= ULPS.get(dtype, 1e-5) * want.abs() + slack * typical).all()):
            raise Wrong(
                f"{what}: an element is off by {float(difference.max()):.3g} (typical size {float(typical):.3g})"
            )
        wrong += float(difference.square().sum())
        total += float(want.square().sum())
        along += float(((got.double() - want) * want).sum())
        count += got.numel()
        if dtype in ULPS:
            rounded = want.to(dtype)
            misrounded += int((got != rounded).sum())
            ideal += float((rounded.double() - want).square().sum())
    error = math.sqrt(wrong / total) if total else math.sqrt(wrong)
    allowed = {torch.bfloat16: bar.low, torch.float16: bar.low / 8}.get(dtype, bar.single)
    # The bars are for even rounding errors; sums of few short numbers have larger ones when rounded as well as can be
    allowed = max(allowed, bar.low / IDEAL * math.sqrt(ideal / total) if total else 0.0)
    allowed *= 1 + 2 / math.sqrt(max(count, 1))  # few elements scatter
    if not error <= allowed:
        raise Wrong(f"{what}: relative RMS error {error:.3g}, allowed {allowed:.3g}")
    if bar == COARSE and abs(along) > GAIN * total:
        raise Wrong(f"{what}: is {1 + along / total:.4f} times what it should be")
    if bar.misrounded is not None and misrounded > 2 * bar.misrounded * count + 1:
        raise Wrong(f"{what}: {misrounded} of {count} elements are not correctly rounded")
    return error


class Truth(NamedTuple):
    """What a value should be, in float64, and by how much the reference in fp32 is off it, RMS by row."""

    there: Tensor
    noise: Tensor

    @staticmethod
    def of(there: Tensor, single: Tensor) -> Truth:
        return Truth(there, (single.double() - there).square().mean(-1, keepdim=True).sqrt())

    @property
    def rows(self) -> Truth:
        """As a matrix."""
        return Truth(*(t.reshape(-1, t.shape[-1]) for t in self))

    def __call__(self, part: slice) -> Truth:
        return Truth(*(t[part] for t in self))


def compare_quantized(
    q: Quantized,
    truth: Callable[[slice], Truth],
    what: str,
    picked: Sequence[slice] | None = None,
    twin: Truth | None = None,
    format: Format | None = None,
) -> float:
    """Check a `Quantized` in FP8 or INT8, 1x128 or with a scale per row, whichever ways it has, or row-wise with a scale that was
    given, on the bands of its rows, by the bars of the tests. `twin` is the whole truth of the column-wise operand: where that is
    another value, and where scales are those of whole columns. `format` is the one asked for, which has a static scale with it.
    Gives the largest share of codes that are a step off."""
    picked = bands(q.shape[0]) if picked is None else picked
    by_row, given, used = q.format.granularity == "row", q.format.reach == "given", q.scale_t
    if used is not None and not (by_row or given):
        used = used[: -(-q.shape[0] // BLOCK)]  # groups may leave blocks over
    for tensor, part in ((q.data, "data"), (q.scale, "scale"), (q.data_t, "data_t"), (used, "scale_t")):
        if tensor is not None:
            all_written(tensor, f"{what}.{part}")
    pieces: list[tuple[Truth, dict[str, Tensor]]] = []
    if q.data is not None:
        scales = [q.scale if given else q.scale[b] if by_row else q.scale[:, b] for b in picked]
        pieces += [(truth(b), {"data": q.data[b], "scale": own}) for b, own in zip(picked, scales)]
    if q.data_t is not None and by_row:
        pieces.append((truth(slice(None)) if twin is None else twin, {"data_t": q.data_t, "scale_t": q.scale_t}))
    elif q.data_t is not None:
        of_columns = truth if twin is None else twin
        for b in picked:
            blocks = slice(b.start // BLOCK, -(-b.stop // BLOCK))
            pieces.append((of_columns(b), {"data_t": q.data_t[:, b], "scale_t": q.scale_t[blocks]}))
    if not pieces:
        raise Wrong(f"{what}: neither row-wise nor column-wise codes")
    return max(_compare_codes(what, format or q.format, *piece) for piece in pieces)


def _compare_codes(what: str, format: Format, truth: Truth, found: Mapping[str, Tensor]) -> float:
    """The tensors of one way of a format beside what it makes of the truth."""
    one = replace(format, ways="row" if "data" in found else "col")
    named = {f"{what}.{part}": tensor for part, tensor in found.items()}
    try:
        return near_pieces(what, what, Contract(one, None, {}, {}, {}), named, *truth)
    except AssertionError as error:
        raise Wrong(str(error)) from None


# ------------------------------------------------------------------------------------------------------- an op's results


def row_count(op: Op, values: Mapping[str, Any], others: Sequence[Any] = ()) -> int | None:
    """The number of rows by which arguments, and the tensors beside them, can be cut; None if they cannot."""
    if op.bars.whole:  # groups of rows, and scales of blocks of them, cannot be cut with them
        return None
    rules = {p.name: p.rule for p in op.signature.parameters}
    tensors = {n: values[n] for n in op.signature.tensors if isinstance(values[n], Tensor)}
    sizes = {t.shape[0] for n, t in tensors.items() if row_shaped(rules[n]) and t.dim()}
    first = {rules[n].dims[:1] for n in tensors if row_shaped(rules[n]) and not rules[n].leading}
    if (
        len(sizes) != 1
        or not first <= {("tokens",)}
        or len(sizes | {t.shape[0] if t.dim() else -1 for t in others}) != 1
    ):
        return None
    return sizes.pop()


def exact(
    op: Op,
    values: Mapping[str, Any],
    part: slice | None,
    grads: Sequence[Tensor] = (),
    dtype: torch.dtype = torch.float64,
) -> tuple[tuple, dict]:
    """(results, gradients by name) of the reference in float64 or another dtype, of some rows or of everything."""
    cut = with_rows(op, values)

    def lifted(name: str, value: Any) -> Any:
        if name == "out_format" or (name == op.groups and part is not None):
            return None  # groups matter to blocks of codes alone, and blocks are compared where groups are whole ones
        if isinstance(value, list):
            return [lifted(name, one) for one in value]
        if not isinstance(value, Tensor):
            return value
        value = value[part] if part is not None and name in cut else value
        return value.detach().to(dtype) if value.is_floating_point() else value

    plain = {n: lifted(n, v) for n, v in op.arguments(values).items()}
    inputs = leaves(op, plain) if grads else {}
    results = as_tuple(op.apart(op.reference(**{**plain, **inputs}))[0])
    given = [(g if part is None else g[part]).to(dtype) for g in grads]
    return tuple(r.detach() for r in results), differentiate(op, results, inputs, given) if grads else {}


def followed(
    op: Op,
    values: Mapping[str, Any],
    onward: Mapping[str, Any],
    part: slice | None,
    dtype: torch.dtype = torch.float64,
) -> tuple:
    """The results of the reference, of which those that follow from a rounded one are computed from that one as it came."""
    found = exact(op, onward, part, dtype=dtype)[0]
    if op.resume is None:
        return found
    first = exact(op, values, part, dtype=dtype)[0]
    return tuple(own if name in op.saves else one for name, own, one in zip(op.results, first, found))


def parts_of(op: Op, values: Mapping[str, Any], gradients: bool) -> list[Part]:
    """The parts of a call that are compared; none where that is the whole."""
    return [] if op.bars.parts is None else list(op.bars.parts(SimpleNamespace(**op.arguments(values)), gradients))


def banded(got: Tensor, want: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Bands along the second dimension, so that elements are held to the size of those near them: of a causal mask's first rows,
    which see few keys, that is twenty times the size of the last."""
    if got.dim() < 2:
        return zip((got,), (want,))
    return zip(got.split(BLOCK, 1), want.split(BLOCK, 1))


def forward_of_parts(
    op: Op, values: Mapping[str, Any], results: Sequence[Any], parts: Sequence[Part], coarse: bool = False
) -> float:
    """The largest error of pieces of the results of a call; `coarse`: one by few bits, whatever its op says."""
    named = dict(zip(op.results, results))
    pairs: dict[str, list] = {name: [] for name in named}
    with torch.no_grad():
        for part in parts:
            for (name, r), wanted in zip(named.items(), exact(op, part.arguments, None)[0]):
                pairs[name] += banded(r[part.at[name]], wanted)
        return max(_error_of(op, name, found, values, coarse) for name, found in pairs.items())


def written(op: Op, values: Mapping[str, Any], left: Mapping[str, Any]) -> None:
    """Hold what a call of these arguments has left in those that it writes, codes or numbers, against the reference. Raises
    `Wrong`."""
    if not op.writes:
        return
    with torch.no_grad():
        becomes = op.apart(op.reference(**op.arguments(values)))[1]
    for name, there in becomes.items():
        if there is None:
            continue
        found = left[name]
        off = (bits(found) != bits(there)).float().mean().item() if found.numel() else 0.0
        near = torch.allclose(
            found.double(), there.double(), rtol=2.0**-3, atol=1.0 if found.dtype == torch.int8 else 0.0
        )
        if op.bars.kind != "G" and found.dtype in (torch.float32, torch.float64):  # a state: computed, not copied
            error = (found.double() - there.double()).square().mean().sqrt()
            off = 0.0 if error <= STATE * there.double().square().mean().sqrt() else off
        if not near or off > (2e-3 if found.element_size() == 1 else 1e-2):
            raise Wrong(f"{name}: {off:.2%} of what was written is not what it should be")


def forward(
    op: Op,
    values: Mapping[str, Any],
    results: Sequence[Any],
    left: Mapping[str, Any] | None = None,
    coarse: bool = False,
) -> float:
    """The largest error of the results of a call; `left` are its arguments afterwards, where it writes some. `coarse`: it computes
    with few bits, whatever its op says."""
    written(op, values, values if left is None else left)
    terms = contract(op, values, dict(zip(op.results, results)))
    for name, r in zip(op.results, results):
        if not isinstance(r, Quantized) and r.is_floating_point():
            all_written(specified(terms, name, r), name)
    parts = parts_of(op, values, False)
    if parts:
        return forward_of_parts(op, values, results, parts, coarse)
    rows = row_count(op, values, results)
    with torch.no_grad():
        picked = [None] if rows is None else bands(rows)
        onward = resumed(op, values, dict(zip(op.results, results)))
        wanted = [followed(op, values, onward, band) for band in picked]
        coded = any(isinstance(r, Quantized) for r in results)
        singles = [followed(op, values, onward, band, torch.float32) for band in picked] if coded else wanted
        if rows is None:
            whole = zip(op.results, results, wanted[0], singles[0])
            return max(_whole(op, name, r, w, single, terms, values, coarse) for name, r, w, single in whole)
        errors = []
        for i, (name, r) in enumerate(zip(op.results, results)):
            if isinstance(r, Quantized):
                by_start = {band.start: Truth.of(w[i], s[i]) for band, w, s in zip(picked, wanted, singles)}
                whole = whole_columns(op, values, r, i)
                asked = values.get("out_format")
                found = compare_quantized(r, lambda b, own=by_start: own[b.start], name, twin=whole, format=asked)
                errors.append(found)
            else:
                errors.append(_error_of(op, name, ((r[b], w[i]) for b, w in zip(picked, wanted)), values, coarse))
    return max(errors)


def whole_columns(op: Op, values: Mapping[str, Any], q: Quantized, at: int) -> Truth | None:
    """The true values of a column-wise operand where rows alone do not tell them; None where they do."""
    if q.data_t is None or (op.bars.twin is None and q.format.granularity != "row"):
        return None
    given = op.arguments(values).items()

    def of(dtype: torch.dtype) -> Tensor:
        if op.bars.twin is None:
            return exact(op, values, None, dtype=dtype)[0][at]
        lifted = {n: v.to(dtype) if isinstance(v, Tensor) and v.is_floating_point() else v for n, v in given}
        return op.bars.twin(**lifted)

    return Truth.of(of(torch.float64), of(torch.float32))


def is_coarse(op: Op, values: Mapping[str, Any]) -> bool:
    """Whether a call computes with few bits on its way, as the op's `coarse` says."""
    return op.bars.coarse is not None and op.bars.coarse(values)


def _error_of(
    op: Op, name: str, pairs: Iterable[tuple[Tensor, Tensor]], values: Mapping[str, Any], coarse: bool = False
) -> float:
    if coarse or is_coarse(op, values):
        return compare(pairs, COARSE, name, slack=2.0)
    if name in rounded_results(op):
        return compare(pairs, ROUNDED, name, slack=0.05)
    return compare(pairs, result_bar(op), name)


def _whole(
    op: Op,
    name: str,
    result: Any,
    wanted: Tensor,
    single: Tensor,
    terms: Contract,
    values: Mapping[str, Any],
    coarse: bool = False,
) -> float:
    if isinstance(result, Quantized):
        return compare_quantized(result, Truth.of(wanted, single).rows, name)
    result, wanted = specified(terms, name, result), specified(terms, name, wanted)
    if not wanted.is_floating_point():
        return compare([(result, wanted)], BARS["G"], name)
    return _error_of(op, name, [(result, wanted)], values, coarse)


def backward(
    op: Op, values: Mapping[str, Any], grads: Sequence[Tensor], found: Mapping[str, Any], overwritten: bool = False
) -> float:
    """The largest error of the gradients by name. `overwritten` says that an unwritten row would not show as NaN: then all are
    read."""
    found = {n: g for n, g in found.items() if g is not None}

    def error_of(pairs: Any, name: str) -> float:
        if is_coarse(op, values):
            return compare(pairs, COARSE, f"d{name}", slack=2.0)
        if op.bars.rounds:  # a product of factors that are themselves rounded: no element is its own rounding
            return compare(pairs, ROUNDED, f"d{name}", slack=0.05)
        return compare(pairs, gradient_bar(op, name), f"d{name}")

    for name, g in found.items():
        if not isinstance(g, Quantized):
            all_written(g, f"d{name}")
    parts = parts_of(op, values, True)
    if parts:
        pairs: dict[str, list] = {name: [] for name in found}
        for part in parts:
            given = [g[part.at[op.results[i]]] for i, g in zip(op.graded_results, grads)]
            wanted = exact(op, part.arguments, None, given)[1]
            for name, g in found.items():
                pairs[name] += banded(g[part.at[name]], wanted[name])
        return max(error_of(of, name) for name, of in pairs.items())
    rows = row_count(op, values, grads)
    coded = any(isinstance(g, Quantized) for g in found.values())

    def truths(part: slice | None) -> tuple[dict, dict]:
        """The gradients and, where one is in codes, what the reference in fp32 gives."""
        wanted = exact(op, values, part, grads)[1]
        return wanted, exact(op, values, part, grads, torch.float32)[1] if coded else wanted

    if rows is None:
        wanted, singles = truths(None)
        return max(
            compare_quantized(g, Truth.of(wanted[n], singles[n]).rows, f"d{n}")
            if isinstance(g, Quantized)
            else error_of([(g, wanted[n])], n)
            for n, g in found.items()
        )
    summed = found.keys() - with_rows(op, values)
    width = max(t.numel() // max(rows, 1) for t in values.values() if isinstance(t, Tensor))
    parts = list(chunks(rows, width)) if summed or overwritten else bands(rows)
    errors, totals = [], {}
    for part in parts:
        wanted, singles = truths(part)
        for name, g in found.items():
            if name in summed:
                totals[name] = totals.get(name, 0.0) + wanted[name]
            elif isinstance(g, Quantized):
                here = Truth.of(wanted[name], singles[name])
                errors.append(compare_quantized(g, lambda band, here=here: here, f"d{name}", [part]))
            else:
                errors.append(error_of([(g[part], wanted[name])], name))
    errors += [error_of([(found[n], total)], n) for n, total in totals.items()]
    return max(errors)
