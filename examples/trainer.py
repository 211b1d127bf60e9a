"""A small Llama trained by transformers' `Trainer`, first as it is and then patched: the losses are the same.

    pip install tilewright transformers accelerate
    python examples/trainer.py --steps 10

The weights are random and the text is made up, so nothing is downloaded. On a CPU operations are their PyTorch references: what is
shown there is that the curves agree, not speed.
"""

from __future__ import annotations

import argparse
import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments

from tilewright.integrations.huggingface.trainer import PatchCallback

VOCAB, LENGTH, BATCH = 256, 32, 8


def model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def sequences(count: int) -> list[dict[str, torch.Tensor]]:
    """Each token is the one before it plus 1, from a random first one."""
    first = torch.randint(VOCAB, (count, 1), generator=torch.Generator().manual_seed(1))
    rows = (first + torch.arange(LENGTH)) % VOCAB
    return [{"input_ids": row, "labels": row} for row in rows]


def train(steps: int, callbacks: list[PatchCallback]) -> list[float]:
    """The loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=3e-3, logging_steps=1,
            save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False,
        )  # fmt: skip
        trainer = Trainer(model(), arguments, train_dataset=sequences(steps * BATCH), callbacks=callbacks)
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of the optimiser (10)")
    steps = parser.parse_args().steps
    callback = PatchCallback()
    plain, patched = train(steps, []), train(steps, [callback])
    for step, losses in enumerate(zip(plain, patched), 1):
        print("step {}: loss {:.4f}, patched {:.4f}".format(step, *losses))
    print(callback.report)
    print("calls:", callback.report.calls())


if __name__ == "__main__":
    main()
