"""Logits that leave their product as codes, in Gluon: every sum and code against float64, nothing else written, and the op by them
against the op by chunks."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tilewright.core.target import Target
from tilewright.gemm.hopper import logits as hopper_logits
from tilewright.ops.loss.linear_cross_entropy_chunks import padded_count

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SHAPES = [
    (300, 256, 1024),
    (128, 72, 512),
    (1, 8, 1),
    (65, 200, 257),
    (1000, 520, 5003),
    (129, 64, 255),
    (17, 2048, 3000),
]
SEVEN = 7.0  # lies around what may be written


@pytest.fixture(autouse=True)
def hopper():
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("needs a Hopper, and a Triton that offers what its kernels in Gluon call")


def drawn(
    T: int, K: int, V: int, dtype: torch.dtype, bias: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Factors, labels of which some are ignored, outside or at the ends of blocks, and a bias."""
    torch.manual_seed(T + K + V)
    hidden = torch.randn(T, K, device="cuda").to(dtype)
    weight = (torch.randn(V, K, device="cuda") * 2 / K**0.5).to(dtype)
    y = torch.randint(V, (T,), device="cuda")
    y[torch.rand(T, device="cuda") < 0.2] = -100
    ends = [v for v in (0, 63, 64, 255, 256, 511, V - 1, V, -1) if v <= V][:T]
    y[: len(ends)] = torch.tensor(ends, device="cuda")
    return hidden, weight, y, None if bias is None else torch.randn(V, device="cuda").to(bias)


def off(found: Tensor, exact: Tensor) -> float:
    return ((found.double() - exact.double()).norm() / exact.double().norm().clamp(min=1e-30)).item()


