"""torch's operators, replaced, on a GPU: the net of `tests/aten` with CUDA tensors, and what only a GPU has: captured graphs,
streams, waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat
from tests.aten.test_beyond import (  # noqa: F401
    CALLS,
    taken,
    test_a_result_on_what_is_read_is_left_to_aten,
    test_a_result_that_is_given,
    test_awkward_operands,
    test_bytes_are_turned,
    test_composites_reach_a_leaf_and_keep_their_gradient,
    test_every_leaf_is_reached_with_a_gradient,
    test_gelu_of_every_16_bit_number,
    test_gradients_are_right,
    test_int64_and_a_float,
    test_memory_that_is_read_and_written,
    test_numbers_promote_as_atens,
    test_offsets_past_32_bits,
    test_operands_that_are_turned,
    test_powers_are_as_exact_as_atens,
    test_powers_by_a_number,
    test_steps_that_end_at_0,
    test_sums_with_products_are_rounded_as_atens_on_a_gpu,
    test_the_same_bits_while_deterministic_algorithms_are_asked_for,
    test_vmap_and_autocast_stand_above,
)
from tests.aten.test_opinfo import (  # noqa: F401
    quiet,
    test_every_overload_is_reached,
    test_gradients_are_autograds,
    test_in_place_the_tensor_is_the_result,
    test_results_are_atens,
    test_results_that_are_given_are_atens,
    test_what_aten_refuses_is_refused_alike,
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
    copies,
    index_add,
    index_map,
    index_move,
    nll,
    norm,
    norm_cells,
    norm_rows,
    order,
    plans,
    pointwise,
    product,
    reduction,
    scan,
    select,
    softmax,
    softmax_columns,
    softmax_long,
    sort,
    window,
)
from tilewright.runtime.kernel import Kernel

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("on_the_gpu")]
ENGINES = (
    pointwise, reduction, scan, index_map, copies, softmax, softmax_columns, softmax_long, norm, norm_rows, norm_cells, product,
    window, index_move, index_add, nll, order, select, sort,
)  # fmt: skip
KERNELS = [v for m in ENGINES for v in vars(m).values() if isinstance(v, Kernel)]
SHAPE = (65, 130)


def places(x: Tensor) -> Tensor:
    """An index for each row, which follows from its numbers; some are equal."""
    return x.argmax(1).remainder(SHAPE[0])


def norm_back(x: Tensor) -> Any:
    _, mean, rstd = torch.ops.aten.native_layer_norm(x, SHAPE[1:], x[0], x[1], 1e-5)
    return torch.ops.aten.native_layer_norm_backward(x, x, SHAPE[1:], mean, rstd, x[0], x[1], [True, True, True])


# One call and more of every engine that may be captured
EVERY: dict[str, Callable[[Tensor], Any]] = {
    **CALLS,
    "softmax": lambda x: x.softmax(1),
    "softmax of columns": lambda x: x.log_softmax(0),
    "norm": lambda x: F.layer_norm(x, SHAPE[1:], x[0], x[1]),
    "norm of groups": lambda x: F.group_norm(x.view(1, 65, 130), 5),
    "gradients of a norm": norm_back,
    "product": lambda x: x @ x.t(),
    "product with a sum": lambda x: torch.addmm(x[:, 0], x, x.t(), beta=0.5),
    "product with a vector": lambda x: x @ x[0],
    "largest of windows": lambda x: F.max_pool2d(x[None, None], 3, 2, 1),
    "means of windows": lambda x: F.avg_pool2d(x[None, None], 2),
    "rows by index": lambda x: x[places(x)],
    "rows put by index": lambda x: x.index_put((places(x),), x, accumulate=True),
    "rows added by index": lambda x: x.index_add(0, places(x), x),
    "gather": lambda x: x.gather(0, places(x)[:, None].expand(SHAPE)),
    "loss": lambda x: F.cross_entropy(x, places(x)),
    "sort": lambda x: x.sort(1),
    "topk": lambda x: x.topk(5, 1),
}  # fmt: skip
SUMS = {"cumsum", "product", "product with a sum", "product with a vector", "rows put by index", "rows added by index"}
SUMS |= {"norm", "norm of groups", "gradients of a norm"}


def declined() -> dict[str, dict[str, int]]:
    return {name: one["declined"] for name, one in tw.aten.report().items() if one["declined"]}


def check(name: str, ours: Tensor | tuple[Tensor, ...], x: Tensor) -> None:
    """Results of a call of x are aten's, those of sums within steps of what is added up."""
    call = EVERY[name]
    terms = float(x.double().abs().sum()) if name == "cumsum" else float(x.double().norm()) if name in SUMS else 0.0
    assert not differences(ours, call(x), call(as_double(x)), terms)


