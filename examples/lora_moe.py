"""LoRA of a mixture of experts: adapters on attention and on the experts of a small Qwen3-MoE, whose own weights stay as they are.

    pip install tilewright transformers peft
    python examples/lora_moe.py --steps 10

`tw.patch` may come before or after `get_peft_model`. The adapters of the experts are added to their weights before the products, so
that the fused experts take them too. The weights are random and the text is made up, so nothing is downloaded.
"""

from __future__ import annotations

import argparse

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import tilewright as tw

VOCAB, LENGTH, BATCH = 256, 32, 8


def model() -> nn.Module:
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=16, num_experts=8, num_experts_per_tok=2,
    )  # fmt: skip
    lora = LoraConfig(
        r=4, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"],
        target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    )  # fmt: skip
    return get_peft_model(Qwen3MoeForCausalLM(config), lora).train()


def train(model: nn.Module, steps: int) -> list[float]:
    """The loss of each step; only adapters learn."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model.to(device)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    source, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        first = torch.randint(VOCAB, (BATCH, 1), generator=source)
        ids = ((first + torch.arange(LENGTH)) % VOCAB).to(device)  # each token is the one before it plus 1
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10, help="steps of the optimiser (10)")
    steps = parser.parse_args().steps
    plain, patched = model(), model()
    patched.print_trainable_parameters()
    report = tw.patch(patched)
    for step, losses in enumerate(zip(train(plain, steps), train(patched, steps)), 1):
        print("step {}: loss {:.4f}, patched {:.4f}".format(step, *losses))
    print(report)
    print("calls:", report.calls())
    tw.unpatch(patched)


if __name__ == "__main__":
    main()
