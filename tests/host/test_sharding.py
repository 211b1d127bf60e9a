"""DTensors and FSDP2 on two processes: values, gradients, placements, and what is sent, against the same calls in one process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import tilewright as tw
from examples import fsdp2
from tests.remember import in_catalogue, remember
from tilewright.core.signature import Row
from tilewright.integrations.pytorch import sharding
from tilewright.op import OPS, Op, Sharding

R, P = Replicate(), Partial()
LABELS = torch.tensor([[0, 3, -100], [6, 7, 1], [2, -100, -100]])  # two of three rows on rank 0; 7 is in no vocabulary


class Case(NamedTuple):
    """A call: its sharded and its replicated tensors, the placements of the results, and how many collectives it needs."""

    op: str
    tensors: dict[str, tuple[Tensor, Placement]]
    results: tuple[Placement, ...]
    options: dict[str, Any] = {}
    sent: int = 0


def numbers(*shape: int) -> Tensor:
    """What FP8 codes have exactly: shards have other blocks than the whole."""
    return torch.randint(-4, 5, shape).float()


def cases() -> list[Case]:
    torch.manual_seed(0)
    return [*usual_cases(torch.randn), *more_cases(torch.randn)]


def usual_cases(draw: Any) -> list[Case]:
    x, whole = (draw(3, 4, 8), Shard(1)), numbers(3, 4, 8)
    w = (draw(8), R)
    labels, logits = (LABELS, Shard(0)), (draw(3, 3, 7), Shard(0))
    q, k = draw(2, 4, 6, 8), draw(2, 2, 6, 8)
    freqs, routed = draw(1, 6, 4), (torch.tensor([[0, 1], [2, 0], [1, 2]]), Shard(0))
    experts = {"gate_up": (draw(3, 8, 4), R), "down": (draw(3, 4, 4), R), "probs": (draw(3, 2), Shard(0))}
    mla = {"q": (draw(6, 2, 4, 8), Shard(2)), "kv": (draw(6, 2, 4, 9), Shard(2)), "k_pos": (draw(6, 2, 1, 4), R)}
    mla["freqs"] = (draw(6, 2), R)
    names = ("hidden", "weight", "labels")
    head = dict(zip(names, ((draw(3, 3, 8), Shard(0)), (draw(7, 8), R), (LABELS.clamp(-100, 6), Shard(0)))))
    safe = {"logits": logits, "labels": head["labels"]}
    return [
        Case("rms_norm", {"x": x, "weight": w}, (Shard(1),)),
        Case("rms_norm", {"x": (x[0], R), "weight": w}, (R,)),
        Case("add_rms_norm", {"x": x, "residual": (draw(3, 4, 8), Shard(1)), "weight": w}, (Shard(1), Shard(1))),
        Case("layer_norm", {"x": x, "weight": w, "scale": (draw(3, 4, 8), Shard(1))}, (Shard(1),)),
        Case("add_layer_norm", {"x": x, "residual": (draw(3, 4, 8), Shard(1)), "weight": w}, (Shard(1), Shard(1))),
        Case("instance_norm", {"x": (draw(4, 2, 8), Shard(0)), "weight": (draw(2), R)}, (Shard(0),)),
        Case("instance_norm", {"x": (draw(2, 4, 8), Shard(1)), "bias": (draw(4), Shard(0))}, (Shard(1),)),
        Case("outer", {"x": (draw(4), Shard(0)), "y": (draw(3), R)}, (Shard(0),)),
        Case("outer", {"x": (draw(3), R), "y": (draw(4), Shard(0))}, (Shard(1),)),
        Case("glu", {"x": x}, (Shard(1),)),
        Case("glu", {"x": (draw(3, 8), Shard(1)), "up": (draw(3, 8), Shard(1)), "scale": (draw(3), R)}, (Shard(1),)),
        Case("rope", {"q": (q, Shard(1)), "k": (k, Shard(1)), "freqs": (freqs, R)}, (Shard(1), Shard(1))),
        Case("rope", {"q": (q, Shard(2)), "k": (k, Shard(2)), "freqs": (freqs, Shard(1))}, (Shard(2), Shard(2))),
        Case("mla_rope", mla, (Shard(2), Shard(2), Shard(2))),
        Case("cross_entropy", {"logits": logits, "labels": labels}, (Shard(0),), {"reduction": "none"}),
        Case("cross_entropy", safe, (P,), {"reduction": "sum", "z_loss": 0.1}),
        Case("cross_entropy", {**safe, "weight": (draw(7).abs(), R)}, (P,), {}, 1),
        Case("linear_cross_entropy", head, (P,), {}, 1),
        Case("embedding", {"ids": (LABELS.clamp(0), Shard(0)), "weight": (draw(9, 4), R)}, (Shard(0),)),
        Case("embedding", {"ids": (LABELS.clamp(0), R), "weight": (draw(9, 4), Shard(1))}, (Shard(2),)),
        Case("linear_fp8", {"x": (whole, Shard(1)), "weight": (numbers(6, 8), R), "bias": (draw(6), R)}, (Shard(1),)),
        Case("linear_fp8", {"x": (whole, R), "weight": (numbers(6, 8), Shard(0)), "bias": (draw(6), Shard(0))}, (Shard(2),)),
        Case("linear_fp8", {"x": (whole, Shard(2)), "weight": (numbers(6, 8), Shard(1))}, (P,)),
        Case("matmul", {"a": (draw(3, 8), Shard(1)), "b": (draw(8, 5), Shard(0))}, (P,)),
        Case("router_linear", {"x": (draw(3, 8), R), "weight": (draw(6, 8), Shard(0))}, (Shard(1),)),
        Case("rms_norm_router", {"x": x, "weight": w, "router": (draw(6, 8), R)}, (Shard(1), Shard(1))),
        Case("topk_routing", {"logits": (draw(3, 5), Shard(0))}, (Shard(0), Shard(0), P), {"k": 2}),
        Case("moe_feed_forward", {"x": (draw(3, 4), Shard(0)), "routing": routed, **experts}, (Shard(0),)),
    ]  # fmt: skip


def more_cases(draw: Any) -> list[Case]:
    heads = {"heads": 4, "kv_heads": 2, "head_dim": 6}
    qkv = {"q_weight": (draw(6), R), "k_weight": (draw(6), R)}
    packed, freqs = draw(3, 5, 48), draw(5, 2)
    angles = {"freqs": (freqs, Shard(0)), "qkv": (packed, Shard(1))}
    tokens, transposed = (draw(3, 4, 8), Shard(1)), (draw(4, 3, 8), Shard(0))
    logits, labels, five = draw(3, 7), torch.tensor([1, -100, 6]), draw(2, 3, 5).abs() + 1
    even = {"counts": (torch.tensor([3, 1, 4, 0, 2]), R)}
    chosen = {"indices": (torch.tensor([[0, 3], [4, -1], [2, 1]]), Shard(0)), "probs": (draw(3, 2), Shard(0))}
    gate, up, down = draw(3, 6), draw(3, 6), draw(5, 6)
    by_head = {
        "q": (draw(2, 5, 4, 6), Shard(2)),
        "k": (draw(2, 5, 2, 6), Shard(2)),
        "v": (draw(2, 5, 2, 4), Shard(2)),
        "sink": (draw(4), Shard(0)),
    }
    by_batch = {n: (t, R if n == "sink" else Shard(0)) for n, (t, _) in by_head.items()}
    some = {"kv_len": (torch.tensor([5, 3]), R)}
    parts = {"o": (draw(3, 2, 5, 4, 6), Shard(2)), "lse": (draw(3, 2, 4, 5), Shard(3))}
    return [
        Case("attention", by_head, (Shard(2),), {"causal": True}),
        Case("attention", by_batch, (Shard(0),), {"left": 2}),
        Case("attention_lse", {**by_head, **some}, (Shard(2), Shard(1))),
        Case("attention_merge", parts, (Shard(1), Shard(2))),
        Case("glu_linear", {"x": (gate, Shard(1)), "up": (up, Shard(1)), "weight": (down, Shard(1))}, (P,)),
        Case("glu_linear", {"x": (draw(3, 12), Shard(0)), "weight": (down, R), "bias": (draw(5), R)}, (Shard(0),)),
        Case("glu_linear_fp8", {n: (numbers(5, 6), Shard(1)) for n in ("x", "up", "weight")}, (P,), {"act": "relu"}),
        Case("rms_norm_rstd", {"x": tokens, "weight": (draw(8), R)}, (Shard(1), Shard(1))),
        Case(
            "cross_entropy_lse", {"logits": (logits, Shard(0)), "labels": (labels, Shard(0))}, (P, Shard(0)), {"reduction": "sum"},
        ),
        Case("rope_one", {"x": (draw(2, 3, 5, 4), Shard(2)), "freqs": (freqs[None], Shard(1))}, (Shard(2),)),
        Case("rope_one", {"x": (draw(2, 3, 5, 4), Shard(0)), "freqs": (draw(2, 9, 2), Shard(0))}, (Shard(0),)),
        Case("qkv_split", {**qkv, **angles}, (Shard(1),) * 3, {**heads, "rotary_dim": 4}),
        Case("qkv_split", {**qkv, "qkv": (packed, Shard(2)), "freqs": (freqs, R)}, (Shard(2),) * 3, {**heads, "rotary_dim": 4}),
        Case("qkv_split", {"qkv": (packed, Shard(1))}, (Shard(0),) * 3, {**heads, "transposed": True, "packing": "plain"}),
        Case("gated_group_norm", {"x": tokens, "gate": transposed, "weight": (draw(8), R)}, (Shard(0),), {"groups": 2}),
        Case("gated_group_norm", {"x": tokens, "gate": (draw(3, 4, 8), Shard(1))}, (Shard(1),), {"transposed": False}),
        Case("rwkv_keys", {"k": tokens, "kk": (draw(8), R), "a": tokens, "ka": (draw(8), R)}, (Shard(1),) * 3, {"heads": 2}),
        Case("cross_entropy_parts", {"logits": (logits, Shard(0)), "labels": (labels, Shard(0))}, (Shard(0),), {"slant": True}),
        Case(
            "cross_entropy_join",
            {"parts": (five[0], Shard(0)), "gathered": (five, Shard(1)), "labels": (labels, Shard(0))}, (Shard(0),), {"classes": 9},
        ),
        Case("router_z_loss", {"logits": (draw(3, 2, 5), Shard(0))}, (P,), {"coef": 0.5}),
        Case("router_z_loss", {"logits": (draw(1, 5), Shard(0))}, (P,), {"coef": 0.5}),  # one rank has none
        Case("load_balancing_loss", {"logits": (draw(3, 5), Shard(0)), **even}, (P,), {"coef": 0.5, "score": "sigmoid"}),
        Case("load_balancing_loss", {"logits": (draw(3, 5), R), **even}, (R,), {"coef": 0.5}),
        Case("routing_map", chosen, (Shard(0), Shard(0)), {"experts": 5}),
        Case("softmax", {"x": tokens}, (Shard(1),)),
        Case("hadamard", {"x": (draw(3, 32), Shard(0))}, (Shard(0),), {"block": 16}),
        Case("hadamard", {"x": (draw(16, 3), Shard(1))}, (Shard(1),), {"block": 16, "dim": 0}),
        Case("transpose_pad", {"x": (draw(2, 5, 3), Shard(2))}, (Shard(1),), {"multiple": 4}),
    ]  # fmt: skip


def tuple_of(made: Any) -> tuple[Tensor, ...]:
    return made if isinstance(made, tuple) else (made,)


def check(case: Case, mesh: DeviceMesh) -> None:
    """The call with DTensors gives what it gives without, and so do its gradients."""
    function, graded = getattr(tw, case.op), OPS[case.op].differentiable
    whole = {n: t.clone().requires_grad_(n in graded) for n, (t, _) in case.tensors.items()}
    parts = {
        n: distribute_tensor(t, mesh, [p], src_data_rank=None).requires_grad_(n in graded)
        for n, (t, p) in case.tensors.items()
    }
    expected = tuple_of(function(**whole, **case.options))
    upstream = [torch.linspace(-4, 5, r.numel()).round().view(r.shape) for r in expected]
    sources = [
        distribute_tensor(g, mesh, [R if p == P else p], src_data_rank=None) for g, p in zip(upstream, case.results)
    ]
    with CommDebugMode() as sent:
        made = tuple_of(function(**parts, **case.options))
        torch.autograd.backward(*zip(*((r, g) for r, g in zip(made, sources) if r.requires_grad)))
    assert sent.get_total_counts() == case.sent, (case.op, sent.get_comm_counts())
    torch.autograd.backward(*zip(*((r, g) for r, g in zip(expected, upstream) if r.requires_grad)))
    assert tuple(r.placements[0] for r in made) == case.results, case.op
    near = {"rtol": 1e-5, "atol": 2e-5, "equal_nan": True}
    for r, exact in zip(made, expected):
        torch.testing.assert_close(r.full_tensor(), exact, **near)
    for n in (n for n in whole if n in graded):
        placed = case.tensors[n][1]
        summed = placed == R and any(p != R for p in case.results)
        assert parts[n].grad.placements == (P if summed else placed,), (case.op, n)
        torch.testing.assert_close(parts[n].grad.full_tensor(), whole[n].grad, **near)


def refused(mesh: DeviceMesh) -> None:
    def placed(shape: tuple[int, ...], placement: Placement) -> DTensor:
        return distribute_tensor(torch.ones(shape), mesh, [placement], src_data_rank=None)

    x, w = placed((4, 8), Shard(0)), placed((8,), R)
    summed = DTensor.from_local(torch.ones(4, 8), mesh, [P])
    q, freqs = placed((1, 2, 4, 8), Shard(2)), placed((1, 9, 4), R)
    routing, labels = placed((4, 2), Shard(0)).long(), placed((4,), R).long()

    def qkv(width: int, kv_heads: int, **options: Any) -> Any:
        return tw.qkv_split(
            placed((1, 2, width), Shard(2)), heads=2 * kv_heads, kv_heads=kv_heads, head_dim=2, **options
        )

    for call, kind, words in (
        (lambda: tw.rms_norm(placed((4, 8), Shard(1)), w), ValueError, "x is sharded on hidden, of which each rank needs all"),
        (lambda: tw.rms_norm(x, placed((8,), Shard(0))), ValueError, "weight must be replicated on mesh dimension 0"),
        (lambda: tw.rms_norm(summed, w), ValueError, r"x is Partial\(sum\) on mesh dimension 0: redistribute"),
        (lambda: tw.rms_norm(x, torch.ones(8)), TypeError, "weight is a plain tensor beside DTensors"),
        (lambda: tw.rms_norm(x, w, out_format=tw.fp8("1x128")), ValueError, "out_format is not for DTensors"),
        (lambda: tw.rms_norm(x, placed((8, 8), Shard(1))), ValueError, "weight"),
        (lambda: tw.glu(placed((4, 8), Shard(1))), ValueError, "x is sharded on width"),
        (lambda: tw.rope(q, q, freqs=freqs), ValueError, "q is sharded on length"),
        (lambda: tw.cross_entropy(x, placed((4,), R).long()), ValueError, "labels must be sharded on dimension 0 as logits is"),
        (
            lambda: tw.linear_fp8(placed((4, 8), Shard(1)), placed((6, 8), Shard(1)), placed((6,), R)),
            ValueError, "bias would be added on every rank",
        ),
        (
            lambda: tw.attention(*[placed((2, 4, 2, 8), Shard(1))] * 3), ValueError,
            "q is sharded on length, of which each rank needs all",
        ),
        (
            lambda: tw.attention(*[placed((2, 4, 2, 8), Shard(2))] * 3, mask=placed((1, 2, 4, 4), R)), ValueError,
            "q is sharded on heads, of which each rank needs all",
        ),
        (lambda: qkv(24, 3), ValueError, "qkv is sharded on heads, of which each rank needs all"),
        (lambda: qkv(16, 2, packing="plain"), ValueError, "qkv is sharded on heads, of which each rank needs all"),
        (lambda: tw.cross_entropy(placed((4, 8), Shard(1)), labels), ValueError, r"to_local\(\) to parallel_cross_entropy"),
        (lambda: tw.parallel_cross_entropy(placed((4, 8), Shard(1)), labels), ValueError, r"pass its to_local\(\) to parallel"),
        (lambda: tw.moe_permute(x, routing, experts=2), NotImplementedError, r"moe_permute: there is no rule for DTensors: pass"),
        (lambda: tw.quantize(x, tw.fp8("1x128")), NotImplementedError, "quantize: there is no rule for DTensors"),
    ):  # fmt: skip
        with CommDebugMode() as sent, pytest.raises(kind, match=words):
            call()
        assert sent.get_total_counts() == 0


def two_dimensions() -> None:
    """One dimension of the tensor on each of the mesh."""
    mesh = init_device_mesh("cpu", (1, 2))
    x = torch.randn(2, 4, 8, generator=torch.Generator().manual_seed(3))
    y = tw.rms_norm(distribute_tensor(x, mesh, [Shard(0), Shard(1)]), distribute_tensor(torch.ones(8), mesh, [R, R]))
    assert y.placements == (Shard(0), Shard(1))
    torch.testing.assert_close(y.full_tensor(), tw.rms_norm(x))


def layers(mesh: DeviceMesh) -> None:
    """With tokens sharded, and under torch's own plans for columns and rows of a weight."""
    x = torch.randn(4, 3, 16, generator=torch.Generator().manual_seed(4))
    tokens = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    for make in (
        lambda: tw.nn.FeedForward(16, 128, precision="fp8"),
        lambda: tw.nn.MoEFeedForward(16, 32, 4, 2),
        lambda: tw.nn.Linear(16, 8),
    ):
        torch.manual_seed(1)
        layer = make()
        exact = tuple_of(layer(x))[0]
        sharded = distribute_module(layer, mesh)
        with CommDebugMode() as sent:
            y = tuple_of(sharded(tokens.detach().requires_grad_()))[0]
            y.sum().backward()
        assert sent.get_total_counts() == 0 and y.placements == (Shard(0),)
        assert {p.grad.placements for p in sharded.parameters()} == {(P,)}
        torch.testing.assert_close(y.full_tensor(), exact)
    for plan, given in ((ColwiseParallel, x), (RowwiseParallel, x.chunk(2, -1)[mesh.get_local_rank()])):
        layer = tw.nn.Linear(16, 8, bias=False)
        for p in layer.parameters():
            dist.broadcast(p.data, 0)
        exact = layer(x)
        made = parallelize_module(layer, mesh, plan(use_local_output=False))(given)
        torch.testing.assert_close(made.full_tensor(), exact)


