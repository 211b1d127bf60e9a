"""`attention` by codes: near to what codes stand for, the same smoothed and not, and what it refuses."""

from __future__ import annotations

import contextlib
import math
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.attention.coded_rows import reference_blocks
from tilewright.ops.quantise.quantize import quantize
from tilewright.runtime.kernel import collect

MATHS = ("int8", "fp8", "int8_pv", "fp8_pv")


@contextlib.contextmanager
def no_launch():
    with collect() as launched:
        yield
    assert not launched


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))).to(dtype)


def heads(length: int = 33, keys: int = 70, width: int = 40, outliers: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = drawn(2, length, 4, width), drawn(2, keys, 2, width, seed=1), drawn(2, keys, 2, width, seed=2)
    if outliers:  # a few channels of keys far from 0 in all tokens, as models have them
        k = k + 20.0 * (torch.arange(width) % 13 == 0)
    return q, k.to(q.dtype), v


def exact(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> tuple[Tensor, Tensor]:
    """Attention written out in float64."""
    q, k, v = q.double(), k.double().repeat_interleave(2, 2), v.double().repeat_interleave(2, 2)
    s = torch.einsum("blhd,bkhd->bhlk", q, k) / math.sqrt(q.shape[-1])
    n, m = s.shape[-2:]
    if causal:
        s = s.masked_fill(torch.arange(m) > torch.arange(n)[:, None] + m - n, -math.inf)
    return torch.einsum("bhlk,bkhd->blhd", s.softmax(-1), v), s.logsumexp(-1)


def off(found: Tensor, there: Tensor) -> float:
    return float((found.double() - there).norm() / there.norm())


@pytest.mark.parametrize("how", MATHS)
def test_it_is_attention_of_what_codes_stand_for(how):
    """Operands of q . k within the bars of attention, and 3e-2 with weights as codes. Blocks of keys have one scale in e4m3."""
    q, k, v = heads(33, 150)
    k[:, :128], v[:, 128:] = 8.0 * k[:, :128], 8.0 * v[:, 128:]
    format = tw.int8("row") if how.startswith("int8") else tw.fp8("row", pow2=False, rule="exact")
    wide = [quantize.function(t.float(), format).dequantize().double() for t in (q, k, v)]
    if how.startswith("fp8"):
        coded = [reference_blocks(t, 33, causal=True) for t in (k, v)]
        wide[1:] = [codes.double() * scale.double()[..., None] for codes, scale in coded]
    there = exact(wide[0], wide[1], wide[2] if how.endswith("_pv") else v.double())[0]
    assert off(tw.attention(q, k, v, causal=True, math=how), there) < (3e-2 if how.endswith("_pv") else 2.4e-3)


@pytest.mark.parametrize("how", MATHS)
def test_smoothing_changes_nothing(how):
    """But rounding: scores, sinks and lse are those of whole keys. Outliers that all keys share are gone before they are codes."""
    q, k, v = heads(outliers=True)
    there, lse = exact(q, k, v)
    found = tw.attention_lse(q, k, v, causal=True, math=how, smooth=True)
    plain = tw.attention_lse(q, k, v, causal=True, math=how)
    assert off(found[0], there) < 0.6 * off(plain[0], there) or how.endswith("_pv")
    assert off(found[0], there) < 6e-2 and float((found[1].double() - lse).abs().max()) < 0.1
    sink = drawn(4, seed=5)
    with_sink = tw.attention(q, k, v, causal=True, math=how, smooth=True, sink=sink, softcap=30.0)
    assert off(with_sink, tw.attention(q, k, v, causal=True, sink=sink, softcap=30.0).double()) < 6e-2


def test_quantised_operands_are_what_they_are():
    q, k, v = heads()
    # Which have a scale for each row, as codes that are made on the way have them where a mask says what is seen
    all_seen = torch.ones(1, 1, 1, 1, dtype=torch.bool)
    for format, kind in ((tw.int8("row"), "int8"), (tw.fp8("row", pow2=False, rule="exact"), "fp8")):
        codes = [quantize.function(t, format) for t in (q, k, v)]
        made = tw.attention(q, k, v, math=kind, mask=all_seen)
        assert torch.equal(tw.attention(q, codes[1], v, mask=all_seen), made)
        assert torch.equal(tw.attention(codes[0], codes[1], v, mask=all_seen), made)
        whole = tw.attention(*codes, mask=all_seen)
        assert whole.dtype == q.dtype
        assert torch.equal(whole, tw.attention(q, k, v, math=f"{kind}_pv", mask=all_seen))
    blocks = [quantize.function(t, tw.mx("e4m3")) for t in (q, k)]
    wide = [t.dequantize() for t in blocks]
    assert torch.equal(tw.attention(*blocks, v, causal=True), tw.attention(*wide, v, causal=True))


@pytest.mark.parametrize("how", MATHS)
def test_what_nobody_sees_may_hold_anything(how):
    q, k, v = heads()
    lengths = torch.tensor([70, 41])
    clean = tw.attention(q, k, v, causal=True, math=how, kv_len=lengths)
    k[1, 41:], v[1, 41:] = float("nan"), float("inf")
    assert torch.equal(tw.attention(q, k, v, causal=True, math=how, kv_len=lengths), clean)
    assert not tw.attention(q, k, v, causal=True, math=how, kv_len=lengths, smooth=True).isnan().any()
    assert bool(tw.attention(q, k, v, math=how, kv_len=torch.tensor([71, 3]))[0].isnan().all())


def told(how: str) -> dict[str, Tensor]:
    """What says which keys there are, in one of four ways, for 24 queries and 70 keys in two batches, or packed in one."""
    if how == "sequences":
        return {"kv_len": torch.tensor([70, 41])}
    if how == "rows":
        return {"kv_len": torch.tensor([[70] * 24, [*range(18, 42)]])}
    marks = {"cu_seqlens_q": torch.tensor([3, 27, 48]), "cu_seqlens_k": torch.tensor([5, 70, 139])}
    return {**marks, **({"kv_len": torch.tensor([65, 41])} if how == "packed, lengths" else {})}


def unseen(how: str) -> list[tuple[int, slice]]:
    """(batch, keys) that no query sees."""
    if how in ("sequences", "rows"):
        return [(1, slice(41, None))]
    hidden = [(0, slice(0, 5)), (0, slice(139, None))]
    return [*hidden, (0, slice(70 + 41, 139))] if how == "packed, lengths" else hidden


@pytest.mark.parametrize("math", ["int8", "fp8_pv"])
@pytest.mark.parametrize("how", ["sequences", "rows", "packed", "packed, lengths"])
@pytest.mark.parametrize("garbage", [float("nan"), float("inf"), 1e30])
def test_the_mean_is_that_of_the_keys_there_are(how, garbage, math):
    """What lies past them changes no bit, and neither costs precision nor shows."""
    q, k, v = heads(24, 70, outliers=True)
    if how.startswith("packed"):
        q, k, v = (t.reshape(1, -1, *t.shape[2:]) for t in (q, k, v))
    given = told(how)
    clean = tw.attention_lse(q, k, v, math=math, smooth=True, **given)
    near = tw.attention(q, k, v, **given)
    assert off(clean[0], near.double()) < (2e-2 if math == "int8" else 6e-2)
    for batch, keys in unseen(how):
        k[batch, keys], v[batch, keys] = garbage, garbage
    found = tw.attention_lse(q, k, v, math=math, smooth=True, **given)
    assert all(torch.equal(a, b) for a, b in zip(found, clean))


@pytest.mark.parametrize("how", ["fp8", "fp8_pv"])
def test_a_block_has_the_scale_of_what_is_seen(how):
    """Keys that a window hides from all queries may hold anything, in the same block too."""
    q, k, v = heads(24, 150)
    clean = tw.attention(q, k, v, causal=True, left=9, math=how)
    k[:, : 150 - 24 - 9], v[:, : 150 - 24 - 9] = 1e30, float("inf")
    assert torch.equal(tw.attention(q, k, v, causal=True, left=9, math=how), clean)


@pytest.mark.parametrize("how", ["fp8", "fp8_pv"])
def test_what_is_not_finite_stays_its_own(how):
    """Queries before it do not see it in their block's scale."""
    q, k, v = heads(64, 64)
    clean = tw.attention(q, k, v, causal=True, math=how)
    k[0, 40, 1, 3] = float("inf")
    found = tw.attention(q, k, v, causal=True, math=how)
    assert torch.equal(found[0, :40], clean[0, :40]) and bool(found[0, 40:, 2:].isnan().all())


def test_a_sequence_without_keys_has_no_mean():
    q, k, v = heads()
    found = tw.attention(q, k, v, math="int8", smooth=True, kv_len=torch.tensor([0, -3]))
    assert not found.any()


def test_calls_that_make_no_sense_are_refused():
    q, k, v = heads()
    row = quantize.function(k, tw.int8("row"))
    for call, said in (
        (lambda: tw.attention(q, k, v, math="int4"), "math must be one of"),
        (lambda: tw.attention(q, k, v, smooth=True), "smooth is for keys that are quantised"),
        (lambda: tw.attention(q, row, v, smooth=True), "smooth takes the mean off k before"),
        (lambda: tw.attention(q, row, v, math="fp8"), "cannot be multiplied in fp8"),
        (lambda: tw.attention(q, row, quantize.function(v, tw.int8("row")), math="int8"), "that is int8_pv"),
        (lambda: tw.attention(q, k, v, math="int8", backend="hopper"), "backend hopper does not take .* 'int8'"),
        (lambda: tw.attention(q, k, v, math="int8_pv", backend="hopper"), "backend hopper does not take .* 'int8_pv'"),
        (lambda: tw.attention(q, k, v, math="int8", backend="other"), "backend must be one of"),
        (lambda: tw.attention(q.requires_grad_(), k, v, math="int8"), r"no gradient for q: pass q\.detach\(\)"),
        (lambda: tw.attention(q.detach(), quantize.function(k, tw.fp8("1x128")), v), "k must be"),
    ):
        with pytest.raises(ValueError, match=f"attention: .*{said}"):
            call()
    q.requires_grad_(False)
    q.detach_()
    for smooth in (False, True):
        with no_launch(), pytest.raises(ValueError, match=r"kv_len must be \[batch\] = \[2\]"):
            tw.attention(q, k, v, math="int8", smooth=smooth, kv_len=torch.tensor([1, 2, 3]))
        with no_launch(), pytest.raises(TypeError, match="kv_len"):
            tw.attention(q, k, v, math="int8", smooth=smooth, kv_len=[1, 2])


def costs() -> dict[str, list[float]]:
    """What quantising costs against numbers, relative RMS: of normal data, of outlier channels, of those smoothed."""
    made = {}
    for how in MATHS:
        row = []
        for outliers, smooth in ((False, False), (False, True), (True, False), (True, True)):
            q, k, v = heads(64, 128, 64, outliers)
            row.append(off(tw.attention(q, k, v, causal=True, math=how, smooth=smooth), exact(q, k, v)[0]))
        made[how] = row
    return made


PUBLISHED = re.compile(r"^\| `\"(\w+)\"` \|((?: [\d.]+ % \|){4})$", re.MULTILINE)


def test_what_quantising_costs():
    """As docs/measured.md has it, to a tenth: the same data, so that a change shows there."""
    page = (Path(__file__).parents[2] / "docs" / "measured.md").read_text()
    said = {how: [float(n) / 100 for n in re.findall(r"[\d.]+", cells)] for how, cells in PUBLISHED.findall(page)}
    assert said.keys() == set(MATHS)
    for how, found in costs().items():
        assert found == pytest.approx(said[how], rel=0.1), how
