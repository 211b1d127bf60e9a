"""torch's operators, replaced, on a GPU: the net of `tests/aten` with CUDA tensors, and what only a GPU has: captured graphs,
streams, waits for the device."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat
from tests.aten.test_beyond import (  # noqa: F401
    CALLS,
    taken,
    test_a_result_on_what_is_read_is_left_to_aten,
    test_a_result_that_is_given,
    test_awkward_operands,
    test_composites_reach_a_leaf_and_keep_their_gradient,
    test_gradients_are_right,
    test_int64_and_a_float,
    test_memory_that_is_read_and_written,
    test_numbers_promote_as_atens,
    test_offsets_past_32_bits,
    test_powers_are_as_exact_as_atens,
    test_powers_by_a_number,
    test_sums_with_products_are_rounded_as_atens_on_a_gpu,
    test_vmap_and_autocast_stand_above,
)
from tests.aten.test_opinfo import (  # noqa: F401
    quiet,
    test_every_overload_is_reached,
    test_gradients_are_autograds,
    test_in_place_the_tensor_is_the_result,
    test_results_are_atens,
    test_what_aten_refuses_is_refused_alike,
)
from tests.aten.test_reduction import (  # noqa: F401
    test_few_elements_of_several_loops,
    test_few_elements_that_make_one_result,
    test_the_first_of_equals_and_of_nans,
)
from tests.aten.test_router import (  # noqa: F401
    test_an_exception_in_a_backward_ends_all_blocks,
    test_blocks_nest_and_one_may_be_entered_again,
    test_disable_leaves_blocks_alone,
    test_enable_and_disable,
    test_explain_makes_the_call_once,
    test_host_code_and_the_interpreter_use_torch_as_it_is,
    test_many_threads_enter_and_leave,
    test_other_threads_see_it_and_autograds_do,
    test_what_is_declined_is_atens_and_counted,
)
from tilewright.aten import (
    index_map,
    norm,
    norm_cells,
    norm_rows,
    plans,
    pointwise,
    product,
    reduction,
    scan,
    softmax,
    softmax_columns,
    softmax_long,
    window,
)
from tilewright.runtime.kernel import Kernel

pytestmark = pytest.mark.gpu
ENGINES = (
    pointwise, reduction, scan, index_map, softmax, softmax_columns, softmax_long, norm, norm_rows, norm_cells, product, window,
)  # fmt: skip
KERNELS = [v for m in ENGINES for v in vars(m).values() if isinstance(v, Kernel)]
SHAPE = (65, 130)


@pytest.fixture(autouse=True)
def on_the_gpu() -> Iterator[None]:
    """Tensors that a test makes without naming a device are CUDA's."""
    with torch.device("cuda"):
        yield


def declined() -> dict[str, dict[str, int]]:
    return {name: one["declined"] for name, one in tw.aten.report().items() if one["declined"]}


def check(name: str, ours: Tensor | tuple[Tensor, ...], x: Tensor) -> None:
    """Results of a call of x are aten's."""
    call = CALLS[name]
    terms = float(x.double().abs().sum()) if name == "cumsum" else 0.0
    assert not differences(ours, call(x), call(as_double(x)), terms)


@pytest.mark.parametrize("name", CALLS)
def test_captured_and_replayed_with_other_numbers(name):
    torch.manual_seed(0)
    x, graph = torch.randn(SHAPE), torch.cuda.CUDAGraph()
    with tw.aten.use("all"):
        CALLS[name](x)
        torch.cuda.synchronize()
        warm = taken()
        with torch.cuda.graph(graph):
            before = (
                taken()
            )  # beginning a capture fills two numbers of torch's random generator, which are calls of ours too
            made = CALLS[name](x)
            captured = taken() - before
        assert captured == warm > 0 and not declined()
    for _ in range(3):
        x.copy_(torch.randn(SHAPE))
        graph.replay()
        torch.cuda.synchronize()
        check(name, made, x)
    with tw.aten.use("all"):
        assert all(map(torch.equal, flat(made), flat(CALLS[name](x))))  # bit for bit what a call without a graph gives


@pytest.mark.parametrize("name", CALLS)
def test_a_capture_of_what_is_not_compiled_takes_atens_kernel(name, monkeypatch):
    """No exception, and a graph that works: aten's own."""
    torch.manual_seed(0)
    x, graph = torch.randn(SHAPE), torch.cuda.CUDAGraph()
    CALLS[name](x)  # aten loads its own kernels when they are first called
    torch.cuda.synchronize()
    for kernel in KERNELS:  # whatever was called before has compiled
        monkeypatch.setattr(kernel, "variants", {})
    monkeypatch.setattr(plans, "_variants", {})
    with tw.aten.use("all"):
        with torch.cuda.graph(graph):
            made = CALLS[name](x)
        reasons = {reason for own in declined().values() for reason in own}
        assert reasons == {"a kernel that is not compiled, during graph capture"}
    x.copy_(torch.randn(SHAPE))
    graph.replay()
    torch.cuda.synchronize()
    check(name, made, x)


@pytest.mark.parametrize("name", CALLS)
def test_kernels_run_on_the_current_stream(name):
    """On a stream that is late with the operand: a launch on any other would read what was there before."""
    torch.manual_seed(0)
    x, fresh = torch.zeros(SHAPE), torch.randn(SHAPE)
    side = torch.cuda.Stream()
    with tw.aten.use("all"):
        CALLS[name](x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.copy_(fresh)
            made = CALLS[name](x)
        assert taken()
    side.synchronize()
    check(name, made, fresh)


def test_tensors_of_a_processor_are_torchs():
    x = torch.ones(3, device="cpu")
    with tw.aten.use("all"):
        assert torch.equal(-x + x, torch.zeros(3, device="cpu")) and not taken()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize("name", CALLS)
def test_kernels_run_on_the_device_of_their_tensors(name):
    """Which is not the current one; and what is on both is refused as without us."""
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    other = x.to("cuda:1")
    with tw.aten.use("all"):
        made = [(CALLS[name](t), t) for t in (x, other, x, other)]
        assert taken() >= 4 and torch.cuda.current_device() == 0
        with pytest.raises(RuntimeError, match="same device"):
            x + other
    for found, t in made:
        assert {one.device for one in flat(found)} == {t.device}
        check(name, found, t)


@pytest.mark.parametrize("name", CALLS)
def test_no_call_waits_for_the_device(name):
    x = torch.randn(SHAPE)
    with tw.aten.use("all"):
        CALLS[name](x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            CALLS[name](x)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert taken()


def test_replacements_give_the_same_bits_every_time():
    """Sums that are split among programs are put together in a fixed order."""
    x = torch.randn(1 << 22)
    with tw.aten.use("all"):
        for call in (lambda: x.sum(), lambda: x.view(2, -1).sum(1), lambda: x.cumsum(0), lambda: torch.var_mean(x)):
            first = call()
            for _ in range(20):
                assert not differences(call(), first)
        assert taken() and not declined()