def balanced(mesh: DeviceMesh) -> None:
    """The losses of a router are those of all tokens; the counts of experts are summed over ranks for them, and nothing else."""
    torch.manual_seed(2)
    x = torch.randn(3, 16)
    layer = tw.nn.MoEFeedForward(16, 32, 4, 2, z_loss=0.1, balance_loss=0.1)
    exact = layer(x)[1]
    exact.backward()
    wanted, parts = layer.router.grad, distribute_module(layer, mesh)
    tokens = distribute_tensor(x, mesh, [Shard(0)], src_data_rank=None)
    with CommDebugMode() as sent:
        loss = parts(tokens)[1]
        loss.backward()
    assert sent.get_total_counts() == 1 and loss.placements == (P,)
    torch.testing.assert_close(loss.full_tensor(), exact)
    torch.testing.assert_close(parts.router.grad.full_tensor(), wanted)


def coded(mesh: DeviceMesh | None) -> list[float]:
    """Losses of layers whose weights are codes, all ranks with the same input."""
    torch.manual_seed(0)
    model = nn.Sequential(tw.nn.Linear(32, 64), tw.nn.FeedForward(64, 128, precision="fp8", norm=False))
    if mesh is not None:
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=2.0)
    x, losses = torch.randn(16, 32), []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        assert not any(layer.codes.made for layer in model)
    return losses


