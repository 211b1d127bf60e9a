"""One training step of a tiny model through Triton's interpreter, in a process of its own: TRITON_INTERPRET=1 python -m
tilewright.demo.step SEED.

Every kernel really runs, each launch is counted, and loss and gradients are compared with plain PyTorch's.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from functools import partial

import torch

import tilewright as tw

from . import train
from .model import OURS, PLAIN, Sizes

TINY = Sizes(hidden=32, layers=1, heads=2, experts=4, expert_hidden=16, length=16, batch=2)


def step(seed: int) -> dict:
    """What was launched, the losses before and after the step, and how far they and the gradients are from plain torch's."""
    launches: Counter[str] = Counter()
    for name, kernel in train.kernels().items():
        if hasattr(kernel.jit, "add_pre_run_hook"):  # a Gluon kernel has none and is not interpreted either
            kernel.jit.add_pre_run_hook(partial(_count, launches, name))
    (text,) = train.batches(TINY, 1, seed)
    plain = train.build(PLAIN, TINY, seed)
    want = plain(text)
    want.backward()
    network = train.build(OURS, TINY, seed)
    optimizer = torch.optim.AdamW(network.parameters(), lr=1e-2)
    with tw.force("triton"):
        loss = network(text)
        loss.backward()
        pairs = [(a.grad, b.grad) for a, b in zip(network.parameters(), plain.parameters())]
        apart = torch.stack([(a - b).norm() / b.norm() for a, b in pairs]).max().item()  # NaN if one is
        optimizer.step()
        with torch.no_grad():
            after = network(text)
    return {
        "launches": dict(sorted(launches.items())),
        "loss": loss.item(),
        "loss_after": after.item(),
        "loss_error": abs(loss.item() - want.item()),
        "gradient_error": apart,
    }


def _count(launches: Counter[str], name: str, *args, **kwargs) -> None:
    launches[name] += 1


if __name__ == "__main__":
    print(json.dumps(step(int(sys.argv[1]))))
