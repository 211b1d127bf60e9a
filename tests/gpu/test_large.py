"""Every op once with more than 2^31 elements, forward and backward: rows at the start, about the boundary and at the end
against float64, and gradients and written arguments that sum over all rows against the reference in chunks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.check.cases import SMALL, Net, choices, draw, row_arguments, ungrouped
from tilewright.check.codes import near_codes
from tilewright.check.oracle import (
    BARS,
    PRODUCTS,
    Outcome,
    as_tuple,
    differentiate,
    expectation,
    fresh,
    gradient_bar,
    leaves,
    near,
    pieces,
    result_bar,
    rms,
    row_shaped,
    with_rows,
)
from tilewright.check.variants import Plain
from tilewright.op import Op

pytestmark = pytest.mark.gpu
NET = Net(device="cuda", largest=1 << 40)
FREE = 80 << 30  # bytes of device memory that a case may need
BLOCK = 128
CHUNK = 1 << 14
DIMS = {"tokens": 600_001, "hidden": 4096}
OTHERS = {
    "glu": {"tokens": 80_007, "hidden": 14_336},
    "quantize": {"tokens": 131_201, "hidden": 16_400},
    "cross_entropy": {"tokens": 17_001, "vocab": 131_071},
    "cross_entropy_lse": {"tokens": 17_001, "vocab": 131_071},
    "cross_entropy_parts": {"tokens": 17_001, "vocab": 131_071},
    # A tree has 64 nodes at most
    "tree_accept": {"tokens": 33_554_501, "length": 64},
    "tree_bits": {"tokens": 33_554_501, "length": 64},
}
FORMAT = tw.fp8("1x128", ways="both")
# Their results have no row for each row of the arguments, or several dimensions of them: 64-bit addresses are seen by the
# property of wide strides and, of `test_large_products.py`, `test_large_attention.py` and `test_large_recurrent.py`, by those that
# multiply, gather or go along sequences; `sample` has a test below.
OTHERWISE = (
    "attention", "attention_blocks", "attention_codes", "attention_codes_pv", "attention_lse", "attention_mean", "attention_rows",
    "cache_write", "cached_attention", "qkv_split_cache", "causal_conv1d", "causal_conv1d_step", "sample",
    "linear_attention", "linear_attention_columns", "linear_attention_step",
    "column_amax", "cross_entropy_join", "embedding", "gated_group_norm", "grouped_mm_inner", "grouped_mm_inner_fp8",
    "grouped_mm_masked", "grouped_mm_rows", "grouped_mm_rows_fp8", "linear_cross_entropy", "load_balancing_loss", "mla_rope",
    "moe_permute", "moe_permute_codes", "moe_row_map", "moe_unpermute", "qkv_split", "rope", "rope_one", "router_z_loss",
    "routing_map", "scaled_mm", "topk_routing", "transpose_pad",
)  # fmt: skip
CASES = [
    (name, fmt)
    for name, op in sorted(tw.catalogue().items())
    for fmt in (None, FORMAT)
    if name not in OTHERWISE
    and row_arguments(op, draw(op, Net(), options={"out_format": FORMAT}).values)  # the others have tests of their own
    and (fmt is None if len(choices(op, "cpu")) == 1 else fmt in (FORMAT, *choices(op, "cpu")[:1]))
]


def options_by_rows(op: Op) -> dict[str, Any]:
    """The options of the plainest call in which every result has a row for each row of the arguments, at most one option being
    other than that. All optional tensors are there but groups of rows and what is like a tensor that is needed: without it, that
    has the columns of both."""
    tensors = {p.name: p for p in op.signature.parameters if p.name in op.signature.tensors}
    needed = [p.rule.dims for p in tensors.values() if not p.optional and row_shaped(p.rule)]
    absent = {n: False for n, p in tensors.items() if p.optional and row_shaped(p.rule) and p.rule.dims in needed}
    absent |= ungrouped(op)
    plain = Plain(op, SMALL, absent, full=True)
    op.inputs(plain)
    for one in ({}, *({name: choice} for name, some in plain.choices.items() for choice in some)):
        source = Plain(op, SMALL, {**absent, **one}, full=True)
        values = op.signature.bind((), op.inputs(source))
        if all(row_shaped(row) for row in op.rows(values).values()):
            return source.options
    raise AssertionError(f"{op.name}: no option gives results with a row for each row of the arguments")


def sampled(rows: int, width: int, blocks: bool) -> Tensor:
    """Rows at the start, about every multiple of 2^31 elements and at the end; whole blocks of them if so asked."""
    size = BLOCK if blocks else 1
    kept = {0, 1, (rows - 1) // size, rows // size - 1}
    for boundary in range(1 << 31, rows * width, 1 << 31):
        kept |= {boundary // width // size + step for step in (-2, -1, 0, 1)}
    index = torch.cat([torch.arange(k * size, (k + 1) * size) for k in sorted(kept)])
    return index[(index >= 0) & (index < rows)].cuda()


def rows_of(name: str, t: Tensor, index: Tensor, count: int) -> Tensor | None:
    """The sampled rows of a result; None if it has no rows."""
    part = name.partition(".")[2]
    if part == "scale_t":
        return t[(index // BLOCK).unique()]
    if part == "data_t" or (part == "scale" and t.dim() == 2):
        return t[:, index]
    return t[index] if t.dim() and t.shape[0] == count else None


@pytest.mark.parametrize(("op", "fmt"), CASES, ids=lambda v: str(v))
def test_more_than_two_to_the_31(op, fmt):
    op = tw.catalogue()[op]
    if torch.cuda.mem_get_info()[0] < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of the device's memory, free")
    dims = {**SMALL, **OTHERS.get(op.name, DIMS)}
    case = draw(op, NET, 1, torch.bfloat16, dims, {**options_by_rows(op), "out_format": fmt})
    values = {**case.values, **({"out_format": fmt} if fmt is not None else {})}
    named = {n: values[n] for n in with_rows(op, values)}
    main = max(named.values(), key=Tensor.numel)
    assert main.numel() > 1 << 31
    count, index = main.shape[0], sampled(main.shape[0], main.shape[1], fmt is not None)

    inputs, given = leaves(op, values), fresh(op, values)
    results = as_tuple(op.function(**{**given, **inputs}))
    source = torch.Generator("cuda").manual_seed(0)
    graded = [results[i] for i in op.graded_results] if inputs else []
    grads = [torch.randn(r.shape, generator=source, device="cuda", dtype=r.dtype) for r in graded]
    found = differentiate(op, results, inputs, grads) if inputs else {}
    made = {f"{n}{tail}": t.detach() for n, r in zip(op.results, results) for tail, t in pieces(r).items()}
    made.update({f"d_{n}": g for n, g in found.items()})
    cut = {n: rows_of(n, t, index, count) for n, t in made.items()}
    actual = Outcome({n: t for n, t in cut.items() if t is not None})
    actual.grads = [g[index] for g in grads]
    compare_rows(op, case.label, {**values, **{n: t[index] for n, t in named.items()}}, actual)
    for n, g in found.items():
        if cut[f"d_{n}"] is None:
            compare_sum(op, f"{case.label}: d_{n}", n, {**values, **made}, list(named), grads, g)
    for n in op.writes:
        compare_written(op, f"{case.label}: {n} after", n, values, list(named), given[n])


def compare_rows(op: Op, label: str, values: dict[str, Any], actual: Outcome) -> None:
    exact, noise = expectation(op, values, actual)
    for name, there in exact.items():
        if name.removesuffix(" after") in op.writes:
            continue  # by all rows
        gradient = name.startswith("d_")
        bar = gradient_bar(op, name[2:]) if gradient else result_bar(op)
        if name in actual:
            near(f"{label}: {name}", actual[name], there, noise[name], bar, 1e-6 if gradient else 0.0)
        elif not gradient:
            rough = None if bar == BARS["G"] else noise[name]
            near_codes(op, f"{label}: {name}", name, values, actual, there, rough)


def in_chunks(op: Op, values: dict[str, Any], rows: list[str]) -> Iterator[tuple[slice, dict[str, Any]]]:
    """(which rows, the reference's arguments in float64) for a chunk of rows at a time."""
    kept = [n for n in op.results if n in op.saves and n in values]
    for start in range(0, values[rows[0]].shape[0], CHUNK):
        part = slice(start, start + CHUNK)
        given = {**values, **{n: values[n][part] for n in (*rows, *kept)}}
        given = op.resume(SimpleNamespace(**given)) if op.resume else given
        plain = {n: given[n].double() if _is_float(given[n]) else given[n] for n in op.signature.names}
        yield part, {n: None if n == "out_format" else v for n, v in plain.items()}


def compare_sum(
    op: Op, label: str, name: str, values: dict[str, Any], rows: list[str], grads: list, actual: Tensor
) -> None:
    """A gradient that sums over rows, against the reference in float64, a chunk of rows at a time."""
    total = torch.zeros(actual.shape, dtype=torch.float64, device="cuda")
    for part, call in in_chunks(op, values, rows):
        leaf = call[name].detach().requires_grad_()
        results = as_tuple(op.reference(**{**call, name: leaf}))
        some = [g[part].double() for g in grads]
        total += differentiate(op, results, {name: leaf}, some)[name]
    exact = total.cpu()
    near(label, actual, exact, torch.tensor(share_of_sum(op) * rms(exact)), BARS["C"])


def compare_written(op: Op, label: str, name: str, values: dict[str, Any], rows: list[str], actual: Tensor) -> None:
    """An argument that rows are added to, against the reference in float64, which goes on from one chunk of rows to the next."""
    total = values[name].double()
    for _, call in in_chunks(op, values, rows):
        total = op.apart(op.reference(**{**call, name: total}))[1][name]
    exact = total.cpu()
    near(label, actual, exact, torch.tensor(share_of_sum(op) * rms(exact)), result_bar(op))


def share_of_sum(op: Op) -> float:
    """How far a sum over all rows may be off, relative to a typical one. Tensor cores cut off where fp32 rounds, once for every
    sixteen of these 600,001 terms; an op that rounds on its way adds up rounded terms."""
    if op.bars.rounds:
        return torch.finfo(torch.bfloat16).eps / 6
    if "F" in (op.bars.kind, op.bars.gradient):  # by two pieces of bf16, no worse than TF32, or of FP8 codes
        return 2.5e-4
    return 5e-5 if op.bars.kind in PRODUCTS else 2e-6


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def test_codes_past_two_to_the_31():
    """`dequantize_codes` takes codes and scales, whose rows lie along different dimensions."""
    if torch.cuda.mem_get_info()[0] < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of the device's memory, free")
    rows, columns = 131_201, 16_400
    source = torch.Generator("cuda").manual_seed(0)
    codes = torch.randint(0, 0x7F, (rows, columns), generator=source, device="cuda", dtype=torch.uint8)
    scale = torch.rand((columns + 127) // 128, rows, generator=source, device="cuda")
    made = tw.dequantize_codes(codes, scale, FORMAT.key)
    index = sampled(rows, columns, blocks=False)
    expected = tw.dequantize_codes(codes[index].cpu(), scale[:, index].cpu(), FORMAT.key)
    near("dequantize_codes", made[index], expected, torch.zeros(()), BARS["G"])


def test_sampling_past_two_to_the_31():
    """The first largest logit of a row, at rows on both sides of 2^31 elements and at the end; the others hold less."""
    if torch.cuda.mem_get_info()[0] < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of the device's memory, free")
    rows, vocab = 17_001, 131_071
    logits = torch.zeros(rows, vocab, device="cuda", dtype=torch.bfloat16)
    index = sampled(rows, vocab, blocks=False)
    expected = torch.randint(0, vocab - 1, (len(index),), generator=torch.Generator().manual_seed(0)).cuda()
    logits[index, expected] = 1.0
    logits[index, expected + 1] = 1.0  # as large, and later
    made = tw.sample(logits, torch.zeros(rows, device="cuda", dtype=torch.int64), torch.zeros(rows, device="cuda"))
    assert made[index].tolist() == expected.tolist()
    others = torch.ones(rows, device="cuda", dtype=torch.bool).index_fill(0, index, False)
    assert not bool(made[others].any())