def on_two_ranks(rank: int, file: str, alone: tuple[list[float], list[float]]) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    try:
        mesh = init_device_mesh("cpu", (2,))
        with pytest.raises(NotImplementedError, match="rms_norm"):  # until asked for, as torch has it
            tw.rms_norm(distribute_tensor(torch.ones(4, 8), mesh, [Shard(0)]))
        sharding.register()
        for case in cases():
            check(case, mesh)
        refused(mesh)
        two_dimensions()
        layers(mesh)
        balanced(mesh)
        for made, exact in zip((coded(mesh), fsdp2.train(mesh, 3)), alone):
            torch.testing.assert_close(torch.tensor(made), torch.tensor(exact), rtol=2e-6, atol=0)
    finally:
        dist.destroy_process_group()


def test_two_ranks(tmp_path):
    alone = coded(None), fsdp2.train(None, 3)
    assert all(before > after for before, after in zip(alone[0], alone[0][1:]))
    # Both ranks from one process that has imported everything: importing takes longer than the test
    mp.get_context("forkserver").set_forkserver_preload([fsdp2.__name__, sharding.__name__, "torch._dynamo"])
    mp.start_processes(on_two_ranks, (str(tmp_path / "meeting"), alone), nprocs=2, start_method="forkserver")


@contextmanager
def one_of_two() -> Iterator[DeviceMesh]:
    """The mesh of two ranks of which there is one; rules that are registered meanwhile are forgotten."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    before = {name: op.sharded for name, op in tw.catalogue().items()}
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()
        for name, op in tw.catalogue().items():
            op.sharded = before[name]


def test_compiled_in_one_graph():
    with one_of_two() as mesh:
        sharding.register()
        made = []
        for call in (tw.rms_norm, torch.compile(tw.rms_norm, fullgraph=True, backend="aot_eager")):
            x = DTensor.from_local(torch.linspace(-1, 2, 24).view(3, 8), mesh, [Shard(0)]).requires_grad_()
            w = DTensor.from_local(torch.ones(8), mesh, [R]).requires_grad_()
            y = call(x, w)
            y.backward(torch.ones_like(y))
            assert (y.placements, x.grad.placements, w.grad.placements) == ((Shard(0),), (Shard(0),), (P,))
            made.append([t.to_local() for t in (y.detach(), x.grad, w.grad)])
        assert all(torch.equal(*pair) for pair in zip(*made))


def test_rules_that_are_functions_are_traced():
    with one_of_two() as mesh:
        sharding.register()
        tried = {case.op: case for case in cases() if case.op in ("qkv_split", "glu", "cross_entropy_lse")}
        for name, case in tried.items():
            parts = {n: distribute_tensor(t, mesh, [p], src_data_rank=None) for n, (t, p) in case.tensors.items()}
            call = partial(getattr(tw, name), **case.options)
            for made in (
                tuple_of(call(**parts)),
                tuple_of(torch.compile(call, fullgraph=True, backend="eager")(**parts)),
            ):
                assert tuple(r.placements[0] for r in made) == case.results, name


def test_a_weight_that_is_set_has_new_codes():
    """As FSDP does: gathered to where the last one lay, its version the same, then set."""
    torch.manual_seed(0)
    layer, other = (tw.nn.Linear(32, 16, bias=False).requires_grad_(False) for _ in range(2))
    x = torch.randn(4, 32)
    before, weight = layer(x), layer.weight
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(weight):
        weight.copy_(other.weight)
    assert torch.equal(layer(x), before)  # nothing shows yet
    layer.weight = weight
    assert torch.equal(layer(x), other(x))


def shardings() -> Iterator[tuple[Op, Sharding]]:
    """What each op says, of each of the calls above where that is a function of the arguments."""
    ops = tw.catalogue()
    for case in cases():
        op, given = ops[case.op], {n: t for n, (t, _) in case.tensors.items()}
        said = op.sharding
        yield (
            op,
            said
            if isinstance(said, Sharding)
            else said(SimpleNamespace(**op.signature.bind((), given | case.options))),
        )


def test_every_op_that_says_how_it_is_sharded_is_tried():
    assert {case.op for case in cases()} == {name for name, op in tw.catalogue().items() if op.sharding is not None}


def test_shardings_name_dimensions_and_arguments():
    for op, said in shardings():
        rows = [p.rule for p in op.signature.parameters if p.name in op.signature.tensors]
        declared = {d for row in rows for d in row.dims}
        known = {sharding.key_of(said.names.get(d, d)) for d in declared} | {"..." for row in rows if row.leading}
        assert {*said.local} <= known and {*said.units} <= known and {*said.advice} <= known, op.name
        results = {d for text in op.result_rows.values() if isinstance(text, str) for d in Row.parse(text).dims}
        assert {*said.names} <= declared | results, op.name
        assert {*said.once, *said.summed, *filter(None, [said.mean])} <= {*op.signature.tensors}, op.name
        assert {*said.summing} <= {*op.signature.names} and (said.divisor is None) == (not said.summing), op.name


@contextmanager
def declared(name: str, reference: Any, **said: Any) -> Iterator[Op]:
    try:
        yield Op(name, reference, dict, **said)
    finally:
        OPS.pop(name, None)


def shifted(x: Tensor, by: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(x + by in every row, scaled by it, the sums of columns)."""
    y = (x + by) * (1 if scale is None else scale)
    return y, y.sum(0)


