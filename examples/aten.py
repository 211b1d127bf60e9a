"""Torch's own operators, replaced in a model that knows nothing of it: count the calls of a step, choose by measurements, train,
and see what became of the calls.

    python examples/aten.py                                # what is known to be no slower on this GPU
    python examples/aten.py --mode all                     # whatever can be replaced, faster or not
    TRITON_INTERPRET=1 python examples/aten.py --mode all  # without a GPU: kernels in Triton's interpreter, on the CPU

Mode "auto" goes by measurements of this very GPU; where there are none it replaces nothing, and says how to make them. Without a
GPU and outside of the interpreter there is nothing to replace: the calls are counted all the same.
"""

from __future__ import annotations

import argparse
import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import tilewright as tw
from tilewright.core.target import INTERPRETING

VOCAB, HIDDEN, ROWS = 61, 32, 12


class Model(nn.Module):
    """Predicts the next of some tokens from each of them, and from what stands in the same place of other rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(VOCAB, HIDDEN), nn.LayerNorm(HIDDEN)
        self.up, self.down, self.head = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN), nn.Linear(HIDDEN, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        x = x + self.down(F.gelu(self.up(self.norm(x))))
        x = x + x * torch.softmax(x, 0)  # along the first dimension, which aten is slow at
        return self.head(x)


def train(model: Model, tokens: Tensor, steps: int) -> list[float]:
    """The losses of some steps of a copy of the model."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small model with torch's operators replaced.")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--mode", choices=("auto", "all"), default="auto")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"
    torch.manual_seed(0)
    model, tokens = Model().to(device), torch.randint(VOCAB, (ROWS, 9)).to(device)
    plain = train(model, tokens, given.steps)
    with tw.aten.observe() as calls:
        train(model, tokens, 1)
    print(calls)
    if device == "cpu" and not INTERPRETING:
        print("there is no GPU whose operators could be replaced: TRITON_INTERPRET=1 and --mode all do so on the CPU")
        return
    with tw.aten.use(given.mode, observed=calls if given.mode == "auto" else None):
        replaced = train(model, tokens, given.steps)
        report = tw.aten.report()
    for step, losses in enumerate(zip(plain, replaced)):
        print("step {}: loss {:.5f}, replaced {:.5f}".format(step, *losses))
    for name, one in report.items():
        if one["taken"] or one["declined"]:
            reasons = "; ".join(f"{count} aten's: {why}" for why, count in one["declined"].items())
            gained = f", {one['gained_us']:.0f} us gained" if "gained_us" in one else ""
            print(f"{name}: {one['taken']} ours{gained}{'; ' if reasons else ''}{reasons}")
    print(f"{sum(one['taken'] for one in report.values())} calls of {len(report)} replaced overloads were ours")


if __name__ == "__main__":
    main()
