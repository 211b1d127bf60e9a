"""Replaced operators beside the rest of torch: what stands above the backend key works as before, and what is changed beside ours
is defined."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import tilewright as tw
from tests.aten.samples import DEVICE
from tests.aten.test_router import nothing_is_left  # noqa: F401
from tilewright.aten.router import OVER_ANOTHER

KEY = "CUDA" if DEVICE.startswith("cuda") else "CPU"


@pytest.fixture(scope="module", autouse=True)
def decompositions() -> None:
    """Which torch registers at the first call of vmap: the dispatcher is then no longer what it was."""
    torch.func.vmap(torch.neg)(torch.ones(2, 2))


class Layer(nn.Module):
    """A norm, two products, a gate and a softmax."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.softmax(x + self.down(F.silu(self.up(self.norm(x)))), -1)


def layer() -> tuple[Layer, Tensor]:
    torch.manual_seed(0)
    return Layer().to(DEVICE), torch.randn(4, 8, device=DEVICE)


def gradients(model: Callable[..., Tensor], x: Tensor) -> list[Tensor]:
    """Of a call: its result, and the gradients of its operand and its weights."""
    x = x.detach().clone().requires_grad_()
    made = model(x)
    weights = list(model.parameters()) if isinstance(model, nn.Module) else []
    return [made.detach(), *torch.autograd.grad((made * made).sum(), [x, *weights])]


def taken(*names: str) -> list[int]:
    return [tw.aten.report()[name]["taken"] for name in names]


def near(made: Any, wanted: Any) -> None:
    torch.testing.assert_close(made, wanted, rtol=1e-5, atol=1e-6)


# ---- autograd --------------------------------------------------------------------------------------------------------


def test_gradients_of_gradients():
    """By differences, in float64."""

    def f(x: Tensor, w: Tensor) -> Tensor:
        return torch.softmax(torch.tanh(x) @ w, 0) * F.layer_norm(x, (3,)) + torch.sigmoid(x).prod()

    torch.manual_seed(0)
    x, w = (
        torch.randn(2, 3, dtype=torch.float64, device=DEVICE),
        torch.randn(3, 3, dtype=torch.float64, device=DEVICE),
    )
    with tw.aten.use("all"):
        assert torch.autograd.gradgradcheck(f, (x.requires_grad_(), w.requires_grad_()), fast_mode=True)
        assert min(taken("tanh_backward", "_softmax_backward_data", "native_layer_norm_backward"))


def test_enabled_between_forward_and_backward():
    """The backward is then ours, of what aten saved; and the reverse."""
    model, x = layer()
    wanted = gradients(model, x)
    for ours_first in (False, True):
        x.requires_grad_()
        if ours_first:
            with tw.aten.use("all"):
                made = model(x)
            found = torch.autograd.grad((made * made).sum(), [x, *model.parameters()])
        else:
            made = model(x)
            with tw.aten.use("all"):
                found = torch.autograd.grad((made * made).sum(), [x, *model.parameters()])
                assert min(taken("native_layer_norm_backward", "_softmax_backward_data", "silu_backward"))
        near([made.detach(), *found], wanted)


def test_enabled_in_the_middle_of_training():
    """Steps with, without and with replacements again give the weights that steps without them do."""

    def trained(*blocks: bool) -> list[Tensor]:
        model, x = layer()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        for replaced in blocks:
            if replaced:
                tw.aten.enable("all")
            optimiser.zero_grad()
            model(x).square().sum().backward()
            optimiser.step()
            tw.aten.disable()
        return [p.detach() for p in model.parameters()]

    near(trained(False, True, True, False, True), trained(*[False] * 5))


# ---- above the backend key -------------------------------------------------------------------------------------------


