"""aten's flash attention, forward, by ours: o and lse in its layout and its conventions, and what stays its own."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.aten import attention

NAME = "_flash_attention_forward"
OP = torch.ops.aten._flash_attention_forward.default
BF16, FP16, INT32 = torch.bfloat16, torch.float16, torch.int32


def exact(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, left: int = -1, right: int = -1, scale: float | None = None
) -> Any:
    """(o, lse) of one sequence in float64, by the formula: windows are counted from where the last query stands, at the last
    key."""
    n, m = q.shape[0], k.shape[0]
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, 1) for t in (k, v))
    s = torch.einsum("lhd,khd->hlk", q.double(), k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    ahead = torch.arange(m, device=q.device)[None] - (torch.arange(n, device=q.device)[:, None] + m - n)
    right = 0 if causal else right
    seen = (ahead <= (right if right >= 0 else m)) & (ahead >= -(left if left >= 0 else m + n))
    s = s.masked_fill(~seen, -math.inf)
    lse = torch.logsumexp(s, -1)
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0)[..., None])
    return torch.einsum("hlk,khd->lhd", p, v), lse.masked_fill(lse == -math.inf, math.inf)


def close(o: Tensor, lse: Tensor, wanted: tuple[Tensor, Tensor], v: Tensor) -> None:
    """Weights are rounded once to 16 bits, and so is o."""
    step = torch.finfo(o.dtype).eps * float(v.double().abs().max())
    torch.testing.assert_close(o.double(), wanted[0], rtol=0.0, atol=step)
    torch.testing.assert_close(lse.double(), wanted[1], rtol=1e-5, atol=1e-4)


def operands(n: int, m: int, heads: int, kv_heads: int, width: int, dtype: torch.dtype, turned: bool) -> list[Tensor]:
    """q, k and v of two sequences; `turned`: as `scaled_dot_product_attention` has them, heads before their tokens."""
    torch.manual_seed(0)
    shapes = [(2, n, heads, width), (2, m, kv_heads, width), (2, m, kv_heads, width)]
    if turned:
        return [torch.randn(b, h, s, d).to(dtype).transpose(1, 2) for b, s, h, d in shapes]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def called(*args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """A call that is ours."""
    with tw.aten.use("all", include=NAME):
        made = OP(*args, **kwargs)
        said = tw.aten.report()[NAME]
    assert said == {"taken": 1, "declined": {}}, said
    return made


def lies_as_torchs(made: tuple[Tensor, ...], *args: Any, **kwargs: Any) -> None:
    """By the kernel that torch has for tensors without memory."""
    blank = [t.to("meta") if isinstance(t, Tensor) else t for t in args]
    for own, other in zip(made, OP(*blank, **kwargs), strict=True):
        assert (own.dtype, own.shape, own.stride()) == (other.dtype, other.shape, other.stride())


@pytest.mark.parametrize(
    ("n", "m", "heads", "kv_heads", "width", "causal", "options", "dtype", "turned"),
    [
        (20, 20, 4, 2, 16, True, {}, BF16, True),
        (33, 70, 2, 2, 64, False, {"scale": 0.3}, FP16, False),
        (7, 40, 3, 1, 40, True, {}, BF16, False),
        (1, 19, 4, 2, 32, True, {}, BF16, True),
        (24, 30, 2, 1, 16, False, {"window_size_left": 4, "window_size_right": 2}, BF16, True),
        (24, 24, 2, 2, 16, True, {"window_size_left": 3, "window_size_right": 5}, FP16, False),
        (24, 24, 2, 2, 16, False, {"window_size_left": -1, "window_size_right": 0}, BF16, False),
        (30, 12, 2, 2, 16, True, {}, BF16, True),
    ],
)  # fmt: skip
def test_dense(n, m, heads, kv_heads, width, causal, options, dtype, turned):
    """Of the last case eighteen rows see nothing: they are 0, and their lse is +inf, by which aten's backward leaves them out."""
    q, k, v = operands(n, m, heads, kv_heads, width, dtype, turned)
    args = (q, k, v, None, None, n, m, 0.0, causal, False)
    made = called(*args, **options)
    lies_as_torchs(made, *args, **options)
    window = options.get("window_size_left", -1), options.get("window_size_right", -1)
    for b in range(2):
        wanted = exact(q[b], k[b], v[b], causal, *window, options.get("scale"))
        close(made[0][b], made[1][b], wanted, v)
        assert bool((wanted[1] == math.inf).any()) == (n > m)