def test_an_op_takes_dtensors_as_it_declares():
    """On a rank of two that does not hear of the other."""
    rows = {"where": {"x": "float[tokens hidden]", "by": "float[hidden]", "scale": "float[tokens? hidden?]"}}
    rows["results"] = {"y": "x[tokens hidden]", "total": "x[hidden]"}
    with (
        one_of_two() as mesh,
        declared("shifted_locally", shifted, **rows, sharding=Sharding(("tokens", "hidden"))) as local,
        declared(
            "shifted_in_order", shifted, **rows, sharding=lambda a: Sharding(("row",), {"tokens": "row"})
        ) as named,
        declared("shifted_whole", shifted, **rows) as whole,
    ):
        sharding.register()

        def part(shape: tuple[int, ...], placement: Placement) -> DTensor:
            return DTensor.from_local(torch.ones(shape), mesh, [placement])

        x, by = part((3, 8), Shard(0)), part((8,), R)
        for op in (local, named):
            y, total = op(x, by)
            assert (y.shape, y.placements, total.shape, total.placements) == ((6, 8), (Shard(0),), (8,), (P,))
            assert torch.equal(total.to_local(), torch.full((8,), 6.0))
        y, total = local(part((3, 4), Shard(1)), part((4,), Shard(0)))
        assert (y.shape, y.placements, total.shape, total.placements) == ((3, 8), (Shard(1),), (8,), (Shard(0),))
        # What broadcasts has the dimension not, and is replicated
        y, _ = local(x, by, part((1, 8), R))
        assert y.placements == (Shard(0),)
        y, _ = local(x, by, part((3, 1), Shard(0)))
        assert y.placements == (Shard(0),)
        with pytest.raises(ValueError, match="scale must be replicated on mesh dimension 0"):
            local(part((4, 4), Shard(1)), part((4,), Shard(0)), part((2, 1), Shard(0)))
        with pytest.raises(ValueError, match="scale must be sharded on tokens as x is"):
            local(x, by, part((6, 8), R))
        with pytest.raises(ValueError, match="x is sharded on hidden, of which each rank needs all"):
            named(part((3, 4), Shard(1)), part((4,), Shard(0)))
        with pytest.raises(NotImplementedError, match="shifted_whole: there is no rule for DTensors"):
            whole(x, by)


