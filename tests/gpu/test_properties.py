"""Every property of every op on hardware, and what only hardware shows: captured graphs, streams, threads that compile, hidden
waits, memory that is not given back, how many binaries an op makes."""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.mutants import SUBJECT, Mutant, declared
from tilewright.check import far_apart, layouts
from tilewright.check.cases import (
    SMALL,
    Case,
    Net,
    choices,
    dims_of,
    draw,
    draw_each_tensor,
    put,
    row_arguments,
    tensors,
)
from tilewright.check.compare import check
from tilewright.check.oracle import (
    as_tuple,
    bits,
    contract,
    differentiate,
    leaves,
    outcome,
    pieces,
    same_bits,
    same_outcome,
    specified,
)
from tilewright.check.properties import VALUES
from tilewright.check.registration import compiled, fakes, refusals, registered
from tilewright.op import Op
from tilewright.runtime.kernel import Kernel

pytestmark = pytest.mark.gpu
NET = Net(device="cuda", cases=21, largest=64 * 1024)
NAMES = sorted(tw.catalogue())
PROPERTIES = (*(p for p in VALUES if p.__name__ != "wide_strides"), refusals, fakes, registered, compiled)
WHOLE = Mutant("none", "Toy op", "Toy op", "", "", SUBJECT)
REPLAYED = [
    (name, storing)
    for name in NAMES
    for storing in ("plain", "quantised", "static")
    if storing == "plain" or "out_format" in tw.catalogue()[name].signature.names
]
STATIC = (0.37, 0.11, 1.9, 0.053)  # scales of calls that follow one another
VARIANTS = 24  # binaries that 200 token counts may need of an op: alignment, integer classes, splits of few rows


@pytest.fixture(params=NAMES)
def op(request) -> Op:
    return tw.catalogue()[request.param]


@pytest.fixture
def toy(tmp_path) -> Iterator[Op]:
    """An op that nothing has compiled yet."""
    with declared(WHOLE, tmp_path) as (op, _):
        yield op


def wide_strides(op: Op, net: Net) -> None:
    """The property without a process of its own, whose imports take longer than most ops: a lost device ends this one, and the
    runner begins another for the tests that are left."""
    far_apart.check(op, net.device)


@pytest.mark.parametrize("op", NAMES)
@pytest.mark.parametrize("prop", (wide_strides, *PROPERTIES), ids=lambda p: p.__name__)
def test_property(prop, op):
    prop(tw.catalogue()[op], NET)


@pytest.mark.parametrize(
    "dims", [{"tokens": 70_001, "hidden": 9, "vocab": 9}, {"tokens": 3, "hidden": 65_536, "vocab": 1 << 20}], ids=str
)
def test_limits_of_the_grid(op, dims):
    """More rows or columns than the second dimension of a grid may have."""
    both = {"hidden", "vocab"} <= set(dims_of(op))  # a weight with both would take 256 GB: one after the other
    for chosen in [{**dims, "hidden": 9}, {**dims, "vocab": 9}] if both else [dims]:
        case = draw(op, NET, 1, torch.bfloat16, {**SMALL, **chosen})
        check(op, case.label, case.values, outcome(op, case.values))


# ---------------------------------------------------------------- captured graphs


def forward_and_backward(op: Op, values: dict[str, Any], inputs: dict[str, Tensor], grads: list) -> dict[str, Tensor]:
    """Results and gradients by name, as `outcome` names them."""
    results = as_tuple(op.function(**{**values, **inputs}))
    made = {f"{n}{tail}": t.detach() for n, r in zip(op.results, results) for tail, t in pieces(r).items()}
    found = differentiate(op, results, inputs, grads) if inputs else {}
    return {**made, **{f"d_{n}": g for n, g in found.items() if g is not None}}


