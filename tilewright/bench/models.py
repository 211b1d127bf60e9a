"""Training steps of whole models of transformers: its own code, torch.compile, liger-kernel, ours in bf16 and in FP8.

Each variant runs in a process of its own, on the same weights and data: forward and backward, no optimiser. Its first step is
held against that of transformers' own code, by the loss, the norm of the gradient and a sample of every parameter's gradient; a
variant that fails, differs or takes too long gets no time, and the row says why.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import tilewright as tw

from ..check import guarded
from .cases import CASES, Case, own_of, variants_of
from .directed import Absent
from .evidence import Row
from .rivals import missing
from .run import about, valued
from .timing import Cuda, Device

COMMAND = (sys.executable, "-m", "tilewright.bench.models")
WARM, STEPS, READINGS = 3, 8, 2
SHARE = 3  # no variant but the last may take more than this part of a case's time
SAMPLE = 256  # elements of each parameter's gradient
TRACE = 1500  # characters that are shown of one
PLAIN = "plain"
OPTIONS = ("config", "attention", "fp8")  # of a case, that are not a configuration's: the others are
SEARCH = "LIGER_FUSED_MOE_AUTOTUNE"


class Bars(NamedTuple):
    """How far a step may be off that of transformers' own code, relative.

    `gradient` is of a parameter's sample, RMS over parameters. Every rounding to bf16 is off by 1.1e-3 RMS, and some 20 of them a
    layer, forward and backward, lie between a loss and the first layer's gradient: 2e-2 at 16 layers, in each of the two
    that are compared. A product of e4m3 codes is off by 3.7e-2, seven to a layer, which the residual stream dilutes. Where two
    experts are nearly as good, another one is chosen. Narrow models of as many layers on a CPU were off by 1.8e-2 and, with
    experts, 5.3e-2 in bf16, 0.14 and 0.23 in FP8; by 4e-5 and 9e-4 in the loss; a missing gradient is off by 1.
    """

    loss: float
    norm: float
    gradient: float


BARS = {"fp8": Bars(5e-3, 5e-2, 0.5)}
BF16 = Bars(1e-3, 2e-2, 0.15)  # of all others


# ------------------------------------------------------------------------------------------------------------- variants


Variant = Callable[[nn.Module, Case], Callable[..., Any]]


def _compiled(model: nn.Module, case: Case) -> Callable[..., Any]:
    return torch.compile(model, dynamic=False)


def _liger(model: nn.Module, case: Case) -> Callable[..., Any]:
    why = missing("liger")
    if why is not None:
        raise Absent(why)
    # Untold, its experts search 200 configurations at the first call, which takes minutes
    os.environ.setdefault(SEARCH, "0")
    from liger_kernel.transformers.monkey_patch import MODEL_TYPE_TO_APPLY_LIGER_FN, _apply_liger_kernel_to_instance

    if model.config.model_type not in MODEL_TYPE_TO_APPLY_LIGER_FN:  # it would leave the model as it is and say nothing
        raise Absent(f"liger has nothing for {model.config.model_type}")
    _apply_liger_kernel_to_instance(model=model)
    return model


def _patched(fp8: bool) -> Variant:
    def patched(model: nn.Module, case: Case) -> Callable[..., Any]:
        tw.patch(model, fp8=fp8, attention=case.options.get("attention", False))
        return model

    return patched


# In the order in which they run: what the others are held against, ours, and last what takes longest to start
VARIANTS: dict[str, Variant] = {
    PLAIN: lambda model, case: model,
    "bf16": _patched(fp8=False),
    "fp8": _patched(fp8=True),
    "liger": _liger,
    "compile": _compiled,
}
RIVALS = (PLAIN, "compile", "liger")


# --------------------------------------------------------------------------------------------------------------- worker


def build(case: Case, device: str) -> tuple[nn.Module, Tensor]:
    """The model, with random weights made where they stay, and token ids: the same in every process."""
    import transformers

    sizes = {name: value for name, value in case.options.items() if name not in OPTIONS}
    config = getattr(transformers, case.options["config"])(**sizes)
    torch.manual_seed(0)
    with torch.device(device):
        make = transformers.AutoModelForCausalLM.from_config
        model = make(config, dtype=torch.bfloat16, attn_implementation="sdpa")
    shape, source = (case.dims["batch"], case.dims["length"]), torch.Generator().manual_seed(1)
    return model.train().to(device), torch.randint(config.vocab_size, shape, generator=source).to(device)


def measure(case: Case, variant: str, device: str, clock: Device) -> Row:
    """One variant of a case in this process: what its first step gave, microseconds and peak memory of a later one."""
    model, ids = build(case, device)
    call = VARIANTS[variant](model, case)
    weights = list(model.parameters())

    def step() -> Tensor:
        loss = call(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss.detach()

    def between() -> None:
        model.zero_grad(set_to_none=True)
        with torch.no_grad():
            # As after an optimiser's step: FP8 codes of a weight are not those of the step before
            torch._foreach_mul_(weights, 1.0)

    result = outcome(step(), model)
    for _ in range(WARM - 1):
        between()
        step()
    if device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    us = min(reading(step, between, clock) for _ in range(READINGS))
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    result |= {"us": us, "bytes": peak}
    if variant == "liger" and "num_experts" in case.options and os.environ[SEARCH] == "0":
        result["note"] = f"{SEARCH}=0: its experts run without a search for the best configuration"
    return result


def outcome(loss: Tensor, model: nn.Module) -> Row:
    """A step in numbers: the loss, the norm of the whole gradient, and `SAMPLE` elements of each parameter's."""
    grads = {name: p.grad for name, p in model.named_parameters()}
    without = [name for name, grad in grads.items() if grad is None]
    if without:
        raise RuntimeError(f"{len(without)} of {len(grads)} parameters have no gradient: {without[0]}")
    norm = torch.stack([torch.linalg.vector_norm(g, dtype=torch.float32) for g in grads.values()]).norm()
    sample = {name: g.flatten()[:: max(1, g.numel() // SAMPLE)][:SAMPLE].tolist() for name, g in grads.items()}
    return {"loss": loss.item(), "norm": norm.item(), "sample": sample}


def reading(step: Callable[[], Any], between: Callable[[], None], clock: Device, steps: int = STEPS) -> float:
    """Microseconds a step, median; `between` stands outside the time."""
    marks = []
    for _ in range(steps):
        between()
        start = clock.mark()
        step()
        marks.append((start, clock.mark()))
    clock.synchronize()
    return statistics.median(clock.elapsed_us(*pair) for pair in marks)


class Host:
    """The few operations of a `timing.Device` that a reading takes, for a machine without a GPU."""

    def mark(self) -> float:
        return time.perf_counter() * 1e6

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def synchronize(self) -> None:
        pass


TINY = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "vocab_size": 256, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
}  # fmt: skip


def tiny(case: Case) -> Case:
    """The same model in small, too small for products in FP8, which a CPU can take a step of."""
    options = {name: TINY.get(name, value) for name, value in case.options.items()}
    return replace(case, dims={"batch": 2, "length": 16}, options=options)


def packages() -> dict[str, str]:
    """The versions of the packages that are compared, beside torch and Triton."""
    found = {}
    for name in ("transformers", "liger_kernel"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue  # carried as a folder
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Answer requests for variants of cases, one line of JSON each.")
    parser.add_argument(
        "--tiny", action="store_true", help="small models on the CPU, which show only that all of it runs"
    )
    parser.add_argument("replies", type=int, help="the file descriptor that answers go to")
    asked = parser.parse_args(arguments)
    status = guarded.READY
    if not asked.tiny and not torch.cuda.is_available():
        status = "no CUDA device: a bench needs a GPU (`tilewright doctor` says what is missing)"

    def answer(request: str) -> Row:
        try:
            import transformers  # noqa: F401
        except ImportError as error:  # of these cases alone: ops are measured all the same
            raise Absent(f"transformers cannot be imported: {error}") from None
        wanted = json.loads(request)
        case = CASES[wanted["case"]]
        if asked.tiny:
            return measure(tiny(case), wanted["variant"], "cpu", Host())
        row = measure(case, wanted["variant"], "cuda", Cuda())
        return {**row, "about": {**about(case), "packages": packages()}} if wanted["variant"] == own_of(case) else row

    with os.fdopen(asked.replies, "w") as replies:
        guarded.serve(answer, (Absent,), sys.stdin, replies, status)


# ----------------------------------------------------------------------------------------------------------- supervisor


def errors(found: Mapping[str, Any], truth: Mapping[str, Any]) -> Bars:
    """How far a step is off another, by what the bars limit."""
    squares = []
    for name, wanted in truth["sample"].items():
        size = math.fsum(w * w for w in wanted)
        if size > 0.0:  # of an embedding no token of the sample may have been drawn
            squares.append(math.fsum((g - w) ** 2 for g, w in zip(found["sample"][name], wanted, strict=True)) / size)
    loss, norm = (abs(found[name] / truth[name] - 1) for name in ("loss", "norm"))
    return Bars(loss, norm, math.sqrt(statistics.fmean(squares)))


def judged(variant: str, reply: Row, truth: Row | None) -> Row:
    """What the row says of a variant: its time and memory if its step was right, else why there are none."""
    if reply["status"] != "ok":
        # Of a lost process not what it wrote last, which is of that machine
        return {"failed": reply["why"].partition(": ")[0] if reply["status"] == "lost" else reply["why"]}
    if truth is None or truth["status"] != "ok":
        return {"failed": f"there is no step of {PLAIN} to hold it against"}
    off, bars = errors(reply, truth), BARS.get(variant, BF16)
    for name, value, bar in zip(Bars._fields, off, bars):
        if not value <= bar:
            return {"failed": f"its {name} is off by {value:.2e}, more than {bar:g}"}
    kept = {name: reply[name] for name in ("us", "bytes", "loss", "norm", "note") if name in reply}
    return {**kept, "error": off.gradient}


def replies(case: Case, limit: float, command: Sequence[str]) -> Iterator[tuple[str, Row]]:
    """Each variant's reply. All processes start at once, since most of a start is imports, and work one after another."""
    end = time.monotonic() + limit
    wanted = variants_of(case)
    waiting = {variant: guarded.Worker(command) for variant in VARIANTS if variant in wanted}
    try:
        for worker in waiting.values():
            worker.expect_ready(guarded.START_LIMIT)
        while waiting:
            variant = next(iter(waiting))
            start = time.monotonic()
            left = max(0.0, end - start)
            try:
                request = json.dumps({"case": case.name, "variant": variant})
                reply = waiting[variant].ask(request, left if len(waiting) == 1 else min(left, limit / SHARE))
            except guarded.Lost as lost:
                reply = {"status": "lost", "why": str(lost)}
            waiting.pop(variant).close()  # and with it its memory
            yield variant, {**reply, "wall_s": round(time.monotonic() - start, 1)}
    finally:
        for worker in waiting.values():
            worker.close()


def compare(case: Case, limit: float, command: Sequence[str], say: Callable[[str], None]) -> Row:
    """A case's row."""
    start, own, truth, ours, steps = time.monotonic(), own_of(case), None, {}, {}
    for variant, reply in replies(case, limit, command):
        truth = reply if variant == PLAIN else truth
        ours = reply if variant == own else ours
        steps[variant] = judged(variant, reply, truth)
        say(f"{case.name} {variant}: {words(steps[variant])} ({reply['wall_s']:g} s)")
        if reply["status"] == "lost" and reply["why"] != steps[variant]["failed"]:
            say(reply["why"])
        if "trace" in reply:
            say(reply["trace"][-TRACE:])
    wall = {"case": case.name, "wall_s": round(time.monotonic() - start, 1)}
    if "failed" in steps[own]:
        status = "wrong" if ours["status"] == "ok" else ours["status"]
        return {**wall, "status": status, "why": f"{own}: {steps[own]['failed']}", "steps": steps}
    us = steps[own]["us"]
    rivals = {name: steps[name]["us"] for name in RIVALS if "us" in steps.get(name, {})}
    row = {
        **wall, **ours.get("about", {}), "status": "ok", "us": us, "floor_us": None, "fraction": None, "host_us": None,
        "rivals": rivals, "error": steps[own]["error"], "method": "events",
        "bytes": [], "extra_bytes": None, "steps": steps,
        "absent": {name: step["failed"] for name, step in steps.items() if "failed" in step},
    }  # fmt: skip
    return valued(case, row)


def words(step: Mapping[str, Any]) -> str:
    """A variant's step for a reader: its numbers, or why there are none."""
    return step.get("failed") or f"{step['us'] / 1e3:.1f} ms, {step['bytes'] / 1e9:.1f} GB, off by {step['error']:.1e}"


def supervise(
    cases: Iterable[Case], limit: float, say: Callable[[str], None] = print, command: Sequence[str] = COMMAND
) -> Iterator[Row]:
    """A row for each case, of which none takes much longer than `limit` seconds. Raises `guarded.NoWorker`."""
    for case in cases:
        yield compare(case, limit, command, say)


if __name__ == "__main__":
    main()
