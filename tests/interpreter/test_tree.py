"""What `tree_bits` and `tree_accept` promise beyond the properties of every op."""

from __future__ import annotations

import random

import pytest
import torch

import tilewright as tw


@pytest.fixture(autouse=True)
def kernels():
    with tw.force("triton"):
        yield


def line(parents: list[int], node: int) -> list[int] | None:
    """A node and its ancestors, from the root on; None if a parent does not come before its node."""
    found = [node]
    while parents[found[0]] >= 0:
        if parents[found[0]] >= found[0]:
            return None
        found.insert(0, parents[found[0]])
    return found


def random_tree(source: random.Random, nodes: int) -> list[int]:
    return [-1, *(source.randrange(-1 if source.random() < 0.1 else 0, t) for t in range(1, nodes))]


@pytest.mark.parametrize("nodes", [1, 5, 33, 64])
def test_bits_are_ancestors(nodes):
    source = random.Random(nodes)
    trees = [random_tree(source, nodes), [t - 1 for t in range(nodes)], [-1] * nodes]  # any, a chain and leaves alone
    bits, depth = tw.tree_bits(torch.tensor(trees))
    for tree, row, depths in zip(trees, bits.tolist(), depth.tolist()):
        lines = [line(tree, t) for t in range(nodes)]
        assert [b & (2**64 - 1) for b in row] == [sum(1 << s for s in found) for found in lines]
        assert depths == [len(found) - 1 for found in lines]


def test_parents_that_are_none_of_a_tree():
    """A node that is its own parent, one that comes before it and one that there is not: they and their children see nothing."""
    parents = torch.tensor([[-1, 1, 1, 0, 5, 3, 99, 6, 2**40, -(2**40)]])
    bits, depth = tw.tree_bits(parents)
    assert bits.tolist() == [[1, 0, 0, 9, 0, 41, 0, 0, 0, 512]]
    assert depth.tolist() == [[0, -1, -1, 1, -1, 2, -1, -1, -1, 0]]
    same = torch.ones_like(parents)
    count, path = tw.tree_accept(same, same, parents)
    assert (int(count), path[0, :4].tolist()) == (3, [0, 3, 5, -1])


def test_ids_below_0_are_never_taken():
    parents, none = torch.tensor([[-1, 0, 1]]), torch.full((1, 3), -1)
    count, path = tw.tree_accept(none, none, parents)
    assert (count.tolist(), path.tolist()) == ([1], [[0, -1, -1]])


def test_the_longest_of_several_paths_and_the_first_of_equals():
    #  0 - 1 - 3, 0 - 2 - 4 - 5: two children have the token that was chosen; 6 is a root of its own
    parents = torch.tensor([[-1, 0, 0, 1, 2, 4, -1]])
    draft, target = torch.tensor([[0, 7, 7, 8, 8, 9, 1]]), torch.tensor([[7, 8, 8, 0, 9, 3, 0]])
    count, path = tw.tree_accept(draft, target, parents)
    assert (int(count), path[0].tolist()) == (4, [0, 2, 4, 5, -1, -1, -1])
    count, path = tw.tree_accept(draft[:, :5], target[:, :5], parents[:, :5])
    assert (int(count), path[0].tolist()) == (3, [0, 1, 3, -1, -1])


def test_speculation_gives_what_decoding_gives():
    """Whatever is drafted, the tokens are those of one step after the other, in fewer steps where some drafts are right."""
    source = random.Random(3)

    def follows(tokens: list[int]) -> int:
        return hash((*tokens[-3:], len(tokens) % 5)) % 4

    plain = [1]
    while len(plain) < 40:
        plain.append(follows(plain))
    tokens, steps = [1], 0
    while len(tokens) < 40:
        tree = [-1, *(source.randrange(t) for t in range(1, 12))]  # the root is the last token
        draft = [tokens[-1], *(source.randrange(4) for _ in range(11))]
        lines = [line(tree, t) for t in range(12)]
        target = [follows(tokens[:-1] + [draft[s] for s in found]) for found in lines]
        count, path = tw.tree_accept(*(torch.tensor([row]) for row in (draft, target, tree)))
        taken = path[0, : int(count)].tolist()
        tokens += [draft[t] for t in taken[1:]] + [target[taken[-1]]]
        steps += 1
    assert tokens[:40] == plain
    assert steps < 35
