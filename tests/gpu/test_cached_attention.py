"""Attention over caches by the portable kernels on hardware: the same bits in a hundred runs, and with a split the bits of a
sequence in any batch, packed or not."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tests.cached_oracle import call
from tests.gpu.test_attention import a_hundred_alike
from tests.gpu.test_chunks import digest, on_gpu

pytestmark = pytest.mark.gpu
LENGTHS = (3000, 1, 777, 64, 2500)


def in_codes(a):
    """The call with caches of codes that have a scale for each token and head."""
    for name in ("k", "v"):
        cache = a[f"{name}_cache"].float()
        scale = cache.abs().nan_to_num(1.0).amax(-1, keepdim=True) / 448
        a |= {f"{name}_cache": (cache / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale}
    return a


KINDS = {
    "steps": lambda: call(*LENGTHS, length=1, heads=16, kv_heads=4, D=128),
    "small pages": lambda: call(*LENGTHS, length=3, heads=8, kv_heads=2, D=128, page=3, left=1500),
    "codes": lambda: in_codes(call(*LENGTHS, length=2, heads=16, kv_heads=4, D=128)),
}


def attend(a, backend="portable"):
    return tw.cached_attention(**a, backend=backend)


@pytest.mark.parametrize("kind", KINDS)
def test_a_hundred_runs_have_the_same_bits(kind):
    a = on_gpu(KINDS[kind]())
    a_hundred_alike(lambda: attend(a))


@pytest.mark.parametrize("backend", ["portable", "auto"])
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_split_bits_are_a_sequence_s_own(kind, backend):
    a = on_gpu({**KINDS[kind](), "split": 512})
    o, lse = attend(a, backend)
    for b in range(len(LENGTHS)):
        own = {name: a[name][b : b + 1] for name in ("q", "block_table", "kv_len")}
        assert digest(*attend({**a, **own}, backend)) == digest(o[b : b + 1], lse[b : b + 1])


@pytest.mark.parametrize("backend", ["portable", "auto"])
def test_with_a_split_packed_sequences_have_their_own_bits(backend):
    """A chunk, a step and a draft among others, against a batch that holds one of them."""
    marks = torch.tensor([0, 150, 151, 155, 155, 219], dtype=torch.int32)
    a = on_gpu(call(*LENGTHS, length=219, heads=8, kv_heads=2, D=128, cu_seqlens_q=marks, split=512))
    o, lse = attend(a, backend)
    for b, (begin, end) in enumerate(zip(marks[:-1].tolist(), marks[1:].tolist())):
        own = {name: a[name][b : b + 1] for name in ("block_table", "kv_len")}
        whole = torch.tensor([0, end - begin], dtype=torch.int32, device="cuda")
        alone = attend({**a, **own, "q": a["q"][:, begin:end], "cu_seqlens_q": whole}, backend)
        assert digest(*alone) == digest(o[:, begin:end].contiguous(), lse[..., begin:end].contiguous())
