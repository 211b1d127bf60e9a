"""Where aten puts results, and the fewest loops over operands: random shapes, permutations, expansions and slices."""

from __future__ import annotations

import itertools
import math
import random

import pytest
import torch
from torch import Tensor

from tilewright.aten import layout
from tilewright.core import memory


def drawn(rng: random.Random, shape: tuple[int, ...]) -> Tensor:
    """A tensor of this shape: permuted, with dimensions of 1 that are expanded or broadcast, with steps, or a part of another."""
    rank = len(shape)
    order = rng.sample(range(rank), rank)
    steps = [rng.choice((1, 1, 1, 2)) for _ in shape]
    kinds = [rng.choice(("own", "own", "own", "expanded", "one")) for _ in shape]
    sizes = [n * step + rng.choice((0, 0, 1)) if kind == "own" else 1 for n, step, kind in zip(shape, steps, kinds)]
    made = torch.empty([sizes[d] for d in order]).permute([order.index(d) for d in range(rank)])
    for d, (n, step, kind) in enumerate(zip(shape, steps, kinds)):
        if kind == "own":
            made = made[(slice(None),) * d + (slice(0, n * step, step),)]
        elif kind == "expanded":
            made = made.expand(*made.shape[:d], n, *made.shape[d + 1 :])
    while made.dim() and made.shape[0] == 1 and rng.random() < 0.3:
        made = made[0]
    return made


@pytest.mark.parametrize("seed", range(40))
def test_results_lie_as_atens_do(seed):
    rng = random.Random(seed)
    for _ in range(15):
        shape = tuple(
            rng.choice((1, 2, 3, 5, 0) if rng.random() < 0.05 else (1, 2, 3, 5)) for _ in range(rng.randint(0, 6))
        )
        operands = [drawn(rng, shape) for _ in range(rng.randint(1, 3))]
        whole = layout.broadcast([t.shape for t in operands])
        number = len(operands) == 1 and rng.random() < 0.5
        call = {1: torch.neg, 2: torch.add, 3: torch.addcmul}[len(operands)]
        aten = operands[0] + 1 if number else call(*operands)
        assert tuple(aten.shape) == whole
        said = [(tuple(t.shape), t.stride()) for t in operands]
        assert layout.result_strides(whole, operands, number) == aten.stride(), (said, number)


@pytest.mark.parametrize("seed", range(40))
def test_loops_are_those_of_torchs_iterator(seed):
    """Results, loops and steps, one by one, of several elements; of one element torch has a loop, and ours has none."""
    iterators = pytest.importorskip("torch._tensor_iterator", reason="before torch 2.13 there is no way to it")
    rng = random.Random(2000 + seed)
    for _ in range(15):
        shape = tuple(rng.choice((1, 2, 3, 5)) for _ in range(rng.randint(1, 6)))
        operands = [drawn(rng, shape) for _ in range(rng.randint(1, 3))]
        torchs = iterators.TensorIterator(outputs=[None], const_inputs=operands)
        whole = layout.broadcast([t.shape for t in operands])
        strides = layout.result_strides(whole, operands)
        assert strides == torchs.output().stride()
        if torchs.numel > 1:
            made = layout.loops(whole, [strides, *(layout.expanded(t, whole) for t in operands)])
            wanted = tuple(torchs.shape), tuple(torchs.element_strides(at) for at in range(torchs.ntensors))
            assert made == wanted, (whole, [(tuple(t.shape), t.stride()) for t in operands])


def test_shapes_that_do_not_broadcast():
    assert layout.broadcast([(2, 3), (3, 1)]) is None
    assert layout.broadcast([(), (1, 4), (3, 1)]) == (3, 4)
    assert layout.broadcast([(0,), (1,)]) == (0,)


@pytest.mark.parametrize("seed", range(40))
def test_loops_visit_what_dimensions_do(seed):
    """Every element once, at the same places of all operands."""
    rng = random.Random(1000 + seed)
    for _ in range(5):
        shape = tuple(rng.choice((1, 2, 3, 4)) for _ in range(rng.randint(0, 5)))
        strides = [layout.expanded(drawn(rng, shape), shape) for _ in range(3)]
        sizes, steps = layout.loops(shape, strides)
        assert math.prod(sizes) == math.prod(shape) and len(sizes) <= sum(n > 1 for n in shape)

        def places(sizes, steps):
            return sorted(
                tuple(sum(i * s for i, s in zip(index, own)) for own in steps)
                for index in itertools.product(*map(range, sizes))
            )

        assert places(sizes, steps) == places(shape, strides)


def test_loops_are_the_fewest():
    x = torch.empty(4, 5, 6)
    assert layout.loops((4, 5, 6), [x.stride()] * 3) == ((120,), ((1,),) * 3)
    row = layout.expanded(torch.empty(6), (4, 5, 6))
    assert layout.loops((4, 5, 6), [x.stride(), row]) == ((6, 20), ((1, 6), (1, 0)))
    turned = x.permute(2, 1, 0)
    assert layout.loops((6, 5, 4), [turned.stride()]) == ((120,), ((1,),))


@pytest.mark.parametrize(
    ("view", "itself"),
    [
        (lambda x: x, False), (lambda x: x.t(), False), (lambda x: x[:, ::2], False), (lambda x: x[:1].expand(3, 8), True),
        (lambda x: x.as_strided((4, 4), (1, 1)), True), (lambda x: x.as_strided((2, 2), (1, 2)), False),
    ],
)  # fmt: skip
def test_overlaps(view, itself):
    t = view(torch.empty(6, 8))
    assert memory.self_overlapping(t) == itself
    first, last = memory.span(t)
    assert first == t.data_ptr() and last <= t.data_ptr() + 48 * 4
