"""Models of transformers by their own code, patched, and patched with FP8 products, from the same weights and data: one step gives
the same gradients, and over 1,000 steps of a small Llama on text the loss curves are one."""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tilewright.bench import models
from tilewright.bench.cases import CASES
from tilewright.bench.timing import Cuda

transformers = pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
pytestmark = pytest.mark.gpu

STEPS, EVERY = 1000, 50
BATCH, LENGTH = 16, 128
RATE = 6e-4
# Of the mean loss of 50 steps, in any of them. Runs that differ in their roundings alone part by how soon each learns a thing, so
# most where the curve is steep
PATCHED, FP8 = 1e-2, 2e-2
SIZES = {  # every projection is large enough for FP8
    "hidden_size": 1024, "intermediate_size": 2048, "num_hidden_layers": 2, "num_attention_heads": 8,
    "num_key_value_heads": 8, "vocab_size": 256, "max_position_embeddings": LENGTH, "tie_word_embeddings": True,
}  # fmt: skip


@pytest.mark.parametrize("name", [case.name for case in CASES.values() if case.direction == "train"])
def test_a_patched_model_takes_the_same_step(name, monkeypatch):
    """The models of the benchmark with fewer layers and tokens, by its own bars."""
    monkeypatch.setattr(models, "READINGS", 1)
    case = CASES[name]
    small = replace(case, dims={"batch": 2, "length": 256}, options={**case.options, "num_hidden_layers": 2})
    found = {v: {**models.measure(small, v, "cuda", Cuda()), "status": "ok"} for v in ("plain", "bf16", "fp8")}
    for variant, reply in found.items():
        step = models.judged(variant, reply, found["plain"])
        assert "failed" not in step and step["bytes"] > 0, (variant, step)


def text() -> Tensor:
    """Bytes that every machine with Python has, in one order: the sources of its standard library."""
    wanted = STEPS * BATCH * LENGTH
    held = bytearray()
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        held += path.read_bytes()
        if len(held) >= wanted:
            break
    data = torch.frombuffer(held, dtype=torch.uint8)
    return data.repeat(-(-wanted // len(data)))[:wanted]


def batches(device: str) -> Tensor:
    """[steps, batch, length] ids, sequences in a random order."""
    sequences = text().view(-1, LENGTH)
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(7))
    return sequences[order].view(STEPS, BATCH, LENGTH).to(device, torch.int64)


def curve(data: Tensor, **patched: bool) -> tuple[list[float], dict[str, int]]:
    """The mean loss of each `EVERY` steps, and how often each op was called; no `patched`, no patch."""
    torch.manual_seed(0)
    with torch.device(data.device):
        make = transformers.AutoModelForCausalLM.from_config
        model = make(transformers.LlamaConfig(**SIZES), dtype=torch.bfloat16, attn_implementation="sdpa")
    model.to(data.device).train()
    report = tw.patch(model, **patched) if patched else None
    optimiser = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0, fused=data.is_cuda)
    losses = []
    for at, ids in enumerate(data):
        for group in optimiser.param_groups:
            group["lr"] = RATE * min(1.0, (at + 1) / 100) * (1 - 0.9 * at / len(data))
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    means = torch.stack(losses).float().cpu().unflatten(0, (-1, min(EVERY, len(data)))).mean(1)
    return means.tolist(), {} if report is None else report.calls()


def apart(found: list[float], wanted: list[float]) -> float:
    return max(abs(f / w - 1) for f, w in zip(found, wanted, strict=True))


def test_a_patched_llama_learns_as_its_own_code_does():
    data = batches("cuda")
    plain, _ = curve(data)
    bf16, _ = curve(data, fp8=False)
    fp8, calls = curve(data, fp8=True)
    found = {"steps": STEPS, "every": EVERY, "plain": plain, "bf16": bf16, "fp8": fp8, "calls": calls}
    found |= {"bf16_apart": apart(bf16, plain), "fp8_apart": apart(fp8, bf16)}
    if "OUT" in os.environ:
        (Path(os.environ["OUT"]) / "huggingface_curve.json").write_text(json.dumps(found))
    assert calls.get("linear_fp8") == STEPS * 2 * 6 and calls.get("glu_linear_fp8") == STEPS * 2, calls
    assert plain[-1] < 0.7 * plain[0], f"the model's own code did not learn: {plain}"
    assert found["bf16_apart"] < PATCHED, found
    assert found["fp8_apart"] < FP8, found
