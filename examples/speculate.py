"""Speculative decoding of a small model: a tree of drafts is verified in one step, and the tokens are those of decoding without.

    python examples/speculate.py --tokens 40

A step writes the keys and values of all drafts behind the sequence. Each draft sees the sequence and, by its bits, its ancestors
(`tree_bits`, `cached_attention(tree=)`). `tree_accept` finds the longest path that the model itself would have taken, and
`cache_move` closes it up. Lengths, drafts and paths stay on the device and their shapes never change, so that a step is one graph.
The drafts are guessed by the model's first and last matrices alone: what it would say without its layers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch
from torch import Tensor

import tilewright as tw

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS = 64, 64, 128, 4, 2, 32, 2
EPS, THETA, PAGE, ROOM = 1e-6, 1e4, 8, 96
# Node 0 is the token that the drafts come after. Of a node's children the first has the likeliest guess, and so on
PARENTS = [-1, 0, 0, 0, 0, 1, 1, 1, 2, 2, 3, 5, 5, 6, 8, 11]


class Model:
    """Random weights. Layers move the stream little, so that guesses without them are right now and then."""

    def __init__(self, batch: int, device: str, dtype: torch.dtype = torch.float32) -> None:
        source = torch.Generator().manual_seed(0)

        def drawn(*shape: int, scale: float) -> Tensor:
            return (scale * torch.randn(shape, generator=source)).to(device, dtype)

        width = (HEADS + 2 * KV_HEADS) * HEAD_DIM
        self.embedding, self.head = drawn(VOCAB, HIDDEN, scale=1.0), drawn(VOCAB, HIDDEN, scale=1.0)
        self.norm = torch.ones(HIDDEN, device=device, dtype=dtype)
        self.layers = [
            {
                "qkv": drawn(width, HIDDEN, scale=0.15), "out": drawn(HIDDEN, HEADS * HEAD_DIM, scale=0.08),
                "gate_up": drawn(2 * FFN, HIDDEN, scale=0.05), "down": drawn(HIDDEN, FFN, scale=0.05),
            }
            for _ in range(LAYERS)
        ]  # fmt: skip
        pages = batch * ROOM // PAGE
        self.table = torch.randperm(pages, generator=source).view(batch, -1).to(device, torch.int32)
        shape = pages, PAGE, KV_HEADS, HEAD_DIM
        self.caches = [tuple(torch.zeros(shape, device=device, dtype=dtype) for _ in range(2)) for _ in range(LAYERS)]
        rates = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angles = torch.arange(ROOM)[:, None] * rates
        self.angles = {"cos": angles.cos().to(device), "sin": angles.sin().to(device)}

    def slots(self, places: Tensor) -> Tensor:
        """Where the cache keeps the tokens at these places [batch, count] of their sequences."""
        page = self.table.gather(1, places.clamp(min=0, max=ROOM - 1) // PAGE)
        return torch.where((places >= 0) & (places < ROOM), page.long() * PAGE + places % PAGE, -1)

    def __call__(self, tokens: Tensor, length: Tensor, depth: Tensor, bits: Tensor | None = None) -> Tensor:
        """What the model says after each token [batch, count]. They lie behind `length` tokens that are in the cache, and stand
        `depth` positions after those; which of one another they see, `bits` say, or else those before them."""
        batch, count = tokens.shape
        slots = self.slots(length[:, None] + torch.arange(count, device=tokens.device))
        positions, kv_len = length[:, None] + depth, length + count
        stream, update = tw.embedding(tokens, self.embedding), None
        for layer, (keys, values) in zip(self.layers, self.caches):
            x, stream = self.normed(stream, update)
            q = tw.qkv_split_cache(
                tw.matmul(x, layer["qkv"].t()), HEADS, KV_HEADS, HEAD_DIM, keys, values, slots, positions=positions,
                packing="plain", **self.angles,
            )  # fmt: skip
            o, _ = tw.cached_attention(q, keys, values, self.table, kv_len, tree=bits)
            x, stream = self.normed(stream, tw.matmul(o.flatten(2), layer["out"].t()))
            update = tw.matmul(tw.glu(tw.matmul(x, layer["gate_up"].t())), layer["down"].t())
        logits = tw.matmul(self.normed(stream, update)[0], self.head.t())
        zero = torch.zeros(batch, count, device=tokens.device)
        return tw.sample(logits, zero.long(), zero)  # temperature 0: the likeliest

    def normed(self, stream: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
        if update is None:
            return tw.rms_norm(stream, self.norm, EPS), stream
        return tw.add_rms_norm(update, stream, self.norm, EPS)

    def prefill(self, prompt: Tensor) -> tuple[Tensor, Tensor]:
        """(the first new token, how many tokens the cache has) of each sequence."""
        batch, count = prompt.shape
        length = torch.zeros(batch, device=prompt.device, dtype=torch.long)
        return self(prompt, length, torch.arange(count, device=prompt.device).expand(batch, -1))[:, -1], length + count

    def guesses(self, most: int) -> Tensor:
        """The `most` likeliest successors of each token, without the layers."""
        logits = tw.matmul(tw.rms_norm(self.embedding, self.norm, EPS), self.head.t())
        return logits.topk(most, -1).indices


def decode(model: Model, prompt: Tensor, count: int) -> tuple[Tensor, int]:
    """(`count` tokens of each sequence, steps), a token a step."""
    token, length = model.prefill(prompt)
    made, zero = [token], torch.zeros_like(token)[:, None]
    while len(made) < count:
        token = model(token[:, None], length, zero)[:, 0]
        length = length + 1
        made.append(token)
    return torch.stack(made, 1), count - 1


def speculate(model: Model, prompt: Tensor, count: int) -> tuple[Tensor, int]:
    """The same tokens in fewer steps."""
    (batch, _), device, nodes = prompt.shape, prompt.device, len(PARENTS)
    ranks = [PARENTS[:t].count(parent) for t, parent in enumerate(PARENTS)]
    successors = model.guesses(max(ranks) + 1)
    parents = torch.tensor(PARENTS, device=device).expand(batch, -1)
    bits, depth = tw.tree_bits(parents)
    token, length = model.prefill(prompt)
    made = torch.full((batch, count + nodes), -1, device=device)
    made[:, 0], done = token, torch.ones_like(length)
    step, steps = verified(model, successors, ranks, parents, bits, depth), 0
    while int(done.min()) < count:
        told, token, taken = step(token, length)
        at = done[:, None] + torch.arange(nodes, device=device)
        made.scatter_(1, at.clamp(max=count + nodes - 1), torch.where(at < count, told, -1))
        # A sequence that is done waits for the others: its tokens are verified again, and not kept
        going = done < count
        length, done = length + taken * going, done + taken * going
        steps += 1
    return made[:, :count], steps


def verified(
    model: Model, successors: Tensor, ranks: list[int], parents: Tensor, bits: Tensor, depth: Tensor
) -> Callable[[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """A step: from the last token of each sequence and how many are in the cache, (the next tokens and -1 past them [batch, nodes],
    the last of them, how many they are). Nothing in it waits for the device."""

    def step(token: Tensor, length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        drafts = [token]
        for parent, rank in zip(PARENTS[1:], ranks[1:]):
            drafts.append(successors[drafts[parent], rank])
        draft = torch.stack(drafts, 1)
        target = model(draft, length, depth.long(), bits)
        count, path = tw.tree_accept(draft, target, parents)
        kept = path >= 0
        told = torch.where(kept, target.gather(1, path.clamp(min=0)), -1)
        # Accepted drafts close up behind the sequence: the i-th of the path becomes token i there
        source = torch.where(kept, model.slots(length[:, None] + path), -1).flatten()
        place = torch.arange(path.shape[1], device=path.device)
        goal = torch.where(kept, model.slots(length[:, None] + place), -1).flatten()
        for keys, values in model.caches:
            tw.cache_move(keys, values, source, goal)
        count = count.long()
        return told, told.gather(1, count[:, None] - 1)[:, 0], count

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=40, help="new tokens of each sequence (40)")
    count = parser.parse_args().tokens
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompt = torch.randint(VOCAB, (2, 7), generator=torch.Generator().manual_seed(1)).to(device)
    if not 1 <= count <= ROOM - prompt.shape[1] - len(PARENTS):
        parser.error(f"there is room for {ROOM - prompt.shape[1] - len(PARENTS)} tokens")
    alone, steps = decode(Model(2, device), prompt, count)
    drafted, fewer = speculate(Model(2, device), prompt, count)
    for row in drafted.tolist():
        print(*row)
    print(f"{fewer} steps in the place of {steps}; the same tokens: {torch.equal(alone, drafted)}")


if __name__ == "__main__":
    main()
