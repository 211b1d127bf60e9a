"""What is peculiar to attention's kernels: what is invisible never shows, whatever it holds, nor does the order of programs; and
lengths on the device that are wrong."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.attention.seen import seen
from tilewright.check.compare import check
from tilewright.check.memory import guarded_allocations
from tilewright.check.oracle import outcome, same_bits, same_outcome
from tilewright.toolchain.interpret import reversed_programs

OP = tw.catalogue()["attention_lse"]
NAN = float("nan")
WINDOW = ("causal", "left", "right", "kv_len", "cu_seqlens_q", "cu_seqlens_k")


def numbers(*shape: int, seed: int = 0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def call(batch: int, length: int, keys: int, width: int = 40, values: int = 24, **options: Any) -> dict[str, Any]:
    """Arguments of two heads that share one."""
    q, k = numbers(batch, length, 2, width), numbers(batch, keys, 1, width, seed=1)
    made = {"q": q, "k": k, "v": numbers(batch, keys, 1, values, seed=2), **options}
    return OP.signature.bind((), made)


def marks(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def hidden(*shape: int, key: int, row: int) -> Tensor:
    """A mask that hides a key from everyone, and all keys from a row."""
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(3)) < 0.7
    mask[..., key] = mask[..., row, :] = False
    return mask


CALLS = {
    "past kv_len": call(2, 3, 70, kv_len=marks(66, 1), causal=True),
    "before the window": call(1, 3, 140, left=2, causal=True),
    "after the window": call(1, 3, 70, right=1, kv_len=marks(40)),
    "rows that come before all keys": call(1, 6, 3, causal=True),
    "past each row's kv_len": call(1, 4, 70, kv_len=marks(0, 66, 3, 20)[None], left=4, right=2),
    "hidden by a mask": call(2, 4, 70, mask=hidden(2, 1, 4, 70, key=66, row=1)),
    "hidden by a mask from some heads": call(1, 4, 9, width=16, mask=hidden(1, 2, 4, 9, key=2, row=3), softcap=2.0),
    "of no sequence": call(1, 9, 80, cu_seqlens_q=marks(1, 4, 4, 7), cu_seqlens_k=marks(2, 70, 72, 75), causal=True),
    "of sequences that fall": call(1, 9, 12, cu_seqlens_q=marks(0, 6, 3, 8), cu_seqlens_k=marks(1, 5, 9, 11)),
    "packed, past kv_len": call(
        1, 7, 20, cu_seqlens_q=marks(0, 3, 7), cu_seqlens_k=marks(0, 10, 20), kv_len=marks(4, -3), causal=True
    ),
}  # fmt: skip
calls = pytest.mark.parametrize("values", CALLS.values(), ids=list(CALLS))


def unseen(values: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Rows of queries that see nothing, and keys that no query sees: [batch, length] and [batch, keys]."""
    visible = seen(values["q"], values["k"], *(values[n] for n in WINDOW)).visible.unsqueeze(1)
    if values["mask"] is not None:
        visible = visible & values["mask"]
    return ~visible.any(3).any(1), ~visible.any(2).any(1)


@calls
def test_what_is_invisible_never_shows(values):
    """NaN in it leaves every result and gradient as it was, in whatever order programs run; its own gradients are 0."""
    rows, keys = unseen(values)
    assert bool(rows.any()) or bool(keys.any())
    poisoned = {**values, "q": values["q"].masked_fill(rows[..., None, None], NAN)}
    poisoned |= {n: values[n].masked_fill(keys[..., None, None], NAN) for n in "kv"}
    with tw.force("triton"):
        clean = outcome(OP, values)
        with reversed_programs():
            dirty = outcome(OP, poisoned, grads=clean.grads)
    same_outcome("NaN in what nobody sees", dirty, clean)
    assert not dirty["o"][rows].any() and not dirty["d_q"][rows].any()
    assert not dirty["d_k"][keys].any() and not dirty["d_v"][keys].any()
    check(OP, "NaN in what nobody sees", values, dirty)


def test_gradients_of_rows_of_no_sequence_may_hold_anything():
    values = CALLS["of no sequence"]
    rows = unseen(values)[0]
    assert bool(rows[0, [0, 7, 8]].all())
    with tw.force("triton"):
        clean = outcome(OP, values)
        grads = [clean.grads[0].clone(), clean.grads[1].clone()]
        grads[0][0, [0, 7, 8]] = grads[1][:, :, [0, 7, 8]] = NAN
        dirty = outcome(OP, values, grads=grads)
    for name in ("d_q", "d_k", "d_v"):
        same_bits(name, dirty[name], clean[name])


