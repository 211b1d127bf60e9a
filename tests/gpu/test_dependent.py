"""Launches that begin before the one before has ended: the same bits a hundred times, and those of launches that do not."""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import triton.language as tl
from torch import Tensor

import tilewright as tw
from examples import decode_layer, denoise, speculate
from tests.gpu import still_running
from tilewright.attention.cache_write import cache_move_rows
from tilewright.device.dependent import begin_dependent
from tilewright.gemm.few import small_rows
from tilewright.gemm.hopper.few import small_rows_hopper
from tilewright.ops.norm.rms_norm import rms_norm_forward
from tilewright.runtime import kernel as runtime
from tilewright.runtime.kernel import Kernel, kernel

pytestmark = pytest.mark.gpu
RUNS = 100
SIZE, BLOCK = 1 << 16, 256
LINKS = 24


def hash_of(tensors: list[Tensor]) -> str:
    made = hashlib.sha256()
    for tensor in tensors:
        made.update(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return made.hexdigest()[:16]


def captured(body: Callable[[], None]) -> Callable[[], None]:
    body()  # compiles what the graph will launch
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def begun_early(one: Kernel) -> bool:
    """Whether any launch of a kernel so far asked for it."""
    return any(("launch_pdl", True) in options for _, _, options in one.variants)


# ---- a chain in which each launch reads what the one before wrote, and writes over what that one read


@kernel(grid=lambda a: (a.SIZE // a.BLOCK,), default=lambda a: {"num_warps": 2}, dependent=True)
def link(X, Y, shift, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """Y[i] = 5 * X[far from i] + i. Programs take turns to be slow, so that some end long after the others have."""
    begin_dependent(DEPENDENT)
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(X + (i * 4099 + shift) % SIZE)
    for _ in range(0, (tl.program_id(0) * 37 + shift) % 61 * 20):
        x = x * 5 + 1
        x = (x - 1) * -858993459  # the inverse of 5 modulo 2**32
    tl.store(Y + i, x * 5 + i)


@kernel(grid=lambda a: (a.SIZE // a.BLOCK,), default=lambda a: {"num_warps": 2}, dependent=True)
def idle_link(X, Y, shift, SIZE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    """One program alone has anything to do: all others end as soon as they may, and the launch after must still come after all."""
    begin_dependent(DEPENDENT)
    if tl.program_id(0) != shift:
        return
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(Y + i, tl.load(X + i) + tl.load(Y + i))


def chain(x: Tensor, y: Tensor) -> None:
    for number in range(LINKS):
        link(x, y, number, SIZE=SIZE, BLOCK=BLOCK)
        idle_link(y, x, number, SIZE=SIZE, BLOCK=BLOCK)
        x, y = y, x


def chain_in_torch(x: Tensor, y: Tensor) -> None:
    i = torch.arange(SIZE)
    for number in range(LINKS):
        y.copy_(5 * x[(i * 4099 + number) % SIZE] + i)
        x[number * BLOCK : (number + 1) * BLOCK] += y[number * BLOCK : (number + 1) * BLOCK]
        x, y = y, x


def hashes_of_the_chain() -> set[str]:
    start = torch.randint(-(2**31), 2**31 - 1, (2, SIZE), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    x, y = start.cuda()
    replay, found = captured(lambda: chain(x, y)), set()
    for run in range(RUNS):
        x.copy_(start[0]), y.copy_(start[1])
        replay() if run % 2 else chain(x, y)
        found.add(hash_of([x, y]))
    return found


def test_a_chain_of_dependent_launches_gives_the_bits_of_its_programs_in_order(monkeypatch):
    wanted = torch.randint(-(2**31), 2**31 - 1, (2, SIZE), generator=torch.Generator().manual_seed(1)).to(torch.int32)
    chain_in_torch(*wanted)
    early = hashes_of_the_chain()
    assert begun_early(link) and begun_early(idle_link)
    assert early == {hash_of(list(wanted))}
    monkeypatch.setattr(runtime, "EARLY", False)
    assert hashes_of_the_chain() == early


# ---- examples


def hashes_of_a_layer(batch: int, fp8: bool) -> set[str]:
    step = decode_layer.build(decode_layer.QWEN3_8B, batch, 600, fp8, "cuda")
    replay, found = step.captured(), set()
    for _ in range(RUNS):
        made = replay()
        found.add(hash_of([*made, step.o, step.q]))
    return {f"{one} {hash_of([step.cache.keys, step.cache.values])}" for one in found}


def hashes_of_a_loop(fp8: bool) -> set[str]:
    loop = denoise.build(denoise.DIT._replace(blocks=2, steps=3), 1, fp8, "cuda")
    replay = loop.captured()
    return {hash_of([replay()]) for _ in range(RUNS)}


def hashes_of_a_verification() -> set[str]:
    """Of a step that verifies drafts: what it says, and the caches, in which accepted drafts have closed up."""
    model, source = speculate.Model(2, "cuda"), torch.Generator().manual_seed(1)
    token, length = model.prefill(torch.randint(speculate.VOCAB, (2, 7), generator=source).cuda())
    parents = torch.tensor(speculate.PARENTS, device="cuda").expand(2, -1)
    ranks = [speculate.PARENTS[:at].count(parent) for at, parent in enumerate(speculate.PARENTS)]
    step = speculate.verified(model, model.guesses(max(ranks) + 1), ranks, parents, *tw.tree_bits(parents))
    caches = [cache for pair in model.caches for cache in pair]
    before, said = [cache.clone() for cache in caches], []

    def body() -> None:
        said[:] = step(token, length)

    replay, found = captured(body), set()
    for _ in range(RUNS):
        for cache, old in zip(caches, before):
            cache.copy_(old)
        replay()
        found.add(hash_of([*said, *caches]))
    return found


CASES = {
    **{
        f"layer-{batch}-{'fp8' if fp8 else 'bf16'}": functools.partial(hashes_of_a_layer, batch, fp8)
        for batch in (1, 32)
        for fp8 in (True, False)
    },
    "loop-bf16": functools.partial(hashes_of_a_loop, False),
    "loop-fp8": functools.partial(hashes_of_a_loop, True),
    "verification": hashes_of_a_verification,
}


def without_dependent_launches(case: str) -> str:
    """What another process prints of a case that launches nothing early."""
    code = f"from tests.gpu.test_dependent import CASES; print(*CASES[{case!r}]())"
    env = {**os.environ, "TILEWRIGHT_DEPENDENT": "0"}
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=root, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.split("\n")[-2]


@pytest.mark.parametrize("case", CASES)
def test_a_hundred_replays_have_one_hash_with_dependent_launches_and_without(case, request):
    (found,) = CASES[case]()
    still_running(request.node.nodeid)  # the other process compiles all of it again
    assert without_dependent_launches(case) == found
    if case.startswith("layer"):
        assert begun_early(rms_norm_forward) and (begun_early(small_rows) or begun_early(small_rows_hopper))
    elif case == "verification":
        assert begun_early(cache_move_rows)
