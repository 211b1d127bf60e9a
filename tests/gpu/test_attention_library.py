"""Attention with cuDNN's forward on hardware: o, lse and gradients against float64 at every width that torch lets it have, of heads
that share keys, of other keys than queries; the same bits in a hundred runs, and in a graph as outside of it; what `auto` takes."""

from __future__ import annotations

import hashlib
import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.attention_oracle import agrees, call
from tests.gpu.test_attention import a_hundred_alike
from tilewright.attention import library
from tilewright.attention.attention import reference_lse
from tilewright.attention.preference import LIBRARY, decide
from tilewright.check.oracle import rms
from tilewright.core.target import Target

pytestmark = pytest.mark.gpu
BARS = {torch.bfloat16: 4e-3, torch.float16: 5e-4}
KINDS = {
    "full": {"length": 515, "keys": 515},
    "causal": {"length": 515, "keys": 515, "causal": True},
    "more keys": {"length": 130, "keys": 777},
    "fewer keys": {"length": 700, "keys": 65},
    "a scale": {"length": 256, "keys": 256, "causal": True, "scale": 0.31},
}
WIDTHS = [(64, 64), (128, 128), (256, 256), (192, 128), (72, 72), (96, 40), (8, 8)]


def on_gpu(a: dict) -> dict:
    return {name: t.cuda() if torch.is_tensor(t) else t for name, t in a.items()}


def needed(a: dict) -> None:
    """Skip what torch does not let cuDNN have on this chip; heads of up to 128 columns it does."""
    if library.absence() is not None:
        pytest.skip(library.absence())
    if not library.offered(SimpleNamespace(**a)):
        assert max(a["q"].shape[-1], a["v"].shape[-1]) > 128
        pytest.skip("torch does not let cuDNN have heads this wide here")


def digest(*results: Tensor) -> str:
    return hashlib.sha256(b"".join(t.cpu().view(torch.uint8).numpy().tobytes() for t in results)).hexdigest()


def test_torch_has_the_function_that_is_known():
    assert torch.version.cuda is None or library.entry_point() is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("D", "V"), WIDTHS)
@pytest.mark.parametrize("kind", KINDS)
def test_results(kind, D, V, dtype):
    """The first time, and from a plan."""
    a = call(**KINDS[kind], batch=2, heads=6, kv_heads=2, D=D, V=V, dtype=dtype)
    here = on_gpu(a)
    needed(here)
    for _ in range(2):
        o, lse = tw.attention_lse(**here, backend="cudnn")
        agrees(a, o.cpu(), lse.cpu())
        assert o.is_contiguous() and lse.is_contiguous() and not o._is_view()
        assert torch.equal(tw.attention(**here, backend="cudnn"), o)


@pytest.mark.parametrize("size", [20.0, 0.0])
def test_scores_far_apart_and_all_alike(size):
    """Weights of one key alone, far from 0; and of all keys alike, where lse is the logarithm of their number."""
    a = call(length=384, keys=384, heads=2, kv_heads=2, D=128)
    a["q"] = (a["q"] * size).to(torch.bfloat16)
    here = on_gpu(a)
    needed(here)
    o, lse = tw.attention_lse(**here, backend="cudnn")
    agrees(a, o.cpu(), lse.cpu())
    if not size:
        assert torch.allclose(lse.cpu(), torch.full(lse.shape, math.log(384)), rtol=1e-5)


def test_tokens_of_a_packed_projection_and_heads_first():
    a = call(batch=2, length=300, keys=300, heads=4, kv_heads=4, D=128, causal=True)
    here = on_gpu(a)
    needed(here)
    rows = torch.cat([here[n].flatten(2) for n in "qkv"], -1)
    parts = [part.unflatten(-1, (4, 128)) for part in rows.split(512, -1)]
    turned = [here[n].transpose(1, 2).contiguous().transpose(1, 2) for n in "qkv"]
    for given in (parts, turned):
        o, lse = tw.attention_lse(**{**here, **dict(zip("qkv", given))}, backend="cudnn")
        agrees(a, o.cpu(), lse.cpu())
        assert o.is_contiguous()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("D", "V"), [(64, 64), (128, 128), (256, 256), (192, 128)])
