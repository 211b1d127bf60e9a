"""A small mixture-of-experts transformer, sharded by FSDP2, one optimiser step after another.

    python examples/fsdp2.py                                  one process, nothing sharded
    torchrun --nproc-per-node 2 examples/fsdp2.py             two ranks, the same losses
    torchrun --nproc-per-node 8 examples/fsdp2.py --fp8       products of FP8 codes; on a CPU linear layers emulate them

Ranks take equal parts of each batch, so the losses do not depend on how many there are, but for rounding; in FP8 blocks of
tokens are others, and losses only near.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import tilewright as tw

VOCAB, HIDDEN, HEADS, FFN, EXPERTS, LAYERS = 256, 64, 4, 128, 4, 2
BATCH, LENGTH = 8, 32


class Attention(nn.Module):
    def __init__(self, linear: type[nn.Linear]) -> None:
        super().__init__()
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.qkv = linear(HIDDEN, 3 * HIDDEN, bias=False)
        self.out = linear(HIDDEN, HIDDEN, bias=False)

    def forward(self, x: Tensor, freqs: Tensor) -> Tensor:
        qkv = self.qkv(tw.rms_norm(x, self.norm))
        q, k, v = qkv.unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)  # [batch, heads, length, head_dim] each
        q, k = tw.rope(q, k, freqs=freqs)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self, fp8: bool) -> None:
        super().__init__()
        self.attention = Attention(tw.nn.Linear if fp8 else nn.Linear)
        self.experts = tw.nn.MoEFeedForward(
            HIDDEN, FFN, EXPERTS, 2, residual=True, z_loss=1e-3, precision="fp8" if fp8 else "input"
        )

    def forward(self, x: Tensor, freqs: Tensor) -> tuple[Tensor, Tensor]:
        return self.experts(self.attention(x, freqs))


class Model(nn.Module):
    def __init__(self, fp8: bool) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(VOCAB, HIDDEN))
        self.blocks = nn.ModuleList(Block(fp8) for _ in range(LAYERS))
        self.norm = nn.Parameter(torch.ones(HIDDEN))
        self.head = nn.Parameter(torch.randn(VOCAB, HIDDEN) / HIDDEN**0.5)

    def forward(self, ids: Tensor) -> Tensor:
        """The loss of predicting each token from those before it."""
        inputs, labels = ids[:, :-1], ids[:, 1:]
        x, losses = tw.embedding(inputs, self.embedding), 0.0
        pairs = HIDDEN // HEADS // 2
        rates = 10000.0 ** (-torch.arange(pairs, device=ids.device) / pairs)
        freqs = torch.outer(torch.arange(inputs.shape[1], device=ids.device), rates).unsqueeze(0)
        for block in self.blocks:
            x, loss = block(x, freqs)
            losses = losses + loss
        return tw.linear_cross_entropy(tw.rms_norm(x, self.norm), self.head, labels) + losses


def train(mesh: DeviceMesh | None, steps: int, fp8: bool = False, device: str = "cpu") -> list[float]:
    """The loss of the whole batch before each step."""
    torch.manual_seed(0)
    model = Model(fp8).to(device)
    rank, ranks = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    if mesh is not None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        first = torch.randint(VOCAB, (BATCH, 1), generator=source)
        ids = ((first + torch.arange(LENGTH + 1)) % VOCAB).to(device)  # each token is the last one plus 1
        loss = model(ids.chunk(ranks)[rank])
        loss.backward()  # FSDP takes the mean of the ranks' gradients
        tw.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        if mesh is not None:
            dist.all_reduce(mean, group=mesh.get_group())
        losses.append(mean.item() / ranks)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5, help="steps of the optimiser (5)")
    parser.add_argument("--fp8", action="store_true", help="make products of FP8 codes")
    given = parser.parse_args()
    device, mesh, ranks = "cuda" if torch.cuda.is_available() else "cpu", None, int(os.environ.get("WORLD_SIZE", 0))
    if ranks:
        if BATCH % ranks:
            parser.error(f"{ranks} ranks cannot take equal parts of a batch of {BATCH}")
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        mesh = init_device_mesh(device, (ranks,))
    for step, loss in enumerate(train(mesh, given.steps, given.fp8, device)):
        if mesh is None or mesh.get_rank() == 0:
            print(f"step {step}: loss {loss:.6f}")
    if mesh is not None:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