@pytest.mark.parametrize("causal", [False, True])
def test_packed(causal):
    """Sequences between marks, one of them without keys and one without queries."""
    torch.manual_seed(0)
    marks_q, marks_k = [0, 9, 14, 14, 30], [0, 12, 12, 20, 36]
    q, k, v = (torch.randn(total, heads, 16).to(BF16) for total, heads in ((30, 4), (36, 2), (36, 2)))
    args = (q, k, v, torch.tensor(marks_q, dtype=INT32), torch.tensor(marks_k, dtype=INT32), 16, 16, 0.0, causal, False)
    made = called(*args)
    lies_as_torchs(made, *args)
    for a, b, c, d in zip(marks_q, marks_q[1:], marks_k, marks_k[1:]):
        if b > a and d > c:
            close(made[0][a:b], made[1][:, a:b], exact(q[a:b], k[c:d], v[c:d], causal), v)
    assert not made[0][9:14].any() and bool((made[1][:, 9:14] == math.inf).all())


def test_rows_that_see_nothing_are_noticed(monkeypatch):
    monkeypatch.setattr(attention, "mark_empty", lambda lse: None)
    with pytest.raises(AssertionError, match="nfinity|inf"):
        test_dense(30, 12, 2, 2, 16, True, {}, BF16, True)


DECLINED: dict[str, tuple[str, dict[str, Any]]] = {
    "dropout": ("dropout, or", {"dropout_p": 0.1}),
    "debug": ("dropout, or", {"dropout_p": 0.1, "return_debug_mask": True}),
    "slopes": ("lengths, slopes", {"alibi_slopes": lambda: torch.rand(4)}),
    "fp32": ("other dtypes", {"query": lambda: torch.randn(2, 8, 4, 16)}),
    "two dtypes": ("other dtypes", {"key": lambda: torch.randn(2, 8, 2, 16).to(FP16)}),
    "heads": ("that fit", {"query": lambda: torch.randn(2, 8, 3, 16).to(BF16)}),
    "ranks": ("that fit", {"query": lambda: torch.randn(8, 4, 16).to(BF16)}),
    "widths": ("widths or strides", {n: lambda: torch.randn(2, 8, 2, 12).to(BF16) for n in ("query", "key", "value")}),
    "gaps": ("widths or strides", {"query": lambda: torch.randn(2, 8, 4, 32).to(BF16)[..., ::2]}),
    "nothing": ("no elements", {"query": lambda: torch.randn(2, 0, 4, 16).to(BF16)}),
    "one mark": ("that fit", {"cum_seq_q": lambda: torch.tensor([0, 8], dtype=INT32)}),
}


@pytest.mark.parametrize("what", DECLINED)
def test_what_is_left_to_aten(what):
    """And is its exception where it has one: on a processor always, for which it has no kernel."""
    reason, changed = DECLINED[what]
    names = (
        "query",
        "key",
        "value",
        "cum_seq_q",
        "cum_seq_k",
        "max_q",
        "max_k",
        "dropout_p",
        "is_causal",
        "return_debug_mask",
    )
    q, k, v = operands(8, 8, 4, 2, 16, BF16, False)
    given = dict(zip(names, (q, k, v, None, None, 8, 8, 0.0, False, False)))
    given |= {name: value() if callable(value) else value for name, value in changed.items()}

    def outcome() -> str:
        try:
            OP(*(given[name] for name in names), **{n: t for n, t in given.items() if n not in names})
        except Exception as error:
            return type(error).__name__
        return "a result"

    wanted = outcome()
    with tw.aten.use("all", include=NAME):
        found = outcome()
        said = tw.aten.report()[NAME]
    assert found == wanted and said["taken"] == 0 and any(reason in why for why in said["declined"]), said