def test_autocast_chooses_the_dtypes():
    """A product in bf16 of fp32 operands, a softmax in fp32; gradients in fp32."""
    model, x = layer()

    def run() -> list[Tensor]:
        with torch.autocast(KEY.lower(), torch.bfloat16):
            hidden = model.up(x)
            assert hidden.dtype == torch.bfloat16
        return [hidden, *torch.autograd.grad(hidden.float().square().sum(), model.up.weight)]

    wanted = run()
    with tw.aten.use("all"):
        made = run()
        assert sum(taken("mm", "addmm")) and min(taken("_to_copy"))
    assert [t.dtype for t in made] == [t.dtype for t in wanted]
    torch.testing.assert_close(made, wanted, rtol=2e-2, atol=2e-2)


def test_inference_mode():
    model, x = layer()
    with torch.inference_mode():
        wanted = model(x)
        with tw.aten.use("all"):
            made = model(x)
            assert made.is_inference() and not made.requires_grad
            made.mul_(2.0)  # which only tensors of this mode may be, here
            assert min(taken("mul_.Tensor", "native_layer_norm", "_softmax"))
    near(made.clone() / 2, wanted.clone())


def test_functions_of_functions():
    """torch.func: a batch of gradients."""
    model, x = layer()
    weights = dict(model.named_parameters())

    def loss(weights: dict[str, Tensor], row: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (row,)).square().sum()

    def run() -> list[Tensor]:
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x)
        return [each[name] for name in weights]

    wanted = run()
    with tw.aten.use("all"):
        made = run()
        assert min(taken("_softmax", "_softmax_backward_data", "sigmoid", "mul.Tensor"))
    near(made, wanted)


def test_derivatives_forward_and_of_second_order():
    """torch.func: a product with the Jacobian, and a Hessian, which is one derivative in the other."""
    x, v = torch.randn(2, 5, generator=torch.Generator().manual_seed(0)).to(DEVICE)

    def f(t: Tensor) -> Tensor:
        return (torch.softmax(t, 0) * torch.tanh(t)).sum()

    def run() -> list[Tensor]:
        return [*torch.func.jvp(f, (x,), (v,)), torch.func.hessian(f)(x)]

    wanted = run()
    with tw.aten.use("all"):
        made = run()
        assert min(taken("_softmax", "tanh", "mul.Tensor"))
    near(made, wanted)


def test_export_sees_what_it_saw_before():
    """The graph has torch's own operators, and gives with replacements what it gives without."""
    model, x = layer()
    wanted = torch.export.export(model, (x,))
    with tw.aten.use("all"):
        made = torch.export.export(model, (x,))
        ours = made.module()(x)
        assert min(taken("_softmax"))
    assert [str(n.target) for n in made.graph.nodes] == [str(n.target) for n in wanted.graph.nodes]
    near(ours, wanted.module()(x))


def test_fake_tensors_do_not_reach_ours():
    """Nor do those that a graph is traced by."""
    model, x = layer()

    def call(t: Tensor) -> Tensor:
        return model(t) + t.cumsum(0) + t.sort(1)[0] + t[:, t.argmax(1)].sum()

    with tw.aten.use("all"):
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            made = call(mode.from_tensor(x))
        assert isinstance(made, FakeTensor) and made.shape == x.shape
        make_fx(call, tracing_mode="fake", _allow_non_fake_inputs=True)(x)
        said = {name: one for name, one in tw.aten.report().items() if one["taken"] or one["declined"]}
    assert not said


def test_compiled_functions_call_ours_where_they_call_aten():
    """A graph of aten's calls, which Inductor's is where it has no kernel of its own."""
    model, x = layer()
    wanted = gradients(model, x)
    with tw.aten.use("all"):
        compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
        near([compiled(x).detach()], wanted[:1])
        near(gradients(compiled, x)[:2], wanted[:2])
        assert min(taken("native_layer_norm", "native_layer_norm_backward", "_softmax_backward_data"))
    near([compiled(x).detach()], wanted[:1])  # the graph outlives the block
    torch._dynamo.reset()


# ---- another library -------------------------------------------------------------------------------------------------