def captured(run: Callable[[], dict[str, Tensor]]) -> tuple[Callable[[], None], dict[str, Tensor]]:
    """(what replays the graph of a run that has run before, what the graph makes)."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = run()
    return graph.replay, made


def in_memory(op: Op, values: dict[str, Any]) -> dict[str, Tensor]:
    """`tensors`, and the static scale of the format that is asked for."""
    scale = getattr(values.get("out_format"), "tensor", None)
    return {**tensors(op, values), **({} if scale is None else {"out_format": scale})}


def over(values: dict[str, Any], given: dict[str, Tensor]) -> dict[str, Any]:
    """The call with other memory, named as `in_memory` names it."""
    changed = {n: values[n].with_scale(t) if n == "out_format" else t for n, t in given.items()}
    return put(values, changed)


def formats_of_calls(op: Op, storing: str) -> list[Any]:
    """What each of several calls asks for: nothing, one format, or one whose static scale is another number in each."""
    some = choices(op, NET.device)
    if storing != "static":
        return [some[0 if storing == "plain" else -1] for _ in STATIC]
    fmt = next(f for f in some if getattr(f, "tensor", None) is not None)
    return [fmt.with_scale(torch.tensor([scale], device=NET.device)) for scale in STATIC]


def replay_like_eager(op: Op, first: Case, asked: list[Any]) -> set[str]:
    """A graph of one call, replayed with the data of others, gives and writes what they do, bit for bit. What they changed."""
    cases = [first, *(draw(op, NET, 100 + i, torch.bfloat16, first.dims, first.options) for i in range(len(asked) - 1))]
    calls = [{**c.values, **({} if fmt is None else {"out_format": fmt})} for c, fmt in zip(cases, asked)]
    fixed = {n: t.clone() for n, t in in_memory(op, calls[0]).items()}
    values = over(calls[0], fixed)
    inputs = leaves(op, values)
    grads = [g.clone() for g in outcome(op, values).grads]
    replay, made = captured(lambda: forward_and_backward(op, values, inputs, grads))
    written = [n for n in op.writes if n in fixed]
    changed = set()
    for call in calls[1:] * 3:
        for n, t in in_memory(op, call).items():
            fixed[n].copy_(t)
        replay()
        torch.cuda.synchronize()
        expected = outcome(op, call, grads=grads)
        found = {**made, **{f"{n} after": fixed[n] for n in written}}
        assert found, f"{first.label}: there is nothing to compare"
        same_outcome(f"{first.label}: replayed", found, expected, op, call)
        changed |= {n for n in written if not torch.equal(bits(expected[f"{n} after"]), bits(call[n]))}
    return changed


@pytest.mark.parametrize(("name", "storing"), REPLAYED)
def test_capture_and_replay_with_new_data(name, storing):
    """With every tensor argument that an op takes; of what it writes, all was changed by one of the calls. Of ops that store codes
    also with a scale that is given."""
    op = tw.catalogue()[name]
    asked, unchanged = formats_of_calls(op, storing), set(op.writes)
    for seed in range(7, 15):
        cases = draw_each_tensor(op, NET, seed, torch.bfloat16, {**SMALL, "tokens": 33}, {"out_format": asked[0]})
        for case in cases if storing == "plain" else cases[:1]:
            unchanged -= replay_like_eager(op, case, asked)
        if not unchanged:
            break
    assert not unchanged, f"{name}: no call changed {unchanged}"


def test_compiling_inside_a_capture_is_refused_with_advice(toy):
    x = torch.randn(4, 32, device="cuda")
    with pytest.raises(RuntimeError, match="warmup"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        toy(x)
    torch.cuda.synchronize()
    tw.warmup(toy, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = toy(x)
    graph.replay()
    same_bits("captured after warmup", y, toy(x))


# ---------------------------------------------------------------- streams, threads, waiting, memory


def test_streams(op):
    """Four streams at once, each with its own data, none waiting for another."""
    cases = [
        draw(op, NET, 20 + i, torch.bfloat16, {**SMALL, "tokens": 65, "hidden": 129, "vocab": 129}) for i in range(4)
    ]
    expected = [outcome(op, c.values) for c in cases]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in cases]
    made = []
    for turn in range(25):
        for i, (case, stream) in enumerate(zip(cases, streams)):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(1000 * ((turn * 7 + i * 3) % 11))
                made.append((i, outcome(op, case.values, grads=expected[i].grads or None)))
    torch.cuda.synchronize()
    for i, actual in made:
        same_outcome(f"{cases[i].label} on stream {i}", actual, expected[i], op, cases[i].values)


def test_threads_that_compile(toy):
    made: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}
    errors: list[BaseException] = []
    start = threading.Barrier(8)

    def work(worker: int) -> None:
        try:
            start.wait()
            for turn in range(4):
                x = torch.randn(3 + worker, 16 << turn, device="cuda")
                made[worker, turn] = x, toy(x, kind=("centred", "plain")[turn % 2])
            torch.cuda.synchronize()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors[0]
    for (worker, turn), (x, y) in made.items():
        same_bits(f"worker {worker}, turn {turn}", y, toy(x, kind=("centred", "plain")[turn % 2]))


def test_no_call_waits_for_the_device(op):
    case = draw(op, NET, 30, torch.bfloat16, {**SMALL, "tokens": 33})
    grads = outcome(op, case.values).grads  # compiled by now
    inputs = leaves(op, case.values)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(2):
            forward_and_backward(op, case.values, inputs, grads)
            with torch.no_grad():
                op.function(**case.values)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def settled_bytes(most: int | None = None) -> int:
    """The bytes that are allocated once nothing is left to be freed: autograd's thread may still be letting go of the last
    backward. That is so when they are `most` or fewer or, where that is not known, when they have not changed for a while."""
    gc.collect()
    torch.cuda.synchronize()
    patience, since, found = time.monotonic() + 5, time.monotonic(), torch.cuda.memory_allocated()
    while time.monotonic() < patience:
        settled = time.monotonic() > since + 0.2 if most is None else found <= most
        if settled:
            break
        time.sleep(0.02)
        now = torch.cuda.memory_allocated()
        since, found = since if now == found else time.monotonic(), now
    return found


def test_memory_is_given_back(op):
    case = draw(op, NET, 40, torch.bfloat16, {**SMALL, "tokens": 129})
    grads = outcome(op, case.values).grads
    before = settled_bytes()
    for _ in range(5):
        outcome(op, case.values, grads=grads or None)
        with torch.no_grad():
            op.function(**case.values)
    assert settled_bytes(before) <= before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_tensors_of_another_device_than_the_current(op):
    case = draw(op, NET, 50, torch.bfloat16, SMALL)
    with torch.cuda.device(0):
        expected = outcome(op, case.values)
        there = {n: v.to("cuda:1") if isinstance(v, Tensor) else v for n, v in case.values.items()}
        actual = outcome(op, there, grads=[g.to("cuda:1") for g in expected.grads] or None)
        assert torch.cuda.current_device() == 0
    for name, t in actual.items():
        assert t.device.index == 1
        same_bits(f"{case.label}: {name} on another device", t.cpu(), expected[name].cpu())


# ---------------------------------------------------------------- binaries


# Binaries that 1, 3, 16 and 32 tokens may add to that of 2: tiles follow the rows, by powers of two, and in a weight's gradient
# tokens are the inner dimension, whose words matter. As many as an H200 compiled
MORE = {
    "grouped_mm_rows": 1,
    "grouped_mm_inner_fp8": 2,
    "linear_fp8": 4,
    "linear_fp8_accumulate": 4,
    "glu_linear_fp8": 4,
    "matmul": 2,
    "scaled_mm": 1,
}


def variants() -> int:
    """How many compiled variants all kernels of the library have."""
    modules = [m for name, m in list(sys.modules.items()) if name.startswith("tilewright")]
    kernels = {id(v): v for m in modules for v in vars(m).values() if isinstance(v, Kernel)}
    return sum(len(k.variants) for k in kernels.values())


def call(op: Op, tokens: int, options: dict[str, Any]) -> None:
    dims = {**SMALL, "tokens": tokens, "hidden": 256, "vocab": 256}
    case = draw(op, NET, tokens, torch.bfloat16, dims, {**options, "index": torch.int64})
    outcome(op, case.values)


def fixed_options(op: Op) -> dict[str, Any]:
    """Options that stay the same, whatever the seed."""
    return draw(op, NET, 3, torch.bfloat16, {**SMALL, "tokens": 16}).options


def test_few_binaries_for_many_token_counts(op):
    options, before = fixed_options(op), variants()
    for tokens in sorted({1 + (i * 37) % 4099 for i in range(200)}):
        call(op, tokens, options)
    made = variants() - before
    assert made <= VARIANTS, f"{op.name}: 200 token counts made {made} binaries, at most {VARIANTS} wanted"


def test_token_counts_share_a_binary(op):
    options = fixed_options(op)
    call(op, 2, options)
    before = variants()
    for tokens in (1, 16, 3, 32):
        call(op, tokens, options)
    more = MORE.get(op.name, 0)
    if options.get("over") == "batch":
        # Sequences of one token, which 1, 2 and 3 tokens are, have numbers for each row. Longer ones share theirs, and their
        # gradients are summed: forward, backward and the sum of shares once more, for all lengths
        more = 3
    assert variants() <= before + more, f"{op.name}: 1, 2, 3, 16 and 32 tokens do not share a binary"


def test_alignment_comes_and_goes(op):
    """The same shapes, now aligned to 16 bytes and now not: no launch may take one for the other."""
    case = draw(op, NET, 60, torch.bfloat16, {**SMALL, "tokens": 16, "hidden": 256, "vocab": 256}, full=True)
    named = row_arguments(op, case.values) or tensors(op, case.values)
    moved = put(case.values, {n: layouts.one_further(t) for n, t in named.items()})
    # What calls write is put back where it lies, for copies would be aligned
    written = {n: t.clone() for n, t in tensors(op, case.values).items() if n.partition("[")[0] in op.writes}

    def called(values: dict[str, Any]) -> tuple:
        there = tensors(op, values)
        for n, t in written.items():
            there[n].copy_(t)
        return as_tuple(op.function(**values))

    with torch.no_grad():
        expected = called(case.values)
        for turn in range(300):
            made = called(moved if turn % 2 else case.values)
            if turn % 50 < 2:
                agreed = contract(op, case.values, dict(zip(op.results, expected)))
                for n, a, b in zip(op.results, made, expected):
                    for (tail, t), right in zip(pieces(a).items(), pieces(b).values()):
                        cut = [specified(agreed, f"{n}{tail}", u) for u in (t, right)]
                        if t.dtype == torch.float32 and turn % 2:  # loads of another width, sums in another order
                            torch.testing.assert_close(
                                *cut, rtol=5e-7, atol=1e-7, equal_nan=True
                            )  # the logarithm of one
                        else:
                            same_bits(f"{case.label}: {n}{tail}, turn {turn}", *cut)