@pytest.mark.parametrize("kind", ["full", "causal", "more keys"])
def test_gradients(kind, D, V, dtype):
    """By our own kernels over cuDNN's o and lse, through both of them."""
    a = call(**KINDS[kind], heads=4, kv_heads=2, D=D, V=V, dtype=dtype)
    here = on_gpu(a)
    needed(here)
    leaves = [here[n].detach().clone().requires_grad_() for n in "qkv"]
    wide = [here[n].double().requires_grad_() for n in "qkv"]
    results = tw.attention_lse(**{**here, **dict(zip("qkv", leaves))}, backend="cudnn")
    truth = reference_lse(**{**here, **dict(zip("qkv", wide))})
    source = torch.Generator("cuda").manual_seed(3)
    grads = [torch.randn(r.shape, generator=source, device="cuda").to(r.dtype) for r in results]
    mine = torch.autograd.grad(results, leaves, grads)
    wanted = torch.autograd.grad(truth, wide, [g.double() for g in grads])
    for name, found, true in zip("qkv", mine, wanted):
        assert rms(found.double() - true) <= BARS[dtype] * float(rms(true)), name


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_a_hundred_runs_have_the_same_bits(kind):
    """Forward and backward."""
    here = on_gpu(call(batch=2, length=1100, keys=1100, heads=14, kv_heads=2, D=128, causal=kind == "causal"))
    needed(here)

    def run():
        leaves = [here[n].detach().requires_grad_() for n in "qkv"]
        o, lse = tw.attention_lse(**{**here, **dict(zip("qkv", leaves))}, backend="cudnn")
        return o.detach(), lse.detach(), *torch.autograd.grad(o.float().square().sum(), leaves)

    a_hundred_alike(run)


@pytest.mark.parametrize("kind", ["full", "causal"])
def test_a_graph_gives_the_same_bits(kind):
    here = on_gpu(call(**KINDS[kind], batch=2, heads=6, kv_heads=2, D=128))
    needed(here)
    wanted = digest(*tw.attention_lse(**here, backend="cudnn"))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = tw.attention_lse(**here, backend="cudnn")
    for _ in range(3):
        for t in made:
            t.fill_(math.inf)
        graph.replay()
        assert digest(*made) == wanted


def test_memory_of_the_caller_s():
    here = on_gpu(call(batch=2, length=300, keys=300, heads=4, kv_heads=2, D=128))
    needed(here)
    wanted = tw.attention_lse(**here, backend="cudnn")
    for _ in range(2):
        out = tuple(torch.full_like(t, math.nan) for t in wanted)
        made = tw.attention_lse(**here, backend="cudnn", out=out)
        assert all(t is mine and torch.equal(t, true) for t, mine, true in zip(made, out, wanted))


@pytest.mark.parametrize(("causal", "D", "heads"), [(False, 128, 32), (True, 128, 32), (True, 256, 16)])
def test_auto_takes_what_rows_say(causal, D, heads):
    """And gives the bits of what it takes; not where somebody has switched cuDNN's attention off."""
    source = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(4, 4096, heads, D, generator=source, device="cuda").bfloat16() for _ in range(3))
    op = tw.attention.op
    values = op.signature.bind((), {"q": q, "k": k, "v": v, "causal": causal})
    needed(values)
    best = decide(Target.at(q.device), "forward", SimpleNamespace(**values)).best
    assert op.implementation(values).name == best
    same = tw.attention(q, k, v, causal=causal, backend=best)
    assert torch.equal(tw.attention(q, k, v, causal=causal), same)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    try:
        torch.backends.cuda.enable_cudnn_sdp(False)
        assert op.implementation(values).name != LIBRARY
    finally:
        torch.backends.cuda.enable_cudnn_sdp(before)


def test_a_compiled_function_has_it_too():
    here = on_gpu(call(length=256, keys=256, heads=4, kv_heads=2, D=128, causal=True))
    needed(here)
    q, k, v = (here[n] for n in "qkv")
    wanted = tw.attention(q, k, v, causal=True, backend="cudnn")
    compiled = torch.compile(
        lambda *t: tw.attention(*t, causal=True, backend="cudnn"), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(q, k, v), wanted)
