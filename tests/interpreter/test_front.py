"""Calls that are like one before go from a guard to a plan: of quantised operands, numbers, memory for results, gradients, lists.
Each test would fail if a plan were shared by calls that differ in what it names."""

from __future__ import annotations

import itertools
import threading

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from tests.interpreter.toy import launch, pair, toys
from tilewright.check.calls import modes
from tilewright.check.cases import Net
from tilewright.check.oracle import same_bits
from tilewright.core.format import Quantized
from tilewright.gemm import library
from tilewright.gemm import scaled_mm as scaled_mm_module
from tilewright.op import Gradient
from tilewright.ops.optimiser import multi_tensor
from tilewright.runtime import choose, front, run
from tilewright.runtime.key import Key


@pytest.fixture(autouse=True)
def kernels(monkeypatch):
    """Kernels through the interpreter with nothing forced, as on a GPU: guards are for such calls alone."""

    def chosen(op, values, device=None):
        if choose.forced.get() is not None:
            return choose.implementation(op, values, device)
        with tw.force("triton"):
            return choose.implementation(op, values, device)

    monkeypatch.setattr(run, "implementation", chosen)
    for op in (tw.scaled_mm.op, tw.grouped_mm.op, tw.rms_norm.op, tw.cross_entropy.op):
        op.plans.clear()
        op.backward_plans.clear()


@pytest.fixture
def declare():
    with toys() as declare:
        token = choose.forced.set(None)
        yield declare
        choose.forced.reset(token)


@pytest.fixture
def guards(monkeypatch):
    """How many calls a guard took: whatever comes to a key or to host code is not counted."""
    counted = [0]
    original = front.Front.replayed

    def replayed(self, args, kwargs):
        result = original(self, args, kwargs)
        counted[0] += result is not front.MISS
        return result

    monkeypatch.setattr(front.Front, "replayed", replayed)
    return counted


def quantised(rows: int, columns: int, format, seed: int = 0, dtype=torch.bfloat16) -> Quantized:
    source = torch.Generator().manual_seed(seed)
    with tw.force("reference"):
        return tw.quantize(torch.randn(rows, columns, generator=source).to(dtype), format)


FIRST, SECOND = tw.fp8("1x128"), tw.fp8("128x128", ways="col")


def operands(seed: int = 0, rows: int = 16, first=FIRST, second=SECOND) -> tuple[Quantized, Quantized]:
    return quantised(rows, 128, first, seed), quantised(128, 32, second, seed + 1)


def by_hand(*args, **kwargs) -> Tensor:
    """The function behind its front, which no guard takes part in."""
    with tw.force("triton"):
        return tw.scaled_mm.__wrapped__(*args, **kwargs)


# ---- quantised operands ----------------------------------------------------------------------------------------------


def test_a_call_like_one_before_takes_no_operands_apart(guards, monkeypatch):
    taken = []
    original = scaled_mm_module.operand
    monkeypatch.setattr(scaled_mm_module, "operand", lambda *given: (taken.append(1), original(*given))[1])
    for seed in range(5):
        a, b = operands(seed)
        made = tw.scaled_mm(a, b)
        count = len(taken)
        same_bits(f"call {seed}", made, by_hand(a, b))
        del taken[count:]
        assert made.dtype == torch.bfloat16 and not made.requires_grad
    assert len(taken) == 2 and guards[0] == 3  # once for each operand; then by key, then by guard


