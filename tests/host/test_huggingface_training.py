"""Patched models in the hands of others: transformers' trainer, accelerate, PEFT, and FSDP2 on two ranks."""

from __future__ import annotations

import importlib.util
import logging
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.fsdp import fully_shard

pytest.importorskip("transformers", reason="transformers is not installed: pip install transformers")
import transformers

from tests.transformer_models import FP32, IDS, LABELS, build, error, step
from tilewright.integrations.huggingface import linear
from tilewright.integrations.huggingface.patching import patch, unpatch
from tilewright.integrations.huggingface.report import changed


def without(name: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        importlib.util.find_spec(name) is None, reason=f"{name} is not installed: pip install {name}"
    )


def examples() -> list[dict[str, torch.Tensor]]:
    """With different numbers of labels, so that a mean over micro-batches is not the mean over the batch."""
    ids = torch.randint(3, 96, (8, 9), generator=torch.Generator().manual_seed(3))
    hidden = torch.arange(9) < 2 * (torch.arange(8)[:, None] % 4)
    return [{"input_ids": i, "labels": i.masked_fill(h, -100)} for i, h in zip(ids, hidden)]


def trainer(family: str, folder: Path, steps: int, **more: object) -> transformers.Trainer:
    given = transformers.TrainingArguments(
        str(folder), max_steps=steps, gradient_accumulation_steps=2, per_device_train_batch_size=2, learning_rate=0.05,
        optim="sgd", use_cpu=True, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        bf16=more.pop("bf16", False),
    )  # fmt: skip
    return transformers.Trainer(build(family), given, train_dataset=examples(), **more)


def losses_of(made: transformers.Trainer) -> list[float]:
    made.train()
    return [row["loss"] for row in made.state.log_history if "loss" in row]


@without("accelerate")
@pytest.mark.parametrize(("family", "steps"), [("Llama", 20), ("Qwen3Moe", 5)])
def test_a_trainer_goes_the_same_way(family, steps, tmp_path, caplog):
    from tilewright.integrations.huggingface.trainer import PatchCallback

    expected = losses_of(trainer(family, tmp_path, steps))
    callback = PatchCallback()
    with caplog.at_level(logging.INFO, "tilewright"):
        made = trainer(family, tmp_path, steps, callbacks=[callback])
        found = losses_of(made)
    assert len(found) == steps and found == pytest.approx(expected, rel=2e-5) and expected[-1] < expected[0]
    calls = callback.report.calls()
    assert calls["linear_cross_entropy"] == 2 * steps and calls["rms_norm"] + calls["add_rms_norm"] >= 2 * steps * 5
    assert not [m for m in made.model.modules() if changed(m)]
    assert "rotary: 2 by rope" in caplog.text and f"'linear_cross_entropy': {2 * steps}" in caplog.text


@without("accelerate")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_a_trainer_in_mixed_precision_trains_again(tmp_path, caplog):
    """Accelerate's wrapper stays over the model's forward from the first training on."""
    from tilewright.integrations.huggingface.trainer import PatchCallback

    callback = PatchCallback()
    made = trainer("Llama", tmp_path, 2, callbacks=[callback], bf16=True)
    for _ in range(2):
        made.train()
        assert callback.report.calls()["linear_cross_entropy"] == 4 and not callback.report.changes
        assert [m for m in made.model.modules() if changed(m)] == [made.model]
        assert made.model.train()(IDS, labels=LABELS).logits is not None
    callback.on_train_begin(made.args, made.state, made.control, model=made.model)
    made.model.lm_head.forward = lambda *given, **named: None
    with caplog.at_level(logging.WARNING, "tilewright"):
        callback.on_train_end(made.args, made.state, made.control)
    assert (
        "no op of the patch was called" in caplog.text and "stays patched: unpatch: forward of a Linear" in caplog.text
    )
    late = PatchCallback()
    made = trainer("Llama", tmp_path, 1)
    made.add_callback(late)
    with pytest.raises(ValueError, match="PatchCallback: must be among the callbacks"):
        made.train()
    again = transformers.Trainer(
        args=made.args, model_init=lambda: build("Llama"), train_dataset=examples(), callbacks=[PatchCallback()]
    )
    with pytest.raises(ValueError, match="PatchCallback: the trainer made another model since"):
        again.train()


@without("accelerate")
@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision):
    import accelerate

    accelerate.state.AcceleratorState._reset_state(True)  # as trainers do: a process has one precision else
    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)

    def losses(model: nn.Module) -> list[float]:
        model, optimiser = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.05))
        items, found = (LABELS[:, 1:] != -100).sum(), []
        for at in [0, 1] * 3:
            with accelerator.accumulate(model):
                batch = {"input_ids": IDS[at : at + 1], "labels": LABELS[at : at + 1]}
                loss = model(**batch, num_items_in_batch=items).loss
                accelerator.backward(loss)
                optimiser.step()
                optimiser.zero_grad()
            found.append(loss.item())
        return found

    model = build("Llama")
    report = patch(model)
    bar = 2e-3 if precision == "bf16" else 2e-5
    assert losses(model) == pytest.approx(losses(build("Llama")), rel=bar)
    assert report.calls()["linear_cross_entropy"] == 6
    bare = accelerator.unwrap_model(model, keep_fp32_wrapper=False)
    assert bare.train()(IDS, labels=LABELS).logits is None  # what accelerate takes off is its own
    unpatch(bare)
    assert bare(IDS, labels=LABELS).logits is not None


