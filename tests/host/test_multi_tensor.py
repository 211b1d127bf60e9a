"""Norms and clipping over lists of tensors: torch's own functions as the oracle, torch.compile, and two processes."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tilewright as tw
from tilewright.ops.optimiser.multi_tensor_table import folded

ORDS = (1.0, 2.0, math.inf)
MIXED = (torch.float32, torch.bfloat16, torch.float16)


def parameters(seed: int = 0, scale: float = 1.0, dtypes: tuple = MIXED) -> list[torch.nn.Parameter]:
    source = torch.Generator().manual_seed(seed)
    made = []
    for i, shape in enumerate(((3, 5), (7,), (), (2, 3, 4), (0, 3))):
        p = torch.nn.Parameter(torch.zeros(shape, dtype=dtypes[i % len(dtypes)]))
        p.grad = (scale * torch.randn(shape, generator=source)).to(p.dtype)
        made.append(p)
    return [*made, torch.nn.Parameter(torch.zeros(2))]  # the last has no gradient


def gradients(parameters: list) -> list[Tensor]:
    return [p.grad.clone() for p in parameters if p.grad is not None]


@pytest.mark.parametrize("norm_type", ORDS)
@pytest.mark.parametrize("max_norm", [0.0, 0.5, 1e3, math.inf])
def test_clipping_is_torchs(norm_type, max_norm):
    ours, theirs = parameters(dtypes=MIXED[:1]), parameters(dtypes=MIXED[:1])
    found = tw.clip_grad_norm_(ours, max_norm, norm_type)
    filled = [p for p in theirs if p.numel()]  # torch refuses the inf-norm of nothing
    expected = torch.nn.utils.clip_grad_norm_(filled, max_norm, norm_type)
    torch.testing.assert_close(found, expected, rtol=3e-7, atol=0)
    torch.testing.assert_close(gradients(ours), gradients(theirs), rtol=1e-6, atol=0)


def test_mixed_dtypes_are_clipped_by_one_fp32_norm():
    made = parameters(scale=10.0)
    before = gradients(made)
    exact = torch.linalg.vector_norm(torch.cat([g.double().reshape(-1) for g in before]))
    total = tw.clip_grad_norm_((p for p in made), 1.0)
    assert total.dtype == torch.float32 and total.shape == ()
    torch.testing.assert_close(total.double(), exact, rtol=1e-7, atol=0)
    for g, was in zip(gradients(made), before):
        wanted = (was.double() / (exact + 1e-6)).to(g.dtype)
        torch.testing.assert_close(g, wanted, rtol=2 * torch.finfo(g.dtype).eps, atol=0)


def test_one_parameter_and_none():
    p = parameters()[0]
    torch.testing.assert_close(tw.clip_grad_norm_(p, 1.0), torch.linalg.vector_norm(parameters()[0].grad))
    assert float(tw.clip_grad_norm_([], 1.0)) == 0.0
    assert float(tw.clip_grad_norm_([torch.nn.Parameter(torch.ones(2))], 1.0)) == 0.0
    assert float(tw.multi_tensor_norm([])) == 0.0
    assert int(tw.multi_tensor_count_zeros([])) == 0
    assert tw.multi_tensor_scale([], 2.0) == []


def test_wrong_arguments_are_named():
    for name, call in (
        ("max_norm", lambda: tw.clip_grad_norm_([], -1.0)),
        ("max_norm", lambda: tw.clip_grad_norm_([], math.nan)),
        ("max_norm", lambda: tw.clip_grad_norm_([], "1")),
        ("norm_type", lambda: tw.clip_grad_norm_([], 1.0, 3.0)),
        ("norm_type", lambda: tw.clip_grad_norm_([], 1.0, None)),
        (r"tensors\[1\]", lambda: tw.multi_tensor_norm([torch.ones(2), torch.ones(2, device="meta")])),
    ):
        with pytest.raises((TypeError, ValueError), match=name):
            call()


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite(value):
    ours, theirs = parameters(dtypes=MIXED[:1]), parameters(dtypes=MIXED[:1])
    for p in (ours[3], theirs[3]):
        p.grad[1, 2, 3] = value
    before = gradients(ours)
    with pytest.raises(RuntimeError, match="error_if_nonfinite"):
        tw.clip_grad_norm_(ours, 1.0, error_if_nonfinite=True)
    torch.testing.assert_close(gradients(ours), before, equal_nan=True, rtol=0, atol=0)
    found, expected = tw.clip_grad_norm_(ours, 1.0), torch.nn.utils.clip_grad_norm_(theirs, 1.0)
    torch.testing.assert_close(found, expected, equal_nan=True)
    torch.testing.assert_close(gradients(ours), gradients(theirs), equal_nan=True)


@pytest.mark.parametrize("value", [1e12, 1e25, 1e-30])
def test_a_norm_that_is_finite_does_not_overflow(value):
    many = [torch.full((17,), value) for _ in range(1024)]
    torch.testing.assert_close(float(tw.multi_tensor_norm(many)), value * math.sqrt(17 * 1024), rtol=1e-6, atol=0)


def test_scaling_over_a_tensor_shows_in_its_version():
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    loss = (y * y).sum()
    with torch.no_grad():
        tw.multi_tensor_scale([y], 0.5, out=[y])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_columns_of_one_matrix_are_scaled_apart():
    """Their spans meet, but they have no element in common."""
    whole = torch.arange(12.0).reshape(3, 4)
    parts = [whole[:, :1], whole[:, 1:]]
    tw.multi_tensor_scale(parts, 2.0, out=parts)
    torch.testing.assert_close(whole, 2 * torch.arange(12.0).reshape(3, 4))


def test_compiled_clipping():
    torch._dynamo.reset()

    def clip(gradients: list[Tensor]) -> Tensor:
        total = tw.multi_tensor_norm(gradients)
        tw.multi_tensor_scale(gradients, by=(1.0 / (total + 1e-6)).clamp(max=1.0), out=gradients)
        return total

    eager, compiled = gradients(parameters(scale=5.0)), gradients(parameters(scale=5.0))
    expected = clip(eager)
    found = torch.compile(clip, fullgraph=True, backend="aot_eager")(compiled)
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(compiled, eager, rtol=0, atol=0)


def test_compiled_clipping_of_parameters():
    torch._dynamo.reset()
    eager, compiled = parameters(scale=5.0), parameters(scale=5.0)
    expected = tw.clip_grad_norm_(eager, 1.0)
    found = torch.compile(lambda: tw.clip_grad_norm_(compiled, 1.0), fullgraph=True, backend="aot_eager")()
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    torch.testing.assert_close(gradients(compiled), gradients(eager), rtol=0, atol=0)


def test_tensors_are_seen_as_rows_by_columns():
    x = torch.zeros(4, 6, 8)
    assert folded(x, None) == [(192, 1, 1)]
    assert folded(x.permute(2, 0, 1), None) == [(192, 1, 1)]  # dense in memory, in any order
    assert folded(x[:, :, :5], None) == [(24, 8, 8), (5, 1, 1)]
    assert folded(x[:, ::2, :5], None) == [(12, 16, 16), (5, 1, 1)]
    assert folded(x[:, :3, :5], None) == [(4, 48, 48), (3, 8, 8), (5, 1, 1)]
    assert folded(x[0].t(), torch.zeros(8, 6)) == [(8, 1, 6), (6, 8, 1)]
    assert folded(x[:1, :1, :1], None) == [(1, 1, 1)]


# ---------------------------------------------------------------- two processes


def whole_gradients() -> list[Tensor]:
    source = torch.Generator().manual_seed(3)
    return [torch.randn(shape, generator=source) for shape in ((5, 4), (7,), (6, 2))]


def on_two_ranks(rank: int, file: str) -> None:
    """Each rank holds parts: the norm and the clipped gradients must be those of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    try:
        wholes = whole_gradients()
        flat = torch.cat([g.reshape(-1) for g in wholes])
        mesh = init_device_mesh("cpu", (2,))
        for ord in ORDS:
            exact = torch.linalg.vector_norm(flat.double(), ord).float()
            parts = [torch.nn.Parameter(torch.zeros_like(g.chunk(2)[rank])) for g in wholes]
            for p, g in zip(parts, wholes):
                p.grad = g.chunk(2)[rank].clone()
            total = tw.clip_grad_norm_(parts, 0.5, ord, group=dist.group.WORLD)
            torch.testing.assert_close(total, exact, rtol=2e-7, atol=0)
            for p, g in zip(parts, wholes):
                torch.testing.assert_close(p.grad, (g * (0.5 / (exact + 1e-6))).chunk(2)[rank], rtol=1e-6, atol=0)

            partial = DTensor.from_local(wholes[2] * (0.25 + 0.5 * rank), mesh, [Partial()])  # 1/4 and 3/4 of it
            spread = [distribute_tensor(wholes[0], mesh, [Shard(0)]), distribute_tensor(wholes[1], mesh, [Replicate()])]
            for given in ([*spread, partial], [*spread, wholes[2]]):
                torch.testing.assert_close(tw.multi_tensor_norm(given, ord), exact, rtol=3e-7, atol=0)
            held = [torch.nn.Parameter(g.clone()) for g in spread]
            for p, g in zip(held, spread):
                p.grad = g.clone()
            two = torch.linalg.vector_norm(flat[: 5 * 4 + 7].double(), ord).float()
            torch.testing.assert_close(tw.clip_grad_norm_(held, 0.5, ord), two, rtol=3e-7, atol=0)
            for p, g in zip(held, wholes):
                torch.testing.assert_close(p.grad.full_tensor(), g * (0.5 / (two + 1e-6)), rtol=1e-6, atol=0)
        zeros = tw.multi_tensor_count_zeros([distribute_tensor(wholes[0].relu(), mesh, [Shard(1)]), torch.zeros(3)])
        assert int(zeros) == int((wholes[0] <= 0).sum()) + 3
        spread = [distribute_tensor(wholes[0], mesh, [Shard(0)]), wholes[1].clone()]
        made = tw.multi_tensor_scale(spread, 3.0)
        assert made[0].placements == spread[0].placements
        torch.testing.assert_close([made[0].full_tensor(), made[1]], [3 * w for w in wholes[:2]], rtol=0, atol=0)
        tw.multi_tensor_scale(spread, 3.0, out=spread)
        torch.testing.assert_close([spread[0].full_tensor(), spread[1]], [3 * w for w in wholes[:2]], rtol=0, atol=0)
        nan = torch.tensor([1.0, math.nan if rank else 2.0])
        for ord in ORDS:
            assert math.isnan(tw.global_norm([nan], ord, group=dist.group.WORLD))
        idle = [torch.nn.Parameter(torch.ones(2))]
        if rank == 0:
            idle[0].grad = torch.tensor([3.0, 4.0])
        assert float(tw.clip_grad_norm_(idle, 100.0, group=dist.group.WORLD)) == 5.0
    finally:
        dist.destroy_process_group()


def test_two_ranks(tmp_path):
    # Both ranks from one process that has imported everything: importing takes longer than the test
    mp.get_context("forkserver").set_forkserver_preload(
        ["tilewright.ops.optimiser.clip_grad", "torch.distributed.tensor"]
    )
    mp.start_processes(on_two_ranks, (str(tmp_path / "meeting"),), nprocs=2, start_method="forkserver")
