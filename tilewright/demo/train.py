"""Training runs of the demonstration and how far their curves part.

Every run starts from the same parameters and sees the same text in the same order. The optimiser's parameters are fp32; the
model has them rounded to its dtype. Two runs agree if the moving means of their losses never differ by more than a tolerance: a
small one in the first steps, where a wrong op shows before rounding has had time to grow, and a larger one in all.
"""

from __future__ import annotations

import contextlib
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

import tilewright as tw

from ..runtime.kernel import Kernel
from .model import FP8, OURS, PARTS, PLAIN, LanguageModel, Sizes

TEXT = Path(__file__).parent.parent / "data" / "demo.txt"
WINDOW = 10  # steps of the moving mean: one step's loss jumps by 0.1 with the text it drew
EARLY = 20  # steps in which rounding has not yet grown
RISE = 20  # steps, a fifth at most, in which the learning rate rises: a jump at first is where rounding parts curves
WARM = 3  # steps left out of the step time: kernels are compiled and memory is taken in them


class Apart(NamedTuple):
    """How far two curves part, or may: in the first EARLY steps and in all."""

    early: float
    whole: float


@dataclass(frozen=True)
class Setting:
    """What is trained on a kind of machine, and how far each of the other curves may part from plain PyTorch's there."""

    sizes: Sizes
    dtype: torch.dtype
    steps: int
    rate: float
    tolerances: Mapping[str, Apart]


# Curves part by rounding alone, for the choice of an expert is discrete and each step builds on the last. Measured November
# 2026, in the first 20 steps and in all: on a CPU in fp32 5e-7, then 1e-6 to 0.002 after 150 steps; on an H200 in bf16 0.001, then
# 0.003 after 100, with FP8 products 0.007 and 0.014. A rate of 6e-4 that rose in 10 steps jumped in the first steps, and
# curves parted by 0.07 there and by 0.15 after 200.
CPU = Setting(
    Sizes(hidden=128, layers=2, heads=4, experts=8, expert_hidden=128, length=64, batch=8),
    torch.float32, steps=150, rate=3e-3, tolerances={OURS: Apart(0.001, 0.05)},
)  # fmt: skip
GPU = Setting(
    Sizes(hidden=1024, layers=4, heads=8, experts=8, expert_hidden=1024, length=512, batch=64),
    torch.bfloat16, steps=100, rate=2e-4,
    tolerances={OURS: Apart(0.01, 0.05), FP8: Apart(0.03, 0.08)},
)  # fmt: skip


@dataclass
class Run:
    """What one training run gave."""

    name: str
    losses: list[float] = field(default_factory=list)
    step_ms: float = 0.0
    peak_bytes: int | None = None  # on a GPU what torch had allocated, else the process


def train(
    name: str,
    setting: Setting,
    *,
    steps: int,
    seed: int,
    device: torch.device,
    done: Callable[[float], None] = lambda loss: None,
) -> Run:
    """One run of the model of these parts; `done` is told the loss of each step."""
    run, clip = Run(name), PARTS[name].clip_grad_norm_
    network = build(name, setting.sizes, seed).to(device)
    masters = [nn.Parameter(p.detach().clone()) for p in network.parameters()]
    weights = [*network.to(setting.dtype).parameters()]
    optimizer = torch.optim.AdamW(
        masters, lr=setting.rate, betas=(0.9, 0.95), weight_decay=0.1, fused=device.type == "cuda"
    )
    reset_peak(device)
    took, rise = [], max(1, min(RISE, steps // 5))
    for step, text in enumerate(batches(setting.sizes, steps, seed)):
        text = text.to(device)
        start = now(device)
        for group in optimizer.param_groups:
            group["lr"] = setting.rate * min(1.0, (step + 1) / rise) * 0.5 * (1 + math.cos(math.pi * step / steps))
        loss = network(text)
        loss.backward()
        for master, weight in zip(masters, weights):
            master.grad, weight.grad = weight.grad.float(), None
        clip(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, weight in zip(masters, weights):
                weight.copy_(master)
        took.append(now(device) - start)
        run.losses.append(loss.item())
        done(run.losses[-1])
    run.step_ms = 1e3 * statistics.median(took[WARM:] or took)
    run.peak_bytes = peak(device)
    return run


def build(name: str, sizes: Sizes, seed: int) -> LanguageModel:
    """The model of these parts with the fp32 parameters that a seed gives, the same for all."""
    torch.manual_seed(seed)
    first = LanguageModel(sizes, PARTS[PLAIN])
    network = LanguageModel(sizes, PARTS[name])
    network.load_state_dict(first.state_dict())
    return network


def batches(sizes: Sizes, steps: int, seed: int) -> Iterator[Tensor]:
    """The text of each step, [batch, length + 1]: pieces from anywhere, the same for the same seed."""
    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    pieces = text.unfold(0, sizes.length + 1, 1)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        yield pieces[torch.randint(len(pieces), (sizes.batch,), generator=draw)]


def kernels() -> dict[str, Kernel]:
    """Every kernel of the library by name."""
    tw.catalogue()
    loaded = [module for name, module in list(sys.modules.items()) if name.startswith(tw.__name__ + ".")]
    return {value.name: value for module in loaded for value in vars(module).values() if isinstance(value, Kernel)}


def smooth(losses: list[float], window: int = WINDOW) -> list[float]:
    """The mean of each step's loss and those up to `window - 1` steps before it."""
    return [statistics.fmean(losses[max(0, i + 1 - window) : i + 1]) for i in range(len(losses))]


def parting(a: Run, b: Run) -> Apart:
    """How far two curves part at most; infinitely if a loss is not finite."""
    if not all(map(math.isfinite, a.losses + b.losses)):
        return Apart(math.inf, math.inf)
    apart = [abs(x - y) for x, y in zip(smooth(a.losses), smooth(b.losses), strict=True)]
    return Apart(max(apart[:EARLY]), max(apart))


def now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def reset_peak(device: torch.device) -> None:
    """Forget the peak so far; a process's own can be reset on Linux alone, and stays the maximum elsewhere."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak(device: torch.device) -> int | None:
    """Bytes at the peak: what torch allocated on a GPU, else what the process held; None where nothing tells."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM")), None)