@without("peft")
def test_low_rank_adapters():
    import peft

    def adapted(model: nn.Module, *names: str) -> nn.Module:
        torch.manual_seed(1)
        config = peft.LoraConfig(r=2, target_modules=[*names], init_lora_weights=False, task_type="CAUSAL_LM")
        return peft.get_peft_model(model, config).train()

    names = "q_proj", "o_proj", "gate_proj", "down_proj"
    before, grads = step(adapted(build("Llama"), *names))
    first = build("Llama")
    ahead = patch(first)
    model = adapted(build("Llama"), *names)
    for patched, report in ((adapted(first, *names), ahead), (model, patch(model))):
        after, again = step(patched)
        assert len(grads) == 16 and error(again, grads) < FP32 and torch.allclose(after.loss, before.loss, rtol=FP32)
        assert report.calls() == {"rms_norm": 3, "add_rms_norm": 2, "rope": 2, "glu": 2, "linear_cross_entropy": 1}
        unpatch(patched)
        assert torch.equal(step(patched)[0].loss, before.loss)
    report = patch(adapted(build("Llama"), "lm_head"))
    assert [(s.role, s.module) for s in report.skipped] == [("loss", "base_model.model")]
    first = build("Llama")
    patch(first)
    with pytest.raises(ValueError, match="the head became a Linear after the patch: unpatch, and patch again"):
        step(adapted(first, "lm_head"))


@without("peft")
def test_adapters_are_merged_into_layers_in_fp8(monkeypatch):
    import peft

    monkeypatch.setattr(linear, "LEAST", 128)
    torch.manual_seed(1)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "o_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(
        build("Llama", hidden_size=128, intermediate_size=128, num_hidden_layers=1), config
    ).eval()
    patch(model, fp8=True)
    with torch.no_grad():
        with model.disable_adapter():
            base = model(IDS).logits
        adapted = model(IDS).logits
        model.merge_adapter()
        merged = model(IDS).logits
        model.unmerge_adapter()
        again = model(IDS).logits
    size = (adapted - base).norm()
    assert (merged - adapted).norm() < 0.5 * size < 0.5 * (merged - base).norm() + size
    assert (again - adapted).norm() < 0.2 * size


# ---- two ranks ------------------------------------------------------------------------------------------------------------

SIZES = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_key_value_heads": 4}


def sharded(model: nn.Module) -> nn.Module:
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def losses_on(model: nn.Module, rank: int | None) -> torch.Tensor:
    """Of a few steps, the mean over ranks. Both sequences have as many labels."""
    optimiser, found = torch.optim.SGD(model.parameters(), lr=0.05), []
    own = slice(None) if rank is None else slice(rank, rank + 1)
    for _ in range(3):
        optimiser.zero_grad()
        loss = model(input_ids=IDS[own], labels=LABELS[own]).loss
        loss.backward()
        optimiser.step()
        found.append(loss.detach())
    found = torch.stack(found)
    if rank is not None:
        dist.all_reduce(found)
        found /= dist.get_world_size()
    return found


def on_two_ranks(rank: int, file: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2, timeout=timedelta(minutes=2))
    try:
        for fp8 in (False, True):
            alone = build("Llama", **SIZES)
            patch(alone, fp8=fp8)
            expected = losses_on(alone, None)
            ahead, behind = build("Llama", **SIZES), sharded(build("Llama", **SIZES))
            reports = patch(ahead, fp8=fp8), patch(behind, fp8=fp8)
            for model, report in zip((sharded(ahead), behind), reports):
                # Codes of a weight that lag behind it would show from the second step on
                torch.testing.assert_close(losses_on(model, rank), expected, rtol=2e-3 if fp8 else 1e-5, atol=0)
                assert report.calls().get("linear_fp8", 0) == (3 * 6 if fp8 else 0)
                gated = "glu_linear_fp8" if fp8 else "glu_linear"
                assert report.calls()["linear_cross_entropy"] == report.calls()[gated] == 3
                unpatch(model)
    finally:
        dist.destroy_process_group()


def other_rank(file: str) -> None:
    linear.LEAST = SIZES["hidden_size"]
    on_two_ranks(1, file)


def test_sharded_before_and_after(tmp_path, monkeypatch):
    monkeypatch.setattr(linear, "LEAST", SIZES["hidden_size"])
    file = str(tmp_path / "meeting")
    other = mp.get_context("spawn").Process(target=other_rank, args=(file,))
    other.start()
    try:
        on_two_ranks(0, file)
    finally:
        other.join()  # which fails with this one: what it waits for is gone
    assert other.exitcode == 0