class Seen(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def misaligned(q: Quantized) -> Quantized:
    """The same value, with codes that begin one byte past a multiple of 16."""
    data = torch.empty(q.data.numel() + 1, dtype=torch.uint8)[1:].view(q.data.dtype).view(q.data.shape)
    data.view(torch.uint8).copy_(q.data.view(torch.uint8))
    return Quantized.from_tensors(q.format, q.dtype, q.shape, [data, q.scale])


def strided(q: Quantized) -> Quantized:
    """The same value in rows that lie further apart."""
    rows, columns = q.data.shape
    data = torch.zeros(rows, columns + 16, dtype=torch.uint8)[:, :columns]
    data.copy_(q.data.view(torch.uint8))
    return Quantized.from_tensors(q.format, q.dtype, q.shape, [data.view(q.data.dtype), q.scale])


def variants(seed: int) -> dict[str, tuple[tuple, dict]]:
    """Calls of `scaled_mm` that differ from the first in one thing each."""
    a, b = operands(seed)
    bias = torch.randn(32, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
    c = torch.ones(16, 32)
    wide = {"first": tw.fp8("row"), "second": tw.fp8("row", ways="col")}
    return {
        "plain": ((a, b), {}),
        "format": (operands(seed, **wide), {}),
        "integers": (operands(seed, first=tw.int8("row"), second=tw.int8("row", ways="col")), {}),
        "rule of scales": ((quantised(16, 128, tw.fp8("1x128", pow2=False), seed), b), {}),
        "rows": (operands(seed, rows=12), {}),
        "stride": ((strided(a), b), {}),
        "alignment": ((misaligned(a), b), {}),
        "weight alone": ((a.dequantize(), b), {}),
        "dtype": ((a, b), {"out_dtype": torch.float32}),
        "bias": ((a, b), {"bias": bias}),
        "activation": ((a, b), {"act": "relu"}),
        "both": ((a, b), {"bias": bias, "act": "relu"}),
        "the other order": ((a, b), {"act": "relu", "bias": bias}),
        "no share": ((a, b), {"c": c, "out_dtype": torch.float32}),
        "share": ((a, b), {"c": c, "beta": 0.5, "out_dtype": torch.float32}),
        "another share": ((a, b), {"c": c, "beta": 2.0, "out_dtype": torch.float32}),
        "result's format": ((a, b), {"out_format": tw.fp8("row")}),
        "backend": ((a, b), {"backend": "portable"}),
    }


def bits(result: Tensor) -> list[Tensor]:
    pieces = result.tensors() if isinstance(result, Quantized) else (result,)
    return [piece.view(torch.uint8) if piece.element_size() == 1 else piece for piece in pieces]


def test_what_the_plan_of_a_product_depends_on(guards):
    names = [*variants(0)]
    for turn in range(4):
        calls = variants(turn)
        for name in names if turn % 2 else reversed(names):
            args, kwargs = calls[name]
            made, wanted = tw.scaled_mm(*args, **kwargs), by_hand(*args, **kwargs)
            assert type(made) is type(wanted) and made.shape == wanted.shape and made.dtype == wanted.dtype, name
            for one, other in zip(bits(made), bits(wanted)):
                same_bits(f"{name}, turn {turn}", one, other)
    assert guards[0] > 0


def test_the_key_of_a_quantised_value():
    a, _ = operands()
    pieces = a.tensors()
    others = [
        Quantized.from_tensors(tw.fp8("1x128", pow2=False), a.dtype, a.shape, pieces),
        Quantized.from_tensors(FIRST, torch.float32, a.shape, pieces),
        Quantized.from_tensors(FIRST, a.dtype, (8, 256), pieces),
        Quantized.from_tensors(FIRST, a.dtype, a.shape, pieces, torch.tensor([16])),
    ]

    def parts(q: Quantized) -> list:
        key = Key()
        assert key.add((q,))
        return key.parts

    assert parts(a) == parts(operands(1)[0])
    assert all(parts(other) != parts(a) for other in others)
    graded = Quantized(torch.zeros(16, 128, requires_grad=True), FIRST, None, *pieces)
    assert not Key().add((graded,))
    with torch.no_grad():
        assert Key().add((graded,))


def test_codes_that_are_not_aligned_pass_the_guard(guards):
    a, b = operands()
    for _ in range(3):
        tw.scaled_mm(a, b)
    count = guards[0]
    assert count > 0
    same_bits("not aligned", tw.scaled_mm(misaligned(a), b), by_hand(a, b))
    assert guards[0] == count
    tw.scaled_mm(a, b)
    assert guards[0] == count + 1


def test_a_result_on_an_argument_is_not_remembered(monkeypatch):
    """Even where a guard does not refuse to see one tensor twice."""
    monkeypatch.setattr(front, "guard", lambda tensors: lambda *others: True)
    a, b = operands()
    for _ in range(3):
        c, beside, apart = torch.ones(16, 32), torch.ones(16, 32), torch.zeros(16, 32)
        tw.scaled_mm(a, b, c=c, beta=1.0, out_dtype=torch.float32, out=c)
        tw.scaled_mm(a, b, c=beside, beta=1.0, out_dtype=torch.float32, out=apart)
        assert torch.equal(apart, c) and bool((beside == 1.0).all())


def test_one_and_true_are_not_one_argument():
    a, b = operands()
    c = torch.ones(16, 32)
    for _ in range(3):
        tw.scaled_mm(a, b, c=c, beta=1.0, out_dtype=torch.float32)
        with pytest.raises(TypeError, match="beta"):
            tw.scaled_mm(a, b, c=c, beta=True, out_dtype=torch.float32)


def test_errors_come_in_every_call():
    a, b = operands()
    for _ in range(3):
        tw.scaled_mm(a, b)
        with pytest.raises(ValueError, match="columns"):
            tw.scaled_mm(quantised(16, 256, FIRST), b)
        with pytest.raises(ValueError, match="scale_a"):
            tw.scaled_mm(a, b, torch.ones(1))
        with pytest.raises(ValueError, match="no row-wise operand"):
            tw.scaled_mm(quantised(16, 128, tw.fp8("1x128", ways="col")), b)


def test_values_that_want_gradients_go_their_own_way(guards):
    """A product has no gradient, and refuses; without gradients the same tensors are multiplied."""
    a, b = operands()
    carrier = torch.zeros(16, 128, dtype=torch.bfloat16, requires_grad=True)
    graded = Quantized(carrier, FIRST, None, *a.tensors())
    bias = torch.zeros(32, dtype=torch.bfloat16, requires_grad=True)
    assert graded.requires_grad
    for _ in range(3):
        with torch.no_grad():
            same_bits("without", tw.scaled_mm(graded, b), by_hand(a, b))
            tw.scaled_mm(a, b, bias=bias)
        wanted, found = by_hand(graded, b), tw.scaled_mm(graded, b)
        assert found.requires_grad == wanted.requires_grad
        with pytest.raises(ValueError, match="no gradient for bias"):
            tw.scaled_mm(a, b, bias=bias)
    assert guards[0] > 0


@pytest.mark.parametrize("named", [{}, {"out_format": tw.fp8("1x128")}], ids=["plain", "codes"])
def test_whether_gradients_are_recorded_is_seen_after_a_guard_was_made(named):
    """As where a model is evaluated before it is trained: by tensors alone the two are the same call."""
    x, weight = torch.randn(4, 128), torch.randn(128, requires_grad=True)
    for _ in range(3):
        for _ in range(3):
            with torch.no_grad():
                assert not tw.rms_norm(x, weight, **named).requires_grad
        for _ in range(3):
            y = tw.rms_norm(x, weight, **named)
            assert y.requires_grad
            loss = (y.dequantize() if named else y).sum()
            assert bool(torch.autograd.grad(loss, weight)[0].any())


GUARDED = (
    "add_rms_norm",
    "attention",
    "glu",
    "layer_norm",
    "linear_attention",
    "moe_unpermute",
    "quantize",
    "rms_norm",
    "rope",
)


@pytest.mark.parametrize("name", GUARDED)
def test_modes_of_autograd_are_seen_by_guards(name):
    """What `modes` asks of plans by their keys, where nothing is forced."""
    modes(tw.catalogue()[name], Net())


def test_modes_and_forcing_are_seen_after_a_guard_was_made():
    a, b = operands()
    for _ in range(3):
        wanted = tw.scaled_mm(a, b)
    with Seen() as seen:
        same_bits("under a mode", tw.scaled_mm(a, b), wanted)
    assert any("tilewright.scaled_mm" in name for name in seen.names)
    with tw.force("reference"):
        reference = tw.scaled_mm(a, b)
    with tw.force("reference"), torch.no_grad():
        same_bits("forced", by_hand(a, b), reference)
    with torch.inference_mode():
        for _ in range(3):
            same_bits("inference", tw.scaled_mm(a, b), wanted)
    with torch.autograd.forward_ad.dual_level():
        same_bits("forward mode", tw.scaled_mm(a, b), wanted)
    same_bits("afterwards", tw.scaled_mm(a, b), wanted)


def test_a_traced_call_does_not_meet_guards():
    a, b = operands(first=tw.fp8("row"), second=tw.fp8("row", ways="col"))

    def product(*given: Tensor) -> Tensor:
        return tw.scaled_mm(*given, recipe_a="RowWise", recipe_b="RowWise")

    given = a.data, b.data_t.t(), a.scale, b.scale_t
    for _ in range(3):
        wanted = product(*given)
    compiled = torch.compile(product, backend="eager", fullgraph=True)
    same_bits("compiled", compiled(*given), wanted)


def test_threads_share_guards():
    given = [operands(seed) for seed in range(8)]
    wanted = [by_hand(*pair) for pair in given]
    tw.scaled_mm(*given[0])
    wrong = []

    def work(seed: int) -> None:
        for _ in range(10):
            if not torch.equal(tw.scaled_mm(*given[seed]), wanted[seed]):
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_for_a_product(guards):
    for turn in range(4):
        a, b = operands(turn)
        out = torch.full((16, 32), 7.0, dtype=torch.bfloat16)
        version = out._version
        assert tw.scaled_mm(a, b, out=out) is out and out._version > version
        same_bits(f"turn {turn}", out, by_hand(a, b))
        c = torch.ones(16, 32)
        wanted = by_hand(a, b, c=c, beta=1.0, out_dtype=torch.float32)
        same = tw.scaled_mm(a, b, c=c, beta=1.0, out_dtype=torch.float32, out=c)
        assert same is c
        same_bits(f"over c, turn {turn}", c, wanted)
        other, apart = torch.ones(16, 32), torch.zeros(16, 32)
        assert tw.scaled_mm(a, b, c=other, beta=1.0, out_dtype=torch.float32, out=apart) is apart
        same_bits(f"beside c, turn {turn}", apart, wanted)
        assert bool((other == 1.0).all())
        with pytest.raises(ValueError, match="shares memory with a"):
            tw.scaled_mm(a, b, out=a.data.view(torch.bfloat16).as_strided((16, 32), (32, 1)))
    assert guards[0] > 0


@pytest.mark.parametrize("scale", [None, torch.full((1,), 0.25)], ids=["blocks", "static"])
def test_several_results_of_which_one_is_quantised_are_a_plan(scale, monkeypatch):
    """With its own memory or the caller's, for the sum alone too; each with the codes of a call that is the first of its kind."""
    fmt = tw.fp8("1x128") if scale is None else tw.fp8("tensor", scale=scale)
    source = torch.Generator().manual_seed(1)
    x, residual, weight = (torch.randn(*shape, generator=source).bfloat16() for shape in ((5, 256), (5, 256), (256,)))

    keyed, original = [], front.Front.keyed
    monkeypatch.setattr(front.Front, "keyed", lambda *given: (keyed.append(1), original(*given))[1])

    def calls():
        yield lambda r: tw.add_rms_norm(x, r, weight, out_format=fmt)
        yield lambda r: tw.add_rms_norm(x, r, weight, out_format=fmt, out=(None, r))
        yield lambda r: tw.add_layer_norm(x, r, weight, out_format=fmt)

    for call in calls():
        tw.add_rms_norm.op.plans.clear()
        first = [bits(t) for t in call(residual.clone())]
        known, before = [bits(t) for t in call(residual.clone())], len(keyed)
        again = [bits(t) for t in call(residual.clone())]
        assert len(tw.add_rms_norm.op.plans) + len(tw.add_layer_norm.op.plans) >= 1
        for made in (known, again):
            assert all(torch.equal(a, b) for one, other in zip(made, first) for a, b in zip(one, other))
    assert len(keyed) == before  # a guard took the third call


def test_products_of_groups_are_plans_too(guards):
    source = torch.Generator().manual_seed(0)
    b = torch.randn(3, 32, 16, generator=source).to(torch.bfloat16)
    codes = tw.fp8("128x128")
    with tw.force("reference"):
        weight = tw.quantize(torch.randn(3, 128, 128, generator=source).to(torch.bfloat16), codes)
    for turn in range(4):
        a = torch.randn(20, 32, generator=source).to(torch.bfloat16)
        offsets = torch.tensor([[4, 12, 20], [8, 8, 20]][turn % 2], dtype=torch.int32)
        by_function = tw.grouped_mm.__wrapped__(a, b, offsets)
        same_bits(f"turn {turn}", tw.grouped_mm(a, b, offsets), by_function)
        learn = a.clone().requires_grad_()
        assert tw.grouped_mm(learn, b, offsets).requires_grad
        rows = quantised(20, 128, FIRST, turn)
        wanted = tw.grouped_mm.__wrapped__(rows, weight, offsets, transposed_b=True)
        same_bits(f"codes, turn {turn}", tw.grouped_mm(rows, weight, offsets, transposed_b=True), wanted)
        wanted = tw.grouped_mm.__wrapped__(a, b, offsets, out_format=tw.fp8("row"))
        made = tw.grouped_mm(a, b, offsets, out_format=tw.fp8("row"))
        assert torch.equal(made.dequantize(), wanted.dequantize()) and torch.equal(made.offsets, wanted.offsets)
    assert guards[0] > 0


@pytest.fixture
def library_calls(monkeypatch):
    """A stand-in for cuBLASLt's product of one block of inner elements, and how it was called."""
    calls = []

    def product(a, b, scale_a, kind_a, tiles_a, scale_b, kind_b, tiles_b, bias, dtype, dims, fast, *, out=None):
        calls.append(out)
        y = (a.float() @ b.float() * scale_a[0][:, :1] * scale_b[0][0, 0]).to(dtype)
        y = y if bias is None else y + bias
        return y if out is None else out.copy_(y)

    def chosen(op, values, device=None):
        return op.implementations[0] if values.get("backend") == "cublaslt" else None

    monkeypatch.setattr(torch, "_scaled_mm_v2", product)
    monkeypatch.setattr(library, "entry_points", lambda: frozenset(["_scaled_mm_v2"]))
    monkeypatch.setattr(run, "implementation", chosen)
    return calls


def test_a_library_s_product_is_a_step_of_a_plan(library_calls, guards):
    bias = torch.ones(32, dtype=torch.bfloat16)
    for turn in range(5):
        a, b = operands(turn)
        wanted = (a.dequantize().float() @ b.dequantize().float()).to(torch.bfloat16)
        made = tw.scaled_mm(a, b, backend="cublaslt")
        torch.testing.assert_close(made, wanted)
        torch.testing.assert_close(tw.scaled_mm(a, b, bias=bias, backend="cublaslt"), wanted + bias)
        out = torch.zeros(16, 32, dtype=torch.bfloat16)
        assert tw.scaled_mm(a, b, out=out, backend="cublaslt") is out
        torch.testing.assert_close(out, wanted)
        apart = torch.zeros(32, 16, dtype=torch.bfloat16).t()
        assert tw.scaled_mm(a, b, out=apart, backend="cublaslt") is apart
        torch.testing.assert_close(apart, wanted)
    assert len(library_calls) == 5 * 4 and guards[0] == 3 * 3


# ---- numbers, formats, memory for results ----------------------------------------------------------------------------


def test_numbers_and_names_are_part_of_a_guard(declare, guards):
    op, host = declare()
    x, z = pair(8, 8)
    calls = [
        lambda: (op(x, z, 3.0), 3 * x + z),
        lambda: (op(x, z, 4.0), 4 * x + z),
        lambda: (op(x, z, factor=5.0), 5 * x + z),
        lambda: (op(z, x, factor=5.0), 5 * z + x),
        lambda: (op(x=z, z=x, factor=5.0), 5 * z + x),
        lambda: (op(z=z, x=x, factor=5.0), 5 * x + z),
        lambda: (op(x, factor=3.0), 3 * x),
        lambda: (op(x[:4], z[:4], 3.0), 3 * x[:4] + z[:4]),
        lambda: (op(x.t(), z, 3.0), 3 * x.t() + z),
        lambda: (op(x.flatten()[1:57].view(7, 8), z[:7], 3.0), 3 * x.flatten()[1:57].view(7, 8) + z[:7]),
    ]
    for turn, (i, call) in itertools.product(range(4), enumerate(calls)):
        made, expected = call()
        same_bits(f"call {i}, turn {turn}", made, expected)
    assert host.runs == len(calls) - 1 and guards[0] > 0  # two differ in their tensors alone
    for _ in range(3):
        same_bits("float", op(x, z, 1.0), x + z)
        with pytest.raises(TypeError, match="factor"):
            op(x, z, True)


def test_memory_for_results_is_checked_in_every_call(declare, monkeypatch):
    op, host = declare()
    keyed, original = [], front.Front.keyed
    monkeypatch.setattr(front.Front, "keyed", lambda self, *given: keyed.append(given) or original(self, *given))
    by_guard = 0
    for seed in range(5):
        x, z = pair(8, 8, seed)
        out = torch.empty_like(x)
        version, before = out._version, len(keyed)
        assert op(x, z, out=out) is out and out._version > version
        by_guard += len(keyed) == before
        same_bits(f"call {seed}", out, 2 * x + z)
        for wrong in (x, x.view(8, 8), z[:].view(8, 8)):
            with pytest.raises(ValueError, match="out shares memory with"):
                op(x, z, out=wrong)
        whole = torch.empty(9 * 8)
        with pytest.raises(ValueError, match="out shares memory with x"):
            op(whole[:64].view(8, 8), z, out=whole[8:].view(8, 8))
        with pytest.raises(ValueError, match="out has elements that share memory"):
            op(x, z, out=torch.empty(8).expand(8, 8))
        off = torch.empty(65)[1:].view(8, 8)
        assert op(x, z, out=off) is off
        same_bits(f"not aligned, call {seed}", off, 2 * x + z)
        by_name = torch.empty_like(x)
        assert op(x, z=z, out=by_name) is by_name
        same_bits(f"by name, call {seed}", by_name, 2 * x + z)
    assert by_guard >= 3


def twofold(x, z, factor):
    a, b = torch.empty_like(x), torch.empty_like(x)
    launch(x, z, a, factor)
    launch(x, None, b, 1.0)
    return a, b


def test_memory_for_several_results_is_checked_in_every_call(declare, guards):
    op, host = declare(twofold, results={"a": "float32[m n]", "b": "float32[m n]"})
    for seed in range(5):
        x, z = pair(8, 8, seed)
        for several in (tuple, list):
            out = several([torch.empty_like(x), torch.empty_like(x)])
            versions = [t._version for t in out]
            found = op(x, z, out=out)
            assert type(found) is tuple and [*map(id, found)] == [*map(id, out)]
            assert all(t._version > version for t, version in zip(out, versions))
            same_bits("a", out[0], 2 * x + z)
            same_bits("b", out[1], x)
        for at in range(2):
            some = [None, None]
            some[at] = torch.empty_like(x)
            found = op(x, z, out=tuple(some))
            assert found[at] is some[at] and found[1 - at] is not None
            same_bits("a of some", found[0], 2 * x + z)
            same_bits("b of some", found[1], x)
        a, b = torch.empty_like(x), torch.empty_like(x)
        with pytest.raises(ValueError, match="shares memory with z"):
            op(x, z, out=(z.view(8, 8), b))
        with pytest.raises(ValueError, match="shares memory with that of another result"):
            op(x, z, out=(a, a.view(8, 8)))
        with pytest.raises(TypeError, match="out must be a tuple of 2"):
            op(x, z, out=(a, b, b))
        with pytest.raises(TypeError, match="must be a Tensor"):
            op(x, z, out=(a, 1.0))
        count = host.runs
        off = torch.empty(65)[1:].view(8, 8)
        assert op(x, z, out=(off, b))[0] is off and host.runs > count  # not aligned: it is copied there
        same_bits("a that is not aligned", off, 2 * x + z)
    assert guards[0] >= 3 * 4


def test_memory_for_a_quantised_result_is_checked_in_every_call(guards):
    codes, other = tw.fp8("1x128"), tw.fp8("1x128", pow2=False)
    for seed in range(5):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)
        for format in (codes, other):
            out = format.empty(x.shape, x.dtype, x.device)
            versions = [t._version for t in out.tensors()]
            assert tw.rms_norm(x, out_format=format, out=out) is out
            assert all(t._version > version for t, version in zip(out.tensors(), versions))
            with tw.force("triton"):
                wanted = tw.rms_norm(x, out_format=format)
            for one, other_one in zip(bits(out), bits(wanted)):
                same_bits(f"{format}, call {seed}", one, other_one)
        with pytest.raises(ValueError, match="but out_format is"):
            tw.rms_norm(x, out_format=codes, out=out)
        data = x.view(torch.uint8).view(-1)[:512].view(out.data.dtype).view(4, 128)
        with pytest.raises(ValueError, match="shares memory with x"):
            tw.rms_norm(x, out_format=codes, out=Quantized.from_tensors(codes, x.dtype, x.shape, [data, out.scale]))
    assert guards[0] >= 2 * 3


def test_a_value_of_the_caller_s_is_told_of_the_groups_of_each_call():
    format = tw.fp8("row")
    out = format.empty((20, 16), torch.float32, "cpu", 3)
    for turn in range(4):
        x = torch.randn(20, 16, generator=torch.Generator().manual_seed(turn))
        offsets = torch.tensor([[4, 12, 20], [8, 8, 20]][turn % 2], dtype=torch.int32)
        for one in (out, format.empty((20, 16), torch.float32, "cpu", 3)):
            assert tw.quantize(x, format, offsets=offsets, out=one) is one
            assert one.offsets is offsets
            with tw.force("triton"):
                wanted = tw.quantize(x, format, offsets=offsets)
            assert torch.equal(one.dequantize(), wanted.dequantize())


def test_an_op_without_results_gives_none_in_every_call(guards):
    add = tw.catalogue()["embedding_accumulate"].function
    ids = torch.arange(4)
    for seed in range(4):
        dy, total = pair(4, 8, seed)
        wanted, version = total + dy, total._version
        assert add(ids, dy, total) is None and total._version > version
        same_bits(f"call {seed}", total, wanted)
        with pytest.raises(ValueError, match="main_grad, which is written, shares memory with dy"):
            add(ids, total.view(4, 8), total)
    assert guards[0] > 0


def test_a_static_scale_is_an_argument_of_a_guarded_call(guards):
    x = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    for turn in range(5):
        for scale in (0.5, 2.0):
            format = tw.fp8("tensor", scale=torch.tensor([scale]))
            made = tw.rms_norm(x, out_format=format)
            with tw.force("triton"):
                wanted = tw.rms_norm(x, out_format=format)
            same_bits(f"scale {scale}, turn {turn}", made.data.float(), wanted.data.float())
            assert made.scale.item() == scale
    assert guards[0] > 0
    assert front.opened(format)[0] != front.opened(format.bare())[0]  # which holds nothing


def test_calls_of_one_function_with_more_or_fewer_arguments(declare, guards):
    op, _ = declare()
    x, z = pair(8, 8)
    for turn in range(4):
        same_bits(f"three, turn {turn}", op(x, z, 3.0), 3 * x + z)
        same_bits(f"two, turn {turn}", op(x, None), 2 * x)
        with pytest.raises(TypeError):
            op(x, z, 3.0, 4.0)
        with pytest.raises(TypeError, match="factor"):
            op(x, z, "3.0")
        with pytest.raises(TypeError, match="z"):
            op(x, 3.0, 3.0)
        same_bits(f"none, turn {turn}", op(x, None, 3.0), 3 * x)
    assert guards[0] >= 3


def test_guards_are_bounded(declare, monkeypatch):
    """In ways to name arguments, and in kinds of call for each."""
    monkeypatch.setattr(front, "WAYS", 2)
    made = []
    original = front.Front.__init__

    def watched(self, *given, **more):
        made.append(self)
        original(self, *given, **more)

    monkeypatch.setattr(front.Front, "__init__", watched)
    op, _ = declare()
    x, z = pair(8, 8)
    for named in ({"factor": 3.0}, {"z": z}, {"z": z, "factor": 3.0}, {"factor": 3.0, "z": z}):
        for _ in range(3):
            op(x, **named)
        assert 0 < len(made[0].recent) <= 2
    for rows in range(1, 30):
        for _ in range(2):
            op(x[:rows], factor=3.0)
            op(x[:rows], z[:rows], out=torch.empty_like(x[:rows]))
        assert all(len(kinds) <= front.RECENT for kinds in (made[0].into, *made[0].recent.values()))
    assert len(made[0].into) == front.RECENT


def test_a_format_is_part_of_a_guard(guards):
    formats = [
        tw.fp8("row"),
        tw.fp8("1x128"),
        tw.fp8("1x128", ways="both"),
        tw.int8("row"),
        tw.fp8("row", dtype="e5m2"),
    ]
    for turn, format in itertools.product(range(4), formats):
        x = torch.randn(4, 128, generator=torch.Generator().manual_seed(turn)).to(torch.bfloat16)
        made = tw.rms_norm(x, out_format=format)
        with tw.force("triton"):
            wanted = tw.rms_norm(x, out_format=format)
        assert made.format == wanted.format and made.shape == wanted.shape and made.dtype == wanted.dtype
        for one, other in zip(bits(made), bits(wanted)):
            same_bits(f"{format}, turn {turn}", one, other)
        assert type(tw.rms_norm(x, out_format=None)) is Tensor
    assert guards[0] > 0


# ---- gradients -------------------------------------------------------------------------------------------------------


def scaled_gradient(saved, g):
    dx = torch.empty_like(g, memory_format=torch.contiguous_format)
    launch(g, None, dx, saved.factor)
    if "z" not in saved.needs:
        return dx, None
    dz = torch.empty_like(dx)
    launch(g, None, dz, 1.0)
    return dx, dz


@pytest.fixture
def learning(declare, monkeypatch):
    """A toy op with gradients, its host code, and how often a backward was run by key or by host code."""
    op, host = declare(backward=scaled_gradient, gradient=Gradient(of=("x", "z"), saves=()))
    long = []
    original = type(op).run_backward
    monkeypatch.setattr(op, "run_backward", lambda *given, **more: (long.append(1), original(op, *given, **more))[1])
    return op, host, long


def test_a_backward_like_one_before_goes_from_a_guard_to_its_plan(learning, guards):
    op, host, long = learning
    for seed in range(6):
        x, z = (t.requires_grad_() for t in pair(8, 8, seed))
        g = pair(8, 8, seed + 10)[0]
        y = op(x, z, 3.0)
        same_bits(f"call {seed}", y, 3 * x + z)
        dx, dz = torch.autograd.grad(y, (x, z), g, retain_graph=True)
        same_bits("dx", dx, 3 * g)
        same_bits("dz", dz, g)
        assert not dx.requires_grad and y.grad_fn is not None and not y._is_view()
        (alone,) = torch.autograd.grad(y, x, g, retain_graph=True)
        same_bits("dx alone", alone, 3 * g)
        (alone,) = torch.autograd.grad(y, z, g, retain_graph=True)
        same_bits("dz alone", alone, g)
        (alone,) = torch.autograd.grad(y, x, g.t(), retain_graph=True)
        same_bits("dx alone, of a strided gradient", alone, 3 * g.t().contiguous())
        off = torch.cat([torch.zeros(1), g.flatten()])[1:].view(8, 8)
        before = len(long)
        same_bits("of one that is not aligned", torch.autograd.grad(y, x, off)[0], 3 * g)
        assert len(long) == before + 1
    assert host.runs == 1 and guards[0] == 4
    # All that are not aligned; the other four of the first call, which has the long tape; then each of two kinds once
    assert len(long) == 6 + 4 + 2


def test_a_step_knows_which_gradients_its_plan_gives(learning):
    op, _, long = learning
    x, z = (t.requires_grad_() for t in pair(8, 8))
    g = torch.ones(8, 8)
    for wanted in [(x,)] * 5 + [(x, z)] * 5 + [(z,)] * 5 + [(x,), (z,), (x, z)] * 2:
        for tensor, grad in zip(wanted, torch.autograd.grad(op(x, z, 3.0), wanted, g)):
            same_bits("gradient", grad, torch.full_like(g, 3.0 if tensor is x else 1.0))
    assert len(long) < 5 + 2 * 3


def test_which_gradients_are_wanted_is_seen_by_guards(learning):
    op, _, _ = learning
    x, z = pair(8, 8)
    learn = [t.clone().requires_grad_() for t in (x, z)]
    calls = [(learn[0], z), (x, learn[1]), (*learn,), (x, z)]
    for turn, (a, b) in itertools.product(range(4), calls):
        y = op(a, b, 3.0)
        same_bits(f"turn {turn}", y, 3 * x + z)
        wanted = [t for t in (a, b) if t.requires_grad]
        assert y.requires_grad == bool(wanted)
        for tensor, grad in zip(wanted, torch.autograd.grad(y.sum(), wanted) if wanted else ()):
            same_bits("gradient", grad, torch.full_like(x, 3.0 if tensor is learn[0] else 1.0))
        with torch.no_grad():
            assert not op(a, b, 3.0).requires_grad
        y = op(*learn, 3.0)
        dx, dz = torch.autograd.grad(y, learn, torch.ones_like(x))
        assert dx is not None and dz is not None


def test_a_second_derivative_is_refused_after_guards_too(learning):
    op, _, _ = learning
    for seed in range(4):
        x, z = (t.requires_grad_() for t in pair(8, 8, seed))
        g = torch.ones(8, 8, requires_grad=True)
        (dx,) = torch.autograd.grad(op(x, z, 3.0), x, g, create_graph=True)
        with pytest.raises(RuntimeError, match="once_differentiable"):
            dx.sum().backward()


class Unused(torch.autograd.Function):
    """Gives no gradient to what it is called with."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return None


def test_a_result_that_gets_no_gradient_gives_none(learning):
    op, _, _ = learning
    for seed in range(4):
        x, z = (t.requires_grad_() for t in pair(8, 8, seed))
        found = torch.autograd.grad(Unused.apply(op(x, z, 3.0)).sum(), (x, z), allow_unused=True)
        assert found == (None, None)


def test_arguments_named_in_another_order_are_saved_as_what_they_are(declare):
    def backward(saved, g):
        dx, dz = torch.empty_like(saved.x), torch.empty_like(saved.z)
        launch(g, saved.x, dx, 1.0)
        launch(g, saved.z, dz, 5.0)
        return dx, dz

    op, _ = declare(backward=backward, gradient=Gradient(of=("x", "z"), saves=("x", "z")))
    for seed in range(5):
        x, z = (t.requires_grad_() for t in pair(8, 8, seed))
        for y in (op(x, z), op(x=x, z=z), op(z=z, x=x)):
            dx, dz = torch.autograd.grad(y, (x, z), torch.ones(8, 8))
            same_bits(f"dx, call {seed}", dx, 1 + x)
            same_bits(f"dz, call {seed}", dz, 5 + z)


def test_results_that_carry_no_gradient_are_not_on_the_tape(guards):
    """One that the caller gets, and one that is saved as well."""
    w = torch.ones(128, requires_grad=True)
    for seed in range(5):
        x = torch.randn(6, 128, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        y, rstd = tw.rms_norm_rstd(x, w, 1e-5)
        assert y.requires_grad and not rstd.requires_grad and rstd.grad_fn is None and not rstd._is_view()
        assert not y._is_view() and y.grad_fn is not None and len(y.grad_fn.next_functions) == 2
        found = torch.autograd.grad(y.square().sum(), (x, w))
        with tw.force("triton"):
            wanted = torch.autograd.grad(tw.rms_norm_rstd(x, w, 1e-5)[0].square().sum(), (x, w))
        for one, other in zip(found, wanted):
            same_bits(f"call {seed}", one, other)
    assert guards[0] >= 3


def test_several_results_that_carry_gradients_of_which_one_is_not_used(guards):
    w = torch.ones(128, requires_grad=True)
    for seed in range(6):
        source = torch.Generator().manual_seed(seed)
        x, r = (torch.randn(6, 128, generator=source, requires_grad=True) for _ in range(2))

        def gradients(used, x=x, r=r):
            y, h = tw.add_rms_norm(x, r, w, 1e-5)
            loss = {"y": y.square().sum(), "h": h.square().sum(), "both": (y * h).sum()}[used]
            return torch.autograd.grad(loss, (x, r, w), allow_unused=True)

        for used in ("y", "h", "both", "both"):
            found = gradients(used)
            with tw.force("triton"):
                wanted = gradients(used)
            for one, other in zip(found, wanted):
                assert (one is None) == (other is None)
                if one is not None:
                    same_bits(f"by {used}, call {seed}", one, other)
    assert guards[0] >= 3


def test_a_norm_learns_as_it_does_by_key():
    w = torch.ones(128, dtype=torch.bfloat16, requires_grad=True)
    for seed in range(5):
        source = torch.Generator().manual_seed(seed)
        x = torch.randn(6, 128, generator=source).to(torch.bfloat16).requires_grad_()
        g = torch.randn(6, 128, generator=source).to(torch.bfloat16)
        found = torch.autograd.grad(tw.rms_norm(x, w, 1e-5), (x, w), g)
        with tw.force("triton"):
            wanted = torch.autograd.grad(tw.rms_norm(x, w, 1e-5), (x, w), g)
        for one, other in zip(found, wanted):
            same_bits(f"call {seed}", one, other)


def test_a_backward_that_writes_over_its_argument_is_a_plan(guards):
    labels = torch.tensor([1, 3, 2, 0])
    op = tw.cross_entropy.op
    for seed in range(5):
        leaf = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed), requires_grad=True)
        (wanted,) = torch.autograd.grad(tw.cross_entropy(leaf, labels), leaf)
        logits = leaf * 1.0
        loss = tw.cross_entropy(logits, labels, inplace_backward=True)
        version = logits._version
        (grad,) = torch.autograd.grad(loss, logits, retain_graph=True)
        same_bits(f"call {seed}", grad, wanted)
        assert grad.data_ptr() == logits.data_ptr() and logits._version > version
        assert not grad.requires_grad and grad.grad_fn is None and grad is not logits
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(loss, logits)
        with pytest.raises(ValueError, match="a leaf that requires a gradient"):
            tw.cross_entropy(leaf, labels, inplace_backward=True)
    assert guards[0] > 0 and len(op.backward_plans) == 2  # one that writes over the logits, and one that does not


# ---- lists -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def reduced(monkeypatch):
    """How often the host code over lists ran."""
    ran = []
    original = multi_tensor._reduced
    monkeypatch.setattr(multi_tensor, "_reduced", lambda *given: (ran.append(1), original(*given))[1])
    return ran


def norm_of(tensors: list[Tensor], ord: float = 2.0) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([t.double().flatten() for t in tensors]), ord).float()


@pytest.mark.parametrize("how", [None, "triton"])
def test_the_same_list_is_known_again(reduced, how):
    if how is not None:
        token = choose.forced.set(how)
    try:
        tensors = [torch.randn(5, 8), torch.randn(16).to(torch.bfloat16), torch.randn(0, 3), torch.randn(4, 6).t()]
        for _ in range(4):
            tensors[0].mul_(2)  # other values, in the same places
            torch.testing.assert_close(tw.multi_tensor_norm(tensors), norm_of(tensors))
            torch.testing.assert_close(tw.multi_tensor_norm(tuple(tensors), ord=1.0), norm_of(tensors, 1.0))
            assert int(tw.multi_tensor_count_zeros([tensors[0], torch.zeros(3)][:1])) == 0
        assert len(reduced) == 3
        made = [tw.multi_tensor_norm(tensors) for _ in range(2)]
        assert made[0].data_ptr() != made[1].data_ptr()
    finally:
        if how is not None:
            choose.forced.reset(token)


def test_a_tensor_that_was_replaced_or_changed_is_noticed(reduced):
    tensors = [torch.randn(8, 8) for _ in range(6)]
    alive = [*tensors]  # whose memory no other tensor here may get

    def agrees() -> None:
        before = len(reduced)
        torch.testing.assert_close(tw.multi_tensor_norm(tensors), norm_of(tensors))
        assert len(reduced) == before + 1
        torch.testing.assert_close(tw.multi_tensor_norm(tensors), norm_of(tensors))
        assert len(reduced) == before + 1

    agrees()
    tensors[3] = torch.randn(8, 8)
    agrees()
    tensors[3].data = torch.randn(8, 8)
    agrees()
    tensors[2].resize_(4, 8)
    agrees()
    tensors[2].resize_(2, 16)
    agrees()
    tensors[1].set_(tensors[1].untyped_storage(), 4, (4, 8))
    agrees()
    tensors[0] = tensors[0].t()[:, :4]
    agrees()
    tensors[4] = tensors[4].view(torch.int32).view(torch.float32).to(torch.float16)
    agrees()
    tensors.append(torch.randn(3))
    agrees()
    del tensors[0]
    agrees()
    assert len(alive) == 6
    with pytest.raises(TypeError, match=r"tensors\[1\]"):
        tw.multi_tensor_norm([tensors[0], 1.0])
    learn = [t.clone().requires_grad_() for t in tensors]
    with torch.no_grad():
        tw.multi_tensor_norm(learn)
        tw.multi_tensor_norm(learn)
    with pytest.raises(ValueError, match="no gradient for tensors"):
        tw.multi_tensor_norm(learn)


def test_a_list_whose_tensors_are_copied_first_is_no_plan(reduced):
    tensors = [torch.randn(4, 5, 8)[:, ::2, ::2], torch.randn(3)]
    for turn in range(3):
        torch.testing.assert_close(tw.multi_tensor_norm(tensors), norm_of(tensors))
        assert len(reduced) == turn + 1
