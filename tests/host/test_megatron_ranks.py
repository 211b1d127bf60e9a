"""Models of Megatron-Core on two or three processes, that share tensors, experts or sequences: the same with our ops as by its own
code."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from tests import megatron_models as models
from tests.megatron_models import ROUTER, attend, attending, build, close, masks, module, randn, step
from tilewright.integrations import megatron

USUAL = {"rope_one", "glu", "cross_entropy"}
RANKS = 3  # that share sequences: of two, the one before is the one after


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


class Shared(NamedTuple):
    """A call, and which rows of the first dimension a rank has."""

    shapes: tuple[tuple[int, ...], ...]
    kind: str = "causal"
    marks: tuple[int, ...] = ()  # of packed sequences
    window: tuple[int, int] | None = None

    def part(self, t: Tensor, rank: int) -> Tensor:
        begins = self.marks or (0, t.shape[0])
        made = []
        for begin, end in zip(begins, begins[1:]):
            chunks = t[begin:end].chunk(2 * RANKS)
            made += [chunks[rank], chunks[-1 - rank]]
        return torch.cat(made)


def shapes(*leading: int, value: int = 8) -> tuple[tuple[int, ...], ...]:
    return (*leading, 4, 8), (*leading, 2, 8), (*leading, 2, value)


SHARED = {
    "causal": Shared(shapes(24, 2)), "narrow values": Shared(shapes(12, 1, value=4)),
    "window": Shared(shapes(24, 2), window=(5, 0)),
    "no mask": Shared(shapes(24, 2), "no_mask"), "packed": Shared(shapes(36), "padding_causal", (0, 6, 24, 36)),
    "packed window": Shared(shapes(36), "padding_causal", (0, 6, 24, 36), (3, 0)),
}  # fmt: skip


def weights_of(given: list[Tensor]) -> Tensor:
    return randn(*given[0].shape[:-2], 4 * given[2].shape[-1], seed=9)


def attend_case(core: Any, given: list[Tensor], case: Shared, weights: Tensor | None = None) -> list[Tensor]:
    core.window = (None, None) if case.window is None else case.window
    named: dict[str, Any] = {"attn_mask_type": getattr(masks(), case.kind)}
    if case.marks:
        marks = torch.tensor(case.marks, dtype=torch.int32)
        named["packed_seq_params"] = module("packed_seq_params").PackedSeqParams(
            qkv_format="thd", cu_seqlens_q=marks, cu_seqlens_kv=marks
        )
    return attend(core, given, None, weights=weights_of(given) if weights is None else weights, **named)


def shared_sequences(rank: int) -> None:
    """Each rank has a chunk of the first half of each sequence and one of the second: as if one rank had all of them."""
    whole = attending(softmax_type="learnable")
    for way in (None, "all_gather"):
        own = attending(softmax_type="learnable", context_parallel_size=RANKS, way=way)
        for name, case in SHARED.items():
            heads = [randn(*shape, seed=i) for i, shape in enumerate(case.shapes)]
            *truth, d_sink = attend_case(whole, heads, case)
            mine = [case.part(t, rank) for t in heads]
            *found, d_part = attend_case(own, mine, case, case.part(weights_of(heads), rank))
            dist.all_reduce(d_part)  # as Megatron does with gradients of what ranks have alike
            try:
                close([*found, d_part], [*(case.part(t, rank) for t in truth), d_sink])
            except AssertionError as error:
                raise AssertionError(f"{name}, {way}") from error
    with pytest.raises(ValueError, match="cp_comm_type must be p2p or all_gather, is a2a"):
        attending(context_parallel_size=RANKS, way="a2a")


def on_two_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    with models.ranks("cpu", dist.FileStore(f"{folder}/tensors", 2), rank, 2, tensor_model_parallel_size=2):
        shared_tensors()
    with models.ranks("cpu", dist.FileStore(f"{folder}/experts", 2), rank, 2, expert_model_parallel_size=2):
        shared_experts(rank)


def on_three_ranks(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/sequences", RANKS)
    with models.ranks("cpu", store, rank, RANKS, context_parallel_size=RANKS):
        shared_sequences(rank)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("share", "ranks"), [(on_two_ranks, 2), (on_three_ranks, RANKS)])
def test_ranks(share, ranks, tmp_path):
    # All ranks from one process that has imported everything: importing takes longer than the test
    mp.get_context("forkserver").set_forkserver_preload([models.__name__, megatron.__name__, "torch._dynamo"])
    mp.start_processes(share, (str(tmp_path),), nprocs=ranks, start_method="forkserver")
