"""Gluon kernels under Triton's concurrency sanitizer, which notes who writes and reads shared memory behind which barrier, and
stops a kernel in which two may do so at once. Each in a process of its own: a kernel that was stopped takes its context with it,
and the mode is read when Triton is imported. Compiled so, a kernel takes minutes: calls are few and small."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
import triton

from tests.gpu import still_running
from tilewright.core.target import Target

pytestmark = pytest.mark.gpu
LIMIT = 550  # seconds for a process
PREPARED = """
import torch, triton
import tilewright as tw
torch.manual_seed(0)
# Where the sanitizer keeps its notes
triton.set_allocator(lambda size, alignment, stream: torch.zeros(size, dtype=torch.int8, device="cuda"))
def numbers(*shape):
    return torch.randn(shape, device="cuda").to(torch.bfloat16)
"""
# What each makes is compared with the same by portable kernels, so that a kernel which was left out would show
ATTENTION = """
q, k, v = numbers(1, 200, 2, 64), numbers(1, 200, 1, 64), numbers(1, 200, 1, 64)
def run(backend):
    return tw.attention(q, k, v, causal=True, backend=backend)
found, wanted = run("hopper"), run("portable")
"""
GRADIENTS = """
q, k, v = (numbers(1, 200, 1, 64).requires_grad_() for _ in range(3))
do = numbers(1, 200, 1, 64)
torch.autograd.set_multithreading_enabled(False)  # an allocator is that of the thread which set it
def run(backend):
    return torch.cat(torch.autograd.grad(tw.attention(q, k, v, causal=True, backend=backend), (q, k, v), do))
found, wanted = run("hopper"), run("portable")
"""
CALLS = {"attention": ATTENTION, "gradients": GRADIENTS}
# Two warps write to and read from one place, with nothing between: what the sanitizer has to see
RACE = """
from tilewright.core.triton_versions import TensorDescriptor, async_load, gl, gluon, mbarrier
@gluon.jit
def race(X, OUT, WAITS: gl.constexpr):
    at = gl.allocate_shared_memory(X.dtype, [64, 64], X.layout)
    bar = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(bar, count=1)
    mbarrier.expect(bar, X.block_type.nbytes)
    async_load(X, [0, 0], bar, at)
    if WAITS:
        mbarrier.wait(bar, 0)
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    x = at.load(layout)
    mbarrier.wait(bar, 0)
    row = gl.arange(0, 64, gl.SliceLayout(1, layout))[:, None]
    gl.store(OUT + row * 64 + gl.arange(0, 64, gl.SliceLayout(0, layout))[None, :], x)
    mbarrier.invalidate(bar)
wanted, found = numbers(64, 64), torch.empty(64, 64, dtype=torch.bfloat16, device="cuda")
layout = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)
race[(1,)](TensorDescriptor.from_tensor(wanted, [64, 64], layout), found, WAITS, num_warps=4)
"""


def ended(program: str, folder: Path, test: str) -> tuple[int, str]:
    """A process in which the sanitizer is on, after it has run the program and compared `found` with `wanted`: its status, and what
    it said. In a file: Triton reads the text of kernels."""
    after = """
    torch.cuda.synchronize()
    off = ((found.double() - wanted.double()).norm() / wanted.double().norm()).item()
    assert off < 1e-2, off
    print("compared")
    """
    text = "\n".join(map(textwrap.dedent, (PREPARED, program, after)))
    (folder / "program.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")]))
    env = {**os.environ, "PYTHONPATH": path, "TRITON_INSTRUMENTATION_MODE": "consan"}
    with (folder / "said").open("w") as said:
        process = subprocess.Popen([sys.executable, folder / "program.py"], env=env, stdout=said, stderr=said)
    begin = time.monotonic()
    while process.poll() is None:
        if time.monotonic() - begin > LIMIT:
            process.kill()
        still_running(test)
        time.sleep(2)
    return process.returncode, (folder / "said").read_text()


@pytest.fixture(autouse=True)
def sanitized():
    if not Target.at(torch.device("cuda")).hopper_gluon:
        pytest.skip("the kernels are Hopper's")
    if not hasattr(triton.knobs.compilation, "instrumentation_mode"):
        pytest.skip(f"Triton {triton.__version__} has no concurrency sanitizer")


@pytest.mark.parametrize("waits", [True, False])
def test_a_read_that_does_not_wait_is_seen(waits, tmp_path, request):
    status, said = ended(f"WAITS = {waits}\n{RACE}", tmp_path, request.node.nodeid)
    assert ("compared" if waits else "outstanding") in said and (status == 0) == waits, said[-2000:]


@pytest.mark.parametrize("name", CALLS)
def test_no_two_meet_in_shared_memory(name, tmp_path, request):
    status, said = ended(CALLS[name], tmp_path, request.node.nodeid)
    assert status == 0 and "compared" in said, said[-2000:]