@contextmanager
def another(answer: Callable[[Tensor], Tensor]) -> Iterator[torch.library.Library]:
    """A library that overrides `neg` at the same key."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("neg", answer, KEY, **OVER_ANOTHER)
    try:
        yield library
    finally:
        library._destroy()


def dump() -> str:
    return torch._C._dispatch_dump("aten::neg")


def test_a_library_before_ours_is_what_we_fall_back_to():
    """And what is left when we have gone."""
    x, minus = torch.ones(2, device=DEVICE), torch.full((2,), -1.0, device=DEVICE)
    lazy = x.to(torch.complex64)  # which ours declines
    with another(lambda t: t + 5):
        before = dump()
        with tw.aten.use("all", include="neg"):
            assert torch.equal(torch.neg(x), minus) and torch.equal(torch.neg(lazy), lazy + 5)
            assert taken("neg") == [1]
        assert dump() == before and torch.equal(torch.neg(x), x + 5)


@pytest.mark.parametrize("ours_ends_first", [True, False])
def test_a_library_after_ours_has_the_calls(ours_ends_first):
    """Whoever registers last is asked; taking ours away leaves it alone, and when it goes ours is asked again."""
    x, minus = torch.ones(2, device=DEVICE), torch.full((2,), -1.0, device=DEVICE)
    before = dump()
    block = tw.aten.use("all", include="neg")
    block.__enter__()
    with another(lambda t: t + 5) as library:
        assert torch.equal(torch.neg(x), x + 5) and taken("neg") == [0]
        if ours_ends_first:
            block.__exit__()
            assert torch.equal(torch.neg(x), x + 5)
        else:
            library._destroy()
            assert torch.equal(torch.neg(x), minus) and taken("neg") == [1]
            block.__exit__()
    assert dump() == before and torch.equal(torch.neg(x), minus)


def test_an_operator_of_another_library_that_calls_ours():
    """A custom operator is torch's own business; what it calls is replaced."""
    with torch.library._scoped_library("tilewright_tests", "FRAGMENT") as library:
        library.define("twice(Tensor x) -> Tensor")
        library.impl("twice", lambda t: t.exp() * 2, "CompositeExplicitAutograd")
        x = torch.ones(3, device=DEVICE)
        with tw.aten.use("all", include=["exp", "mul.Tensor"]):
            made = torch.ops.tilewright_tests.twice(x)
            assert taken("exp", "mul.Tensor") == [1, 1]
        near(made, torch.full((3,), 2 * torch.e, device=DEVICE))


# ---- several processes -----------------------------------------------------------------------------------------------


def on_two_ranks(rank: int, file: str) -> None:
    """DTensors and FSDP2, by gloo: gradients are those of one process, and ours ran on the shards."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(minutes=2))
    try:
        mesh = init_device_mesh("cpu", (2,))
        model, x = layer()
        wanted = gradients(model, x)
        rows = distribute_tensor(x, mesh, [Shard(0)])
        call = lambda t: torch.softmax(torch.exp(t) @ torch.ones(8, 8), -1)  # noqa: E731
        ones = distribute_tensor(torch.ones(8, 8), mesh, [Replicate()])
        with tw.aten.use("all"):
            made = torch.softmax(torch.exp(rows) @ ones, -1)
            assert isinstance(made, DTensor) and min(taken("exp", "mm", "_softmax"))
            whole = made.full_tensor()
        near(whole, call(x))
        sharded, _ = layer()
        fully_shard(sharded, mesh=mesh)
        optimiser = torch.optim.SGD(sharded.parameters(), lr=0.0)
        half = x[2 * rank : 2 * rank + 2]
        with tw.aten.use("all"):
            out = sharded(half)
            (2 * (out * out).sum()).backward()  # FSDP has the mean over ranks, and one process the sum
            optimiser.step()
            assert min(taken("native_layer_norm", "native_layer_norm_backward", "_softmax_backward_data"))
        near(out.detach(), wanted[0][2 * rank : 2 * rank + 2])
        near([p.grad.full_tensor() for p in sharded.parameters()], wanted[2:])
    finally:
        dist.destroy_process_group()


def test_sharded_tensors_on_two_ranks(tmp_path):
    """The interpreter's kernels, in two processes that begin anew."""
    assert os.environ.get("TRITON_INTERPRET") == "1"
    mp.spawn(on_two_ranks, (str(tmp_path / "meeting"),), nprocs=2)
