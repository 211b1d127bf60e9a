"""Attention on hardware: kernels for one chip against float64 and the portable ones, at every width and of every kind, with NaN in
all that nobody sees; the same bits in a hundred runs, and in a graph as outside of it. A kernel that waits for ever ends the
process."""

from __future__ import annotations

import faulthandler
import hashlib
import math

import pytest
import torch

import tilewright as tw
from tests.attention_oracle import CALLS, agrees, call, poisoned
from tilewright.check.oracle import bits
from tilewright.core.target import Target

pytestmark = pytest.mark.gpu
LIMIT = 300  # seconds for a test, compiling included
WIDTHS = [(D, D) for D in (8, 16, 24, 40, 64, 72, 80, 96, 104, 128, 160, 192, 224, 256)]
WIDTHS += [(192, 128), (64, 256), (256, 64), (96, 72)]
LONG = {
    "batch": 2,
    "length": 1100,
    "keys": 1300,
    "heads": 14,
    "kv_heads": 2,
}  # more tiles than programs, seven heads to a key's


@pytest.fixture(autouse=True)
def limited():
    """End the process, with what it was doing, if a test takes too long."""
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("the kernels are Hopper's")
    faulthandler.dump_traceback_later(LIMIT, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def on_gpu(a):
    return {name: t.cuda() if torch.is_tensor(t) else t for name, t in a.items()}


def attend(a, backend="hopper"):
    o, lse = tw.attention_lse(**a, backend=backend)
    return o, lse


def digest(*results):
    return hashlib.sha256(b"".join(t.cpu().view(torch.uint8).numpy().tobytes() for t in results)).hexdigest()


def a_hundred_alike(run):
    """Have the same bits, compared where they lie: to copy and hash them on the host takes longer than most runs."""
    first = run()
    for i in range(1, 100):
        for at, (t, wanted) in enumerate(zip(run(), first, strict=True)):
            assert torch.equal(bits(t), bits(wanted)), f"result {at} of run {i}"


def near(o, other, bar=4e-3):
    """Two roundings of one value, to a relative RMS, and NaN in the same places."""
    assert torch.equal(o.isnan(), other.isnan())
    gap = (o.double() - other.double()).nan_to_num(0.0)
    assert gap.square().mean().sqrt() <= bar * max(1e-3, other.double().nan_to_num(0.0).square().mean().sqrt())


@pytest.mark.parametrize("name", CALLS)
def test_kinds(name):
    a = poisoned(call(**CALLS[name]))
    o, lse = attend(on_gpu(a))
    agrees(a, o.cpu(), lse.cpu())
    near(o, attend(on_gpu(a), "portable")[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("D", "V"), WIDTHS)
def test_widths(D, V, dtype):
    """A width is causal in one dtype and has windows in the other, the next one the other way round: a dtype changes nothing in how
    keys are hidden."""
    kinds = ({"causal": True}, {"left": 333, "right": 70, "sink": torch.linspace(-1, 1, 14)})
    a = on_gpu(call(**LONG, D=D, V=V, dtype=dtype, **kinds[(WIDTHS.index((D, V)) + (dtype == torch.float16)) % 2]))
    o, lse = attend(a)
    for b in range(LONG["batch"]):  # the truth of all, in float64, is too much memory beside what other processes have
        agrees({**a, **{n: a[n][b : b + 1] for n in "qkv"}}, o[b : b + 1], lse[b : b + 1])
    near(o, attend(a, "portable")[0])


def test_packed_sequences_are_each_their_own():
    """Many sequences of all lengths in one call, against one call for each."""
    lengths = [1, 500, 64, 0, 129, 128, 1000, 63, 257, 65]
    marks = torch.tensor([0, *lengths]).cumsum(0).int()
    a = on_gpu(call(length=int(marks[-1]), keys=int(marks[-1]), heads=8, kv_heads=2, D=128, causal=True))
    o, lse = attend({**a, "cu_seqlens_q": marks.cuda(), "cu_seqlens_k": marks.cuda()})
    for begin, end in zip(marks[:-1].tolist(), marks[1:].tolist()):
        if end > begin:
            alone_o, alone_lse = attend({**a, **{n: a[n][:, begin:end] for n in "qkv"}})
            assert torch.equal(o[:, begin:end], alone_o) and torch.equal(lse[..., begin:end], alone_lse)


@pytest.mark.parametrize("kind", ["causal", "packed, windows, lengths", "everything"])
def test_a_hundred_runs_have_the_same_bits(kind):
    sizes = LONG if kind == "causal" else {}
    a = on_gpu(poisoned(call(**{**CALLS[kind], **sizes})))
    a_hundred_alike(lambda: attend(a))


@pytest.mark.parametrize("kind", ["causal", "packed"])
def test_a_graph_gives_the_same_bits(kind):
    a = on_gpu(poisoned(call(**CALLS[kind])))
    wanted = digest(*attend(a))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        made = attend(a)
    for _ in range(3):
        for t in made:
            t.fill_(math.inf)
        graph.replay()
        assert digest(*made) == wanted


def test_results_past_what_is_live_are_left_alone():
    """Two neighbours in memory: rows after a sequence are the next one's, and nobody else's are written."""
    a = on_gpu(call(length=200, keys=200, D=128, causal=True))
    marks = torch.tensor([0, 70, 200], dtype=torch.int32).cuda()
    o, _ = attend({**a, "cu_seqlens_q": marks, "cu_seqlens_k": marks})
    ends = torch.tensor([0, 70], dtype=torch.int32).cuda()
    part, _ = attend({**a, "cu_seqlens_q": ends, "cu_seqlens_k": ends})
    assert torch.equal(part[:, :70], o[:, :70]) and (part[:, 70:] == 0.0).all()


def test_gradients_go_through():
    a = on_gpu(call(length=300, keys=300, heads=4, kv_heads=2, D=128, causal=True))
    found = []
    for backend in ("hopper", "portable"):
        leaves = [a[n].detach().clone().requires_grad_() for n in "qkv"]
        o, _ = attend({**a, **dict(zip("qkv", leaves))}, backend)
        found.append(torch.autograd.grad(o.float().square().sum(), leaves))
    for mine, portable in zip(*found):
        near(mine, portable)
