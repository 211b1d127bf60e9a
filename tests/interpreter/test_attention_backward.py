"""Attention's backward for Hopper, its Gluon kernel played in torch and everything around it run by the interpreter: against the
reference in float64, with NaN in everything that nobody sees and that sees nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.attention_model import play_backward
from tilewright.attention.attention import reference_lse
from tilewright.attention.hopper import backward as hopper
from tilewright.check.oracle import rms
from tilewright.core.target import TARGETS, pretend

HOPPER = replace(TARGETS["sm_90"], gluon=True)
OPTIONS = dict.fromkeys(
    ("scale", "left", "right", "sink", "slopes", "mask", "kv_len", "cu_seqlens_q", "cu_seqlens_k")
) | {"causal": False, "softcap": 0.0}
MARKS = {"cu_seqlens_q": torch.tensor([3, 70, 70, 203]), "cu_seqlens_k": torch.tensor([0, 150, 160, 330])}
CASES = {
    "causal": (64, 64, 200, 200, {"causal": True}),
    "full": (128, 128, 130, 300, {}),
    "fewer keys": (128, 128, 200, 90, {"causal": True}),
    "window": (96, 96, 150, 290, {"left": 40, "right": 9}),
    "latent": (192, 128, 130, 140, {"causal": True, "softcap": 5.0}),
    "wide values": (64, 128, 100, 190, {"causal": True}),
    "narrow": (72, 40, 70, 70, {"scale": 0.3}),
    "slopes": (64, 64, 140, 150, {"causal": True, "slopes": torch.tensor([0.1, 0.02, 0.05, 0.3])}),
    "sink": (128, 128, 66, 130, {"left": 64, "causal": True, "sink": torch.tensor([0.5, -1.0, 2.0, -math.inf])}),
    "lengths": (128, 128, 100, 300, {"causal": True, "kv_len": torch.tensor([170, 0])}),
    "packed": (128, 128, 210, 333, {"causal": True, **MARKS}),
    "packed window": (64, 64, 210, 333, {"left": 30, "softcap": 2.0, **MARKS}),
    "packed lengths": (64, 64, 210, 333, {"causal": True, "kv_len": torch.tensor([140, 4, 99]), **MARKS}),
}  # fmt: skip


def drawn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).bfloat16()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("through_lse", [False, True])
def test_against_the_reference(name, through_lse, monkeypatch):
    D, V, n, m, given = CASES[name]
    options = OPTIONS | given
    batch = 1 if options["cu_seqlens_q"] is not None else 2
    q, k, v = drawn(batch, n, 4, D, seed=0), drawn(batch, m, 2, D, seed=1), drawn(batch, m, 2, V, seed=2)
    do, dlse = drawn(batch, n, 4, V, seed=3), drawn(batch, 4, n, seed=4).float()
    sink = options["sink"]
    exact = [t.double().requires_grad_() for t in (q, k, v)]
    if sink is not None:
        exact.append(sink.double().requires_grad_())
        options["sink"] = exact[-1]
    o, lse = reference_lse(*exact[:3], **options)
    alive = lse.detach() > -math.inf
    total = (o * do.double()).sum() + ((lse * dlse.double())[alive].sum() if through_lse else 0.0)
    wanted = torch.autograd.grad(total, exact)
    # What has no gradient is not seen by anybody: it may hold anything
    options["sink"] = sink
    for t, d in zip((k, v), wanted[1:3]):
        t[(wanted[1] == 0).all(-1) & (wanted[2] == 0).all(-1)] = math.nan
        assert d.isfinite().all()
    if sink is None:
        for t in (q, do):
            t[(~alive).all(1)] = math.nan
    needs = {"q", "k", "v"} | ({"sink"} if sink is not None else set())
    saved = SimpleNamespace(
        q=q, k=k, v=v, o=o.detach().bfloat16(), lse=lse.detach().float().contiguous(), needs=needs, backend="hopper", **options
    )  # fmt: skip
    monkeypatch.setattr(hopper, "attention_backward_hopper", play_backward)
    with pretend(HOPPER):
        assert hopper.fits_backward(HOPPER, saved)
        found = hopper.backward(saved, do, dlse if through_lse else None)
    for label, one, other in zip(("q", "k", "v", "sink"), found, wanted):
        assert one.isfinite().all(), label
        error = rms(one.double() - other) / max(rms(other), 1e-9)
        assert error <= 4e-3, f"d{label}: relative RMS error {error:.2e}"