@pytest.mark.parametrize(("case", "shape"), enumerate(SHAPES), ids=str)
def test_sums_and_codes(case, shape):
    (T, _, V), dtype = shape, FP16 if case % 3 == 2 else BF16
    hidden, weight, y, bias = drawn(*shape, dtype, (None, FP32, BF16)[case % 3])
    blocks, width = -(-V // hopper_logits.BLOCK), padded_count(T)
    codes = torch.full((V + 2, width + 24), SEVEN, device="cuda", dtype=dtype)
    sums = [torch.full((blocks + 2, T), SEVEN, device="cuda") for _ in range(3)]
    own = torch.full((T + 2,), SEVEN, device="cuda")
    (top, total, slant), inner = (s[1:-1] for s in sums), codes[1:-1, 8 : 8 + width]
    labels = y.to(torch.int32 if case % 2 else torch.int64)
    wide, before = F.pad(hidden, (0, 0, 0, width - T)), None
    for _ in range(2):
        hopper_logits.encode(wide, weight, bias, labels, -100, inner, top, total, own[1:-1], slant)
        now = [t.clone() for t in (inner[:, :T], *sums, own)]
        assert before is None or all(map(torch.equal, now, before))
        before = now
    x = weight.double() @ hidden.double().t() + (0 if bias is None else bias.double()[:, None])
    for block, z in enumerate(x.split(hopper_logits.BLOCK)):
        rows = slice(block * hopper_logits.BLOCK, block * hopper_logits.BLOCK + len(z))
        m = z.amax(0)
        assert (top[block] - m).abs().max() < 5e-6 * x.abs().max()
        assert off(total[block], (z - m).exp().sum(0)) < 1e-5 and off(inner[rows, :T], (z - m).exp()) < 3e-3
        assert len(z) == 1 or off(slant[block], (z - m).sum(0)) < 1e-5
        assert ((inner[rows, :T] == 1).sum(0) > 0).all()  # a label that is the top shows no rounding
    counts = (y >= 0) & (y < V)
    right = x[y.clamp(0, V - 1), torch.arange(T, device="cuda")]
    assert ((own[1:-1] - right)[counts].abs() < 5e-6 * x.abs().max()).all() and (own[1:-1][~counts] == SEVEN).all()
    around = [codes[0], codes[-1], codes[:, :8], codes[:, 8 + width :], *(s[[0, -1]] for s in sums), own[[0, -1]]]
    assert all((t == SEVEN).all() for t in around)


def test_codes_of_some_rows_and_nan():
    T, K, V = 200, 64, 1500
    hidden, weight, y, _ = drawn(T, K, V, BF16, None)
    hidden[100, 3] = float("nan")
    y[:4] = torch.tensor([2**62, -(2**62), 2**31, -(2**31)], device="cuda")
    with tw.force("hopper"):
        loss = tw.linear_cross_entropy(hidden, weight, y, reduction="none")
    fine = (y >= 0) & (y < V)
    fine[100] = False
    assert loss[fine].isfinite().all() and loss[:4].isnan().all()
    tops = [torch.empty(-(-V // hopper_logits.BLOCK), T, device="cuda") for _ in range(3)]
    wide, whole, part = (
        F.pad(hidden, (0, 0, 0, 8)),
        *(torch.full((V, 208), SEVEN, device="cuda", dtype=BF16) for _ in range(2)),
    )
    for codes, top in zip((whole, part[:1024], part[:0]), tops):
        hopper_logits.encode(wide, weight, None, y, -100, codes, top)
    assert torch.equal(whole[:1024].view(torch.int16), part[:1024].view(torch.int16)) and (part[1024:] == SEVEN).all()
    assert all(torch.equal(tops[0].view(torch.int32), top.view(torch.int32)) for top in tops[1:])
    assert whole[:, :T].isnan().any(0).nonzero().flatten().tolist() == [100]


@pytest.mark.parametrize(
    ("shape", "dtype", "bias", "reduction", "smoothing", "z_loss"),
    [
        ((300, 512, 2000), BF16, None, "mean", 0.0, 0.0),
        ((700, 256, 3001), BF16, FP32, "mean", 0.1, 1e-3),
        ((300, 512, 2000), FP16, BF16, "none", 0.1, 0.0),
        ((700, 256, 3001), BF16, None, "none", 0.0, 1e-3),
        ((33, 72, 77), BF16, BF16, "sum", 0.0, 0.0),
        ((1500, 512, 1000), FP16, None, "sum", 0.0, 0.0),
    ],
    ids=str,
)
def test_steps_are_as_near_to_the_truth_as_by_chunks(shape, dtype, bias, reduction, smoothing, z_loss):
    hidden, weight, y, b = drawn(*shape, dtype, bias)
    y[(y < 0) | (y >= shape[2])] = -100
    upstream = torch.rand(shape[0], device="cuda") if reduction == "none" else torch.tensor(1.5, device="cuda")
    leaves = [t for t in (hidden, weight, b) if t is not None]
    exact = [t.double().requires_grad_() for t in leaves]
    x, counts = F.linear(*exact), y >= 0
    loss = (
        F.cross_entropy(x, y, reduction="none", label_smoothing=smoothing) + z_loss * x.logsumexp(-1).square() * counts
    )
    loss = loss if reduction == "none" else loss.sum() / (counts.sum() if reduction == "mean" else 1)
    truth = [loss.detach(), *torch.autograd.grad(loss, exact, upstream.double())]
    errors = {}
    for how in ("hopper", "portable"):
        made = [t.clone().requires_grad_() for t in leaves]
        with tw.force(how):
            found = tw.linear_cross_entropy(
                *made[:2], y, *made[2:], reduction=reduction, label_smoothing=smoothing, z_loss=z_loss
            )
            grads = torch.autograd.grad(found, made, upstream)
        errors[how] = [off(a, b) for a, b in zip((found.detach(), *grads), truth)]
    assert errors["hopper"][0] < 1e-5
    assert all(ours < 1.1 * theirs + 1e-4 for ours, theirs in zip(errors["hopper"], errors["portable"])), errors
