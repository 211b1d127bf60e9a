"""Speculation of the examples: token for token what decoding without drafts gives, and only because every part does its work."""

from __future__ import annotations

import sys

import pytest
import torch

import tilewright as tw
from examples import speculate

COUNT = 40


def prompt(batch: int = 2, seed: int = 1) -> torch.Tensor:
    return torch.randint(speculate.VOCAB, (batch, 7), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def alone() -> torch.Tensor:
    return speculate.decode(speculate.Model(2, "cpu"), prompt(), COUNT)[0]


def test_drafts_change_no_token_and_save_steps(alone):
    drafted, steps = speculate.speculate(speculate.Model(2, "cpu"), prompt(), COUNT)
    assert torch.equal(drafted, alone) and steps < 0.7 * (COUNT - 1)


@pytest.mark.parametrize("parents", [[-1], [-1, 0, 1, 2, 3], [-1, 0, 0, 0]], ids=str)
def test_any_tree_gives_the_same_tokens(alone, parents, monkeypatch):
    monkeypatch.setattr(speculate, "PARENTS", parents)
    drafted, steps = speculate.speculate(speculate.Model(2, "cpu"), prompt(), COUNT)
    assert torch.equal(drafted, alone) and (steps == COUNT - 1) == (len(parents) == 1)


@pytest.mark.parametrize("broken", ["cache_move", "tree_bits", "tree_accept"])
def test_a_part_that_does_nothing_is_noticed(alone, broken, monkeypatch):
    """Drafts that stay where they are, that see all before them, or that are all taken."""
    chain, real = tw.tree_bits(torch.arange(-1, len(speculate.PARENTS) - 1)), tw.tree_bits
    instead = {
        "cache_move": lambda *_: None,
        "tree_bits": lambda parents: (chain[0].expand_as(parents), real(parents)[1]),
        "tree_accept": lambda draft, target, parents: (
            torch.full(draft.shape[:1], 3),
            torch.tensor([0, 1, 5, *[-1] * (draft.shape[1] - 3)]).expand_as(draft),
        ),
    }
    monkeypatch.setattr(tw, broken, instead[broken])
    drafted, _ = speculate.speculate(speculate.Model(2, "cpu"), prompt(), COUNT)
    assert not torch.equal(drafted, alone)


def test_the_example_says_so(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["speculate.py", "--tokens", "12"])
    speculate.main()
    assert capsys.readouterr().out.endswith("the same tokens: True\n")
    monkeypatch.setattr(sys, "argv", ["speculate.py", "--tokens", "90"])
    with pytest.raises(SystemExit):
        speculate.main()
    assert "there is room for 73 tokens" in capsys.readouterr().err
