"""Models of Megatron-Core on two processes, that share tensors or experts: the same with our ops as by its own code."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests import megatron_models as models
from tests.megatron_models import ROUTER, build, close, module, step
from tilewright.integrations import megatron

USUAL = {"rope_one", "glu", "cross_entropy"}


def norm_of(grads: list[Tensor]) -> Tensor:
    """Over all ranks, whatever they share."""
    total = sum(g.double().square().sum() for g in grads)
    dist.all_reduce(total)
    return total.sqrt()


def shared_tensors() -> None:
    """Columns and rows of weights, and the vocabulary."""
    model = build(False, tensor_model_parallel_size=2)
    truth = step(model)
    with megatron.apply() as report:
        found = step(model)
        assert {*report.calls()} == USUAL and not report.fallbacks()
        grads = [p.grad for p in model.parameters()]
        assert module("clip").get_grad_norm_fp32(grads) == pytest.approx(norm_of(grads).item(), rel=1e-6)
    close([*found.values()], [*truth.values()])


def shared_experts(rank: int) -> None:
    """Each rank has two of four experts, and tokens of its own."""
    plain = build(True, expert_model_parallel_size=2)
    truth = step(plain, seed=rank)
    with megatron.apply(modules=True) as report:
        found = step(plain, seed=rank)
        assert {*report.calls()} == {*USUAL, *ROUTER} and not report.fallbacks()
        close([*found.values()], [*truth.values()])
        model = build(True, grouped=True, expert_model_parallel_size=2)
        model.load_state_dict(models.state_of_groups(plain.state_dict(), [*model.state_dict()]), strict=False)
        found = step(model, seed=rank)
    assert report.calls()["grouped_mm"] == 2 and report.calls()["rms_norm"] == 5
    truth = models.state_of_groups(truth, [*found])
    assert truth["decoder.layers.1.mlp.experts.weight1"].shape == (2, 48, 32)
    close([found[name] for name in truth], [*truth.values()])


def on_two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with models.ranks("cpu", dist.FileStore(f"{folder}/tensors", 2), rank, 2, tensor_model_parallel_size=2):
        shared_tensors()
    with models.ranks("cpu", dist.FileStore(f"{folder}/experts", 2), rank, 2, expert_model_parallel_size=2):
        shared_experts(rank)


@pytest.mark.filterwarnings("ignore")
def test_two_ranks(tmp_path):
    # Both ranks from one process that has imported everything: importing takes longer than the test
    mp.get_context("forkserver").set_forkserver_preload([models.__name__, megatron.__name__, "torch._dynamo"])
    mp.start_processes(on_two_ranks, (str(tmp_path),), nprocs=2, start_method="forkserver")
