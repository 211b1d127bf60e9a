"""Ours and another, timed in turn: as many runs as say which is faster, and none where they are too far apart to say it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..aten.verdicts import FAR
from . import check
from .choices import least_of

RUNS, FEWEST_RUNS = 5, 3  # where the two are close, and at least
SPREAD = 0.05  # how far apart runs of one may be
TRIES = 4  # to find such runs: a shared host has a slow spell in one of five
FAR_BEHIND = 1.1  # ours over the other, with confidence: two more runs would not make that no slower


def settled(way: str, run: Callable[[], list[float]], fewest: int = FEWEST_RUNS) -> list[list[float]]:
    """Runs of (ours, the other) by one way of calling. Where they are too far apart all of them are made anew, TRIES times in all:
    something else may have passed by. Raises `check.Wrong`."""
    for _ in range(TRIES):
        pairs = several(run, fewest)
        spread, who = apart(pairs)
        if spread <= SPREAD:
            return pairs
    raise check.Wrong(f"runs of {who}, {way}, are {spread:.1%} apart: is the GPU busy, or too hot?")


def several(run: Callable[[], list[float]], fewest: int) -> list[list[float]]:
    """The fewest runs where one side is far ahead, else more."""
    pairs: list[list[float]] = []
    while len(pairs) < fewest or (len(pairs) < RUNS and not is_far(pairs)):
        pairs.append(run())
    return pairs


def apart(pairs: Sequence[Sequence[float]]) -> tuple[float, str]:
    """How far the runs of either side are apart at most, and whose they are."""
    return max((max(times) / min(times) - 1.0, who) for who, times in zip(("own", "aten"), zip(*pairs)))


def is_far(pairs: Sequence[Sequence[float]]) -> bool:
    """Whether runs say so clearly who is faster that no verdict could be another by more of them."""
    return least_of(pairs) >= FAR or least_of([(aten, own) for own, aten in pairs]) >= FAR_BEHIND
