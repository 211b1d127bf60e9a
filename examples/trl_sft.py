"""Supervised fine-tuning of a small Qwen3 by TRL's `SFTTrainer`, first as it is and then patched: the losses are the same.

    pip install tilewright trl
    python examples/trl_sft.py --steps 10

The data are token ids already, half prompt and half completion; only completions count in the loss. The weights are random and
the text is made up, so nothing is downloaded.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator

import torch
from datasets import IterableDataset
from transformers import PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, Qwen3ForCausalLM
from trl import SFTConfig, SFTTrainer

from tilewright.integrations.huggingface.trainer import PatchCallback

VOCAB, LENGTH, BATCH = 256, 32, 8


def model() -> Qwen3ForCausalLM:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Qwen3ForCausalLM(config)


def tokenizer() -> PreTrainedTokenizerFast:
    """A word for each token: the trainer wants to know how to pad."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = WordLevel({"<pad>": 0, "<eos>": 1, **{str(n): n for n in range(2, VOCAB)}}, unk_token="<pad>")
    return PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), pad_token="<pad>", eos_token="<eos>")


def conversations(count: int) -> Iterator[dict[str, list[int]]]:
    """Each token is the one before it plus 1, from a random first one; the first half is the prompt."""
    first = torch.randint(2, VOCAB, (count, 1), generator=torch.Generator().manual_seed(1))
    rows = 2 + (first - 2 + torch.arange(LENGTH)) % (VOCAB - 2)
    for row in rows.tolist():
        yield {"input_ids": row, "labels": [-100] * (LENGTH // 2) + row[LENGTH // 2 :]}


def train(steps: int, callbacks: list[PatchCallback]) -> list[float]:
    """The loss of each step."""
    with tempfile.TemporaryDirectory() as folder:
        config = SFTConfig(
            folder, max_steps=steps, per_device_train_batch_size=BATCH, learning_rate=3e-3, logging_steps=1, bf16=False,
            save_strategy="no", report_to=[], disable_tqdm=True, dataloader_pin_memory=False, max_length=LENGTH,
            gradient_checkpointing=False,
        )  # fmt: skip
        data = IterableDataset.from_generator(conversations, gen_kwargs={"count": steps * BATCH})
        trainer = SFTTrainer(
            model(), args=config, train_dataset=data, processing_class=tokenizer(),
            callbacks=callbacks,
        )  # fmt: skip
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