@pytest.mark.parametrize("name", EVERY)
def test_captured_and_replayed_with_other_numbers(name):
    torch.manual_seed(0)
    x, graph = torch.randn(SHAPE), torch.cuda.CUDAGraph()
    with tw.aten.use("all"):
        EVERY[name](x)
        torch.cuda.synchronize()
        warm = taken()
        with torch.cuda.graph(graph):
            before = taken()  # beginning a capture fills two numbers of torch's random generator, by calls of ours too
            made = EVERY[name](x)
            captured = taken() - before
        assert captured == warm > 0 and not declined()
    for _ in range(3):
        x.copy_(torch.randn(SHAPE))
        graph.replay()
        torch.cuda.synchronize()
        check(name, made, x)
    with tw.aten.use("all"):
        assert all(map(torch.equal, flat(made), flat(EVERY[name](x))))  # bit for bit what a call without a graph gives


@pytest.mark.parametrize("name", EVERY)
def test_a_capture_of_what_is_not_compiled_takes_atens_kernel(name, monkeypatch):
    """No exception, and a graph that works: aten's own."""
    torch.manual_seed(0)
    x, graph = torch.randn(SHAPE), torch.cuda.CUDAGraph()
    EVERY[name](x)  # aten loads its own kernels when they are first called
    torch.cuda.synchronize()
    for kernel in KERNELS:  # whatever was called before has compiled
        monkeypatch.setattr(kernel, "variants", {})
    monkeypatch.setattr(plans, "_variants", {})
    with tw.aten.use("all"):
        with torch.cuda.graph(graph):
            made = EVERY[name](x)
        reasons = {reason for own in declined().values() for reason in own}
        assert reasons == {"a kernel that is not compiled, during graph capture"}
    x.copy_(torch.randn(SHAPE))
    graph.replay()
    torch.cuda.synchronize()
    check(name, made, x)


@pytest.mark.parametrize("name", EVERY)
def test_kernels_run_on_the_current_stream(name):
    """On a stream that is late with the operand: a launch on any other would read what was there before."""
    torch.manual_seed(0)
    x, fresh = torch.zeros(SHAPE), torch.randn(SHAPE)
    side = torch.cuda.Stream()
    with tw.aten.use("all"):
        EVERY[name](x)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            x.copy_(fresh)
            made = EVERY[name](x)
        assert taken()
    side.synchronize()
    check(name, made, fresh)


def test_tensors_of_a_processor_are_torchs():
    x = torch.ones(3, device="cpu")
    with tw.aten.use("all"):
        assert torch.equal(-x + x, torch.zeros(3, device="cpu")) and not taken()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="takes two GPUs")
@pytest.mark.parametrize("name", EVERY)
def test_kernels_run_on_the_device_of_their_tensors(name):
    """Which is not the current one; and what is on both is refused as without us."""
    torch.manual_seed(0)
    x = torch.randn(SHAPE)
    other = x.to("cuda:1")
    with tw.aten.use("all"):
        made = [(EVERY[name](t), t) for t in (x, other, x, other)]
        assert taken() >= 4 and torch.cuda.current_device() == 0
        with pytest.raises(RuntimeError, match="same device"):
            x + other
    for found, t in made:
        assert {one.device for one in flat(found)} == {t.device}
        check(name, found, t)


@pytest.mark.parametrize("name", EVERY)
def test_no_call_waits_for_the_device(name):
    x = torch.randn(SHAPE)
    with tw.aten.use("all"):
        EVERY[name](x)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            EVERY[name](x)
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
