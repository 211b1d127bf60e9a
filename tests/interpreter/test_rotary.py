"""What the rotary family promises beyond the properties of every op: sines of large angles, head sizes, wild sequence ends."""

from __future__ import annotations

import pytest
import torch
import triton.language as tl
from torch import Tensor

import tilewright as tw
from tilewright.check.compare import check
from tilewright.check.oracle import outcome
from tilewright.core.tensor import cdiv
from tilewright.device.rotary import cos_sin
from tilewright.ops.rotary.mla_rope import mla_rope
from tilewright.ops.rotary.qkv_split import qkv_split
from tilewright.runtime.kernel import kernel


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def drawn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@kernel(grid=lambda a: (cdiv(a.N, a.BLOCK),), tokens=("N",), default=lambda a: {"BLOCK": 16384, "num_warps": 4})
def cosines_and_sines(X, C, S, N, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    c, s = cos_sin(tl.load(X + i, i < N, 0.0))
    tl.store(C + i, c, i < N)
    tl.store(S + i, s, i < N)


@pytest.mark.parametrize("reach, error", [(1.0, 1e-7), (100.0, 1e-7), (1e4, 1e-7), (1e6, 1e-7), (6e6, 4.5e-7)])
def test_angles_of_any_size(reach, error):
    x = (torch.rand(100000, generator=torch.Generator().manual_seed(1)) * 2 - 1) * reach
    quarter = torch.arange(-2000, 2000) * (torch.pi / 2)  # where one of the two vanishes
    x = torch.cat([x, quarter[quarter.abs() <= reach], torch.tensor([0.0, -0.0, reach, 1e-30])])
    c, s = torch.empty_like(x), torch.empty_like(x)
    cosines_and_sines(x, c, s, x.numel())
    assert float((c.double() - x.double().cos()).abs().max()) <= error
    assert float((s.double() - x.double().sin()).abs().max()) <= error


def test_angles_that_are_not_finite():
    x = torch.tensor([torch.inf, -torch.inf, torch.nan, 1.0])
    c, s = torch.empty_like(x), torch.empty_like(x)
    cosines_and_sines(x, c, s, 4)
    assert c.isnan().tolist() == s.isnan().tolist() == [True, True, True, False]


@pytest.mark.parametrize("head_dim", [32, 72, 80, 96, 128, 192, 256])
@pytest.mark.parametrize("share", [1, 2, 4])
def test_head_sizes(head_dim, share):
    rotary_dim = head_dim // share
    odd = (head_dim // 8 + share) % 2
    values = qkv_split.signature.bind((), {
        "qkv": drawn(2, 3, 5 * head_dim, dtype=torch.bfloat16), "heads": 3, "kv_heads": 1, "head_dim": head_dim,
        "q_weight": drawn(head_dim, seed=1), "k_weight": drawn(head_dim, seed=2), "freqs": 9 * drawn(3, rotary_dim // 2, seed=3),
        "rotary_dim": rotary_dim, "pairing": "interleaved" if odd else "half", "silu": bool(odd),
    })  # fmt: skip
    check(qkv_split, f"head_dim {head_dim}, {rotary_dim} turned", values, outcome(qkv_split, values))


@pytest.mark.parametrize("nope, turned, value", [(128, 64, 128), (0, 32, 5), (64, 24, 192)])
def test_latent_head_sizes(nope, turned, value):
    values = mla_rope.signature.bind((), {
        "q": drawn(3, 2, 10, nope + turned, dtype=torch.bfloat16), "kv": drawn(3, 2, 10, nope + value, dtype=torch.bfloat16),
        "k_pos": drawn(3, 2, 1, turned, dtype=torch.bfloat16), "freqs": 9 * drawn(3, turned // 2, seed=3),
    })  # fmt: skip
    check(mla_rope, f"{nope} plain, {turned} turned", values, outcome(mla_rope, values))


def test_a_narrow_view_is_not_copied():
    """k_pos as Megatron has it: the last columns of a wider projection."""
    wide = drawn(3, 2, 40, dtype=torch.bfloat16)
    q, kv = drawn(3, 2, 4, 16, dtype=torch.bfloat16), drawn(3, 2, 4, 24, dtype=torch.bfloat16)
    freqs = drawn(3, 4, seed=3)
    narrow = wide[..., 32:].unsqueeze(2)
    for actual, expected in zip(
        tw.mla_rope(q, kv, narrow, freqs=freqs), tw.mla_rope(q, kv, narrow.clone(), freqs=freqs)
    ):
        assert torch.equal(actual, expected)


def test_a_position_without_an_angle_is_nan_and_alone():
    """Sequences longer than the table: device data, so that nothing can be raised."""
    q, k, freqs = drawn(1, 8, 2, 8), drawn(1, 8, 1, 8, seed=1), drawn(1, 4, 2, seed=2)
    ends = torch.tensor([0, 6, 8], dtype=torch.int32)
    options = {"freqs": freqs, "layout": "bshd", "rotary_dim": 4}
    found = tw.rope(q, k, cu_seqlens=ends, **options)
    lost = torch.tensor([False] * 4 + [True] * 2 + [False] * 2)
    for t, x in zip(found, (q, k)):
        assert torch.equal(t[0, :, 0, 0].isnan(), lost)
        assert torch.equal(t[..., 4:], x[..., 4:])
    x = q.clone().requires_grad_()
    tw.rope_one(x, cu_seqlens=ends, **options).sum().backward()
    assert torch.equal(x.grad[0, :, 0, 0].isnan(), lost)
    weight = torch.ones(8)
    packed = tw.qkv_split(drawn(1, 8, 32), 2, 1, 8, weight, weight, freqs[0], cu_seqlens=ends, rotary_dim=4)
    assert torch.equal(packed[0][0, :, 0, 0].isnan(), lost) and not packed[2].isnan().any()


@pytest.mark.parametrize("value", [-1, -(2**31), 2**31 - 1, 3, 100])
def test_wild_ends_leave_other_sequences_alone(value):
    x, freqs = drawn(1, 9, 2, 8), drawn(1, 32, 4, seed=2)
    right = torch.tensor([0, 3, 6], dtype=torch.int32)
    wrong = torch.tensor([0, 3, value], dtype=torch.int32)
    first, other = (tw.rope_one(x, freqs=freqs, layout="bshd", cu_seqlens=ends) for ends in (right, wrong))
    assert torch.equal(first[:, :6], other[:, :6])


def test_gradients_of_some_results_only():
    """Heads of which nothing was used have gradients of exactly 0."""
    qkv, weight = drawn(1, 3, 32).requires_grad_(), torch.ones(8, requires_grad=True)
    q, _, _ = tw.qkv_split(qkv, 2, 1, 8, weight, weight.detach().clone().requires_grad_(), drawn(3, 4, seed=2))
    q.sum().backward()
    assert bool(qkv.grad[..., :16].any()) and not bool(qkv.grad[..., 16:].any())


def test_nothing_of_q_and_k_is_kept_for_the_backward():
    q, k = drawn(1, 2, 3, 8).requires_grad_(), drawn(1, 1, 3, 8).requires_grad_()
    made, _ = tw.rope(q, k, freqs=drawn(1, 3, 4, seed=2))
    kept = [t for t in made.grad_fn.saved_tensors if t is not None and t.dim() == 4]
    assert len(kept) == 2 and all(t.untyped_storage().nbytes() == t.element_size() for t in kept)


@pytest.mark.parametrize("value", [-1, 4, -(2**31), 2**31 - 1])
def test_a_given_position_without_an_angle_is_nan_and_alone(value):
    """Whatever the device holds, its own row alone is lost, forward and backward; positions may have any strides."""
    freqs, where = drawn(1, 4, 4, seed=2), torch.tensor([[3, 0, 2], [1, value, 3]], dtype=torch.int32)
    lost = torch.tensor([[False, False, False], [False, True, False]])
    x = drawn(2, 3, 2, 8).requires_grad_()
    y = tw.rope_one(x, freqs=freqs, layout="bshd", positions=where.t().contiguous().t())
    y.sum().backward()
    assert torch.equal(y.isnan().all(-1).all(-1), lost) and torch.equal(x.grad.isnan().any(-1).any(-1), lost)
    right = tw.rope_one(x.detach(), freqs=freqs, layout="bshd", positions=where.clamp(0, 3))
    assert torch.equal(y.detach()[~lost], right[~lost])
    weight = torch.ones(8)
    q, k, v = tw.qkv_split(drawn(2, 3, 32), 2, 1, 8, weight, weight, freqs[0], positions=where)
    assert all(torch.equal(t.isnan().any(-1).any(-1), lost) for t in (q, k)) and not v.isnan().any()
    latent = [drawn(2, 3, 2, 12), drawn(2, 3, 2, 9), drawn(2, 3, 1, 8)]
    q, k, v = tw.mla_rope(*latent, freqs=freqs[0], positions=where, layout="bshd")
    assert all(torch.equal(t.isnan().any(-1).any(-1), lost) for t in (q, k)) and not v.isnan().any()
