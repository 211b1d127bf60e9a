"""TRL's trainer for supervised fine-tuning with a patched model: the fused loss is reached, and the patch is taken back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("trl", reason="trl is not installed: pip install trl")
pytest.importorskip("datasets", reason="datasets is not installed: pip install datasets")
pytest.importorskip("accelerate", reason="accelerate is not installed: pip install accelerate")
import datasets
import tokenizers
import transformers
import trl

from tests.transformer_models import FP32, IDS, LABELS, build, error, step
from tilewright.integrations.huggingface.report import REPORT, changed
from tilewright.integrations.huggingface.token_losses import asks
from tilewright.integrations.huggingface.trainer import PatchCallback

STEPS = 4


def trainer(model: nn.Module, folder: Path, callbacks: list, **more: object) -> trl.SFTTrainer:
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<s>": 1, "</s>": 2, "<unk>": 3}, "<unk>"))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", eos_token="</s>", bos_token="<s>"
    )
    ids = torch.randint(3, 6, (8, 9), generator=torch.Generator().manual_seed(3)).tolist()
    rows = []
    for i, row in enumerate(ids):  # of several lengths, with several numbers of labels
        row, hidden = row[: 5 + i % 4], 1 + i % 3
        rows.append({"input_ids": row, "labels": [-100] * hidden + row[hidden:]})
    # With a fingerprint of its own: to make one, some versions of datasets pickle what others of pyarrow cannot
    data = datasets.Dataset(datasets.table.InMemoryTable.from_pylist(rows), fingerprint="rows")
    given = trl.SFTConfig(
        str(folder), max_steps=STEPS, gradient_accumulation_steps=2, per_device_train_batch_size=2, learning_rate=0.3,
        optim="sgd", use_cpu=True, logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
        gradient_checkpointing=False, dataset_kwargs={"skip_prepare_dataset": True}, **{"bf16": False, **more},
    )  # fmt: skip
    return trl.SFTTrainer(model, given, train_dataset=data, processing_class=tokenizer, callbacks=callbacks)


def logged(made: trl.SFTTrainer) -> dict[str, list[float]]:
    made.train()
    rows = [r for r in made.state.log_history if "loss" in r]
    return {name: [r[name] for r in rows] for name in ("loss", "entropy", "mean_token_accuracy")}


@pytest.mark.parametrize("family", ["Llama", "Gemma2", "Qwen3Moe"])
@pytest.mark.parametrize("loss_type", ["nll", "dft"])
def test_the_fused_loss_is_reached_and_undone(family, loss_type, tmp_path):
    expected = logged(trainer(build(family), tmp_path, [], loss_type=loss_type))
    assert max(expected["mean_token_accuracy"]) > 0
    model, callback = build(family), PatchCallback()
    made = trainer(model, tmp_path, [callback], loss_type=loss_type)
    for again in (False, True):
        found = logged(made)
        calls = callback.report.calls()
        assert calls["linear_cross_entropy"] == 2 * STEPS and calls["rms_norm"] > 0
        assert not callback.report.changes and not [m for m in model.modules() if REPORT in m.__dict__]
        assert [m for m in model.modules() if changed(m)] == [model] and asks(model)  # TRL's own forward stays
        for name, values in expected.items():
            assert again or found[name] == pytest.approx(values, rel=2e-5, abs=1e-6), name
    out, grads = step(model)
    plain = build(family)
    plain.load_state_dict(model.state_dict())
    truth, theirs = step(plain)
    assert torch.equal(out.loss, truth.loss) and torch.equal(out.logits, truth.logits) and error(grads, theirs) < FP32


@pytest.mark.filterwarnings("ignore:mkldnn_matmul")
def test_mixed_precision_evaluation_and_the_loss_alone(tmp_path):
    expected = logged(trainer(build("Llama"), tmp_path, [], bf16=True))
    callback = PatchCallback(only="loss")
    made = trainer(build("Llama"), tmp_path, [callback], bf16=True)
    found = logged(made)
    assert callback.report.calls() == {"linear_cross_entropy": 2 * STEPS}
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-2) and found["loss"] != expected["loss"]
    assert made.model.train()(IDS, labels=LABELS).logits is not None
    callback = PatchCallback(only=["norm"])
    trainer(build("Llama"), tmp_path, [callback]).train()
    assert {*callback.report.calls()} == {"rms_norm"}


def test_a_head_that_is_no_plain_linear_layer_stays_trls(tmp_path):
    class Head(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    model, callback = build("Llama"), PatchCallback()
    model.lm_head.__class__ = Head
    trainer(model, tmp_path, [callback]).train()
    assert "linear_cross_entropy" not in callback.report.calls()
    assert [s.reason for s in callback.report.skipped if s.role == "loss"] == [
        "TRL's own: its head is not a plain linear layer but Head"
    ]


def test_a_head_with_a_hook_stays_trls(tmp_path):
    def trained(callbacks: list) -> tuple[dict[str, list[float]], list[torch.Tensor]]:
        model, seen = build("Llama"), []
        model.lm_head.register_forward_hook(lambda module, given, result: seen.append(result.detach()))
        return logged(trainer(model, tmp_path, callbacks)), seen

    callback = PatchCallback(only="loss")
    (expected, seen), (found, told) = trained([]), trained([callback])
    assert not callback.report.calls() and len(told) == len(seen)
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=2e-5, abs=1e-6), name