def test_a_sharding_that_cannot_be_is_refused():
    rows = {"where": {"x": "float[tokens hidden]", "by": "float[hidden]", "scale": "float[tokens hidden]"}}
    rows["results"] = {"y": "x[tokens hidden]", "total": "x[hidden]"}
    with pytest.raises(ValueError, match="sharding names bias, which is neither"):
        Op("never_declared", shifted, dict, **rows, sharding=Sharding(once=("bias",)))


def test_an_argument_that_is_written_is_written_where_it_is_sharded():
    x, gain = torch.linspace(-1, 2, 24).view(3, 8), torch.linspace(1, 2, 8)
    with in_catalogue(), one_of_two() as mesh:
        sharding.register()

        def part(t: Tensor, placement: Placement) -> DTensor:
            return DTensor.from_local(t, mesh, [placement], run_check=False)

        cache = part(torch.zeros(3, 8), Shard(1))
        y, total = remember(part(x, Shard(1)), part(gain, Shard(0)), cache, slot=1)
        assert (y.shape, y.placements, total.placements) == ((3, 16), (Shard(1),), (P,))
        assert torch.equal(cache.to_local()[1], x.sum(0)) and torch.equal(y.to_local(), x * gain)
        with pytest.raises(ValueError, match="cache is written, and has no dimension"):
            remember(part(x, Shard(0)), part(gain, R), part(torch.zeros(3, 8), R))
        assert remember(part(x, R), part(gain, R), part(torch.zeros(3, 8), R))[1].placements == (R,)
