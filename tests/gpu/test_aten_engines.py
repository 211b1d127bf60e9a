"""The engines of torch's operators by index, sort and random on a GPU: their tests on a CPU with CUDA tensors, and what only a GPU
has: torch's own random bits, its generator, captured graphs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import flat
from tests.aten.test_index import (  # noqa: F401
    test_a_label_outside_poisons_its_own_loss,
    test_an_index_outside_poisons_its_own_element,
    test_an_index_outside_writes_nothing,
    test_buckets_of_others,
    test_float64_gradients_by_differences,
    test_gradients_by_index,
    test_indices_of_every_kind,
    test_losses_of_one_program_and_of_several,
    test_masks_that_broadcast,
    test_memory_that_is_read_and_written_is_atens,
    test_repeats,
    test_rows_of_every_length,
    test_runs_that_slices_cut,
    test_scatters_that_reduce,
    test_sums_are_rounded_once,
    test_sums_are_the_same_bits_every_time,
    test_what_is_among_others,
    test_what_is_selected,
    test_with_debugging_an_index_outside_raises,
    test_writes_that_are_to_have_an_order_are_atens,
)
from tests.aten.test_random import (  # noqa: F401
    test_checkpointed_dropout_reproduces_its_mask,
    test_distributions,
    test_draws_without_replacement,
    test_dropout_of_none_of_all_and_of_nothing,
    test_permutations,
    test_permutations_in_narrow_dtypes,
    test_what_is_refused_is_refused_alike,
)
from tests.aten.test_sort import (  # noqa: F401
    test_all_equal_and_all_different,
    test_every_dimension_and_layout,
    test_long_lines_are_sorted_by_digits,
    test_sorts_are_stable_and_nans_last,
    test_the_first_of_parts,
    test_what_is_left_of_equals,
)

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]


# ---- torch's own draws -----------------------------------------------------------------------------------------------

SIZES = (1, 3, 255, 256, 1000, 4096, 65_537, 300_000, 1_200_000, 5_000_000)  # up to several turns of every thread
EXACT: dict[str, Callable[[int], Any]] = {
    "rand": torch.rand,
    "uniform_": lambda n: torch.empty(n).uniform_(-2.0, 6.0),
    "rand_like, bf16": lambda n: torch.rand_like(torch.empty(n, dtype=torch.bfloat16)),
    "rand_like, fp16": lambda n: torch.rand_like(torch.empty(n, dtype=torch.float16)),
    "rand, float64": lambda n: torch.rand(n, dtype=torch.float64),
    "rand, turned": lambda n: torch.empty(n, 3).t().uniform_(),
    "rand, with gaps": lambda n: torch.zeros(n, 6)[:, ::2].uniform_(),
    "dropout": lambda n: torch.native_dropout(torch.ones(n), 0.3, True),
    "dropout, bf16": lambda n: torch.native_dropout(torch.ones(n, dtype=torch.bfloat16), 0.3, True),
    "dropout, float64": lambda n: torch.native_dropout(torch.ones(n, dtype=torch.float64), 0.3, True),
    "dropout, misaligned": lambda n: torch.native_dropout(torch.ones(n + 1)[1:], 0.3, True),
}
NEAR: dict[str, Callable[[int], Tensor]] = {
    "randn": torch.randn,
    "normal_": lambda n: torch.empty(n).normal_(2.0, 3.0),
    "randn_like, bf16": lambda n: torch.randn_like(torch.empty(n, dtype=torch.bfloat16)),
    "randn, float64": lambda n: torch.randn(n, dtype=torch.float64),
    "exponential_": lambda n: torch.empty(n).exponential_(1.5),
    "normal, tensors": lambda n: torch.normal(torch.ones(n), torch.full((n,), 2.0)),
}


def both(call: Callable[[int], Any], n: int, seed: int, offset: int) -> list[Any]:
    """[aten's, ours] of one seed and offset, with the offset that each leaves."""
    found = []
    for inside in (False, True):
        generator = torch.cuda.default_generators[torch.cuda.current_device()]
        generator.manual_seed(seed)
        generator.set_offset(offset)
        if inside:
            with tw.aten.use("all", include=["random"]):
                made = call(n)
                said = tw.aten.report()
            assert any(one["taken"] for one in said.values()) and not any(one["declined"] for one in said.values()), (
                said
            )
        else:
            made = call(n)
        found.append((made if isinstance(made, tuple) else (made,), generator.get_offset()))
    return found


@pytest.mark.parametrize(("seed", "offset"), [(0, 0), (12345, 8), (2**40 + 1, 2**34)])
@pytest.mark.parametrize("name", EXACT)
def test_the_bits_are_torchs(name, seed, offset):
    for n in SIZES if not seed else SIZES[3::3]:
        (aten, after), (made, own) = both(EXACT[name], n, seed, offset)
        assert own == after, n
        for a, b in zip(made, aten):
            assert torch.equal(a, b) and a.stride() == b.stride(), n


@pytest.mark.parametrize("name", NEAR)
def test_normal_and_exponential_numbers_are_within_two_steps(name):
    for n in SIZES:
        ((aten,), after), ((made,), own) = both(NEAR[name], n, 7, 4)
        assert own == after, n
        eps = torch.finfo(aten.dtype).eps
        # A sum with the mean rounds once more where the two cancel
        near = (made.double() - aten.double()).abs() <= 2 * eps * aten.double().abs().clamp(min=2.0**-3)
        assert bool(near.all()), (n, int((~near).sum()))


def test_a_given_generator_is_asked_and_left_as_torch_leaves_it():
    made = []
    for inside in (False, True):
        generator = torch.Generator("cuda").manual_seed(99)
        for _ in range(3):
            if inside:
                with tw.aten.use("all", include=["random"]):
                    x = torch.rand(3000, generator=generator)
            else:
                x = torch.rand(3000, generator=generator)
        made.append((x, generator.get_offset()))
    assert torch.equal(made[0][0], made[1][0]) and made[0][1] == made[1][1]


def test_during_capture_draws_are_atens():
    graph, x = torch.cuda.CUDAGraph(), torch.ones(4096)
    with tw.aten.use("all", include=["random"]):
        torch.rand_like(x)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = torch.rand_like(x)
        said = tw.aten.report()["uniform_"]["declined"]
    assert said.get("random numbers during graph capture") == 1
    graph.replay()
    first = made.clone()
    graph.replay()
    assert not torch.equal(first, made)


CAPTURED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "index_add": lambda x, i: x.index_add(0, i, x[:64] if x.shape[0] > 64 else x),
    "gather": lambda x, i: x.gather(0, i[:, None].expand(-1, x.shape[1])),
    "sort": lambda x, i: x.sort(1),
    "topk": lambda x, i: x.topk(5, 1),
    "isin": lambda x, i: torch.isin(i, i[:7]),
}


@pytest.mark.parametrize("name", CAPTURED)
def test_captured_and_replayed_with_other_numbers(name):
    call, graph = CAPTURED[name], torch.cuda.CUDAGraph()
    x, i = torch.randn(64, 600), torch.randint(0, 64, (64,))
    with tw.aten.use("all", include=["index", "sort"]):
        call(x, i)
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            made = call(x, i)
        assert not any(one["declined"] for one in tw.aten.report().values())
    for _ in range(2):
        x.copy_(torch.randn(64, 600))
        i.copy_(torch.randint(0, 64, (64,)))
        graph.replay()
        torch.cuda.synchronize()
        with tw.aten.use("all", include=["index", "sort"]):
            assert all(map(torch.equal, flat(made), flat(call(x, i))))  # bit for bit what a call without a graph gives