@pytest.mark.parametrize("width", [512, 576])
def test_the_widest_heads(width):
    values = call(1, 3, 5, width, min(width, 512), causal=True)
    with tw.force("triton"):
        check(OP, f"{width} columns", values, outcome(OP, values))


def test_scores_of_minus_infinity():
    """A mask that is added may hide all keys of a row: it is 0, its lse -inf and its gradients 0."""
    mask = numbers(1, 1, 4, 70)
    mask[..., 1, :] = mask[..., 66] = -torch.inf
    values = call(2, 4, 70, mask=mask)
    with tw.force("triton"):
        made = outcome(OP, values)
    assert (
        not made["o"][:, 1].any() and not made["d_q"][:, 1].any() and bool((made["lse"][:, :, 1] == -torch.inf).all())
    )
    check(OP, "scores of -inf", values, made)


@pytest.mark.parametrize(
    "values",
    [
        call(2, 3, 70, kv_len=marks(71, 70)),
        call(2, 3, 5, kv_len=marks(2**31 - 1, 5), causal=True),
        call(1, 4, 70, kv_len=marks(70, 71, 3, 2**31 - 1)[None]),
        call(1, 7, 20, cu_seqlens_q=marks(0, 3, 7), cu_seqlens_k=marks(0, 10, 20), kv_len=marks(11, 10)),
    ],
    ids=["sequence", "far", "rows", "packed"],
)
def test_more_keys_than_there_are_make_rows_nan(values):
    """And nothing is read outside: strict memory would say so."""
    wrong = seen(values["q"], values["k"], *(values[n] for n in WINDOW)).wrong
    assert bool(wrong.any()) and not bool(wrong.all())
    with tw.force("triton"), guarded_allocations(0xFF) as guards:
        made = outcome(OP, values)
    for guard in guards:
        guard.check("kv_len too large")
    assert bool(made["o"][wrong].isnan().all()) and not bool(made["o"][~wrong].isnan().any())
    assert bool(made["lse"].transpose(1, 2)[wrong].isnan().all())
    check(OP, "kv_len too large", values, made)


def test_a_wrong_row_s_sink_has_a_gradient_of_nan():
    values = call(2, 3, 5, kv_len=marks(6, 5), sink=numbers(2))
    with tw.force("triton"):
        made = outcome(OP, values)
    assert bool(made["d_sink"].isnan().all())
    check(OP, "kv_len too large with a sink", values, made)


def test_debug_names_wrong_lengths(monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_DEBUG", "1")
    for options, words in (
        ({"kv_len": marks(9)}, r"attention: kv_len must be in \[0, 9\), got values from 9 to 9"),
        ({"cu_seqlens_q": marks(0, 3, 2), "cu_seqlens_k": marks(0, 3, 5)}, "attention: cu_seqlens_q must ascend"),
        ({"cu_seqlens_q": marks(0, 3), "cu_seqlens_k": marks(0, 9)}, r"attention: cu_seqlens_k must ascend within \[0, 8\]"),
    ):  # fmt: skip
        with tw.force("triton"), pytest.raises(ValueError, match=words):
            OP.function(**call(1, 5, 8, **options))


FAR = (2**31 - 1, 2**31 - 5, 2**31, 2**40)


@pytest.mark.parametrize("far", FAR)
@pytest.mark.parametrize(("length", "keys"), [(4, 4), (9, 4), (4, 9)])
def test_a_window_past_every_key_is_none(far, length, keys):
    """Forward and backward: with a position, numbers of such windows do not fit into 32 bits."""
    for side in ({"left": far, "causal": True}, {"left": far}, {"right": far}, {"left": far, "right": far}):
        given = [numbers(1, n, 1, 16, seed=n).requires_grad_() for n in (length, keys, keys)]
        plain = {"causal": True} if "causal" in side else {}
        with tw.force("triton"):
            found, wanted = (tw.attention(*given, **options) for options in (side, plain))
            gradients = [torch.autograd.grad(o.sum(), given) for o in (found, wanted)]
        same_bits("o", found, wanted)
        for name, one, other in zip("qkv", *gradients):
            same_bits(f"gradient of {name}", one, other)


@pytest.mark.parametrize("math", ["int8", "fp8", "fp8_pv"])
def test_a_window_past_every_key_is_none_for_codes(math):
    given = [numbers(1, n, 1, 16, seed=n) for n in (4, 9, 9)]
    with torch.no_grad(), tw.force("triton"):
        for side in ({"left": FAR[0]}, {"right": FAR[0]}):
            same_bits(f"{side}", tw.attention(*given, **side, math=math), tw.attention(*given, math=math))
