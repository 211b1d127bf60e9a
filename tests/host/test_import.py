"""What importing costs and does not do, each in a process of its own that has imported torch and triton and nothing of ours."""

from __future__ import annotations

from collections.abc import Callable

import pytest

SECONDS = 1.0  # of CPU time that importing may add to torch and triton: a busy machine takes no more of it
TRIES = 3  # the first may read files that no process has read yet


@pytest.fixture
def python(forked) -> Callable[..., str]:
    """What such a process prints."""

    def run(code: str, **environment: str) -> str:
        done = forked(code, **environment)
        assert done.returncode == 0, done.stderr[-3000:]
        return done.stdout.strip()

    return run


@pytest.mark.parametrize("used", ["", "; tilewright.rms_norm"], ids=["import", "first use"])
def test_it_adds_less_than_a_second(python, used):
    code = f"import time; t = time.process_time(); import tilewright{used}; print(time.process_time() - t)"
    took = []
    for _ in range(TRIES):
        took.append(float(python(code)))
        if took[-1] < SECONDS:
            return
    raise AssertionError(f"importing took {took} CPU seconds")


def test_it_touches_no_gpu_and_no_driver(python):
    code = """
import sys, torch, tilewright as tw
assert [name for name in sys.modules if name.startswith("tilewright.")] == ["tilewright.names"], "import is not lazy"
tw.catalogue()
y = tw.rms_norm(torch.ones(2, 4))
assert y.shape == (2, 4)
assert not torch.cuda.is_initialized()
maps = open("/proc/self/maps").read()
assert "libcuda.so" not in maps, "the driver was loaded"
loaded = [name for name in sys.modules if name.split(".")[0] in ("typer", "rich", "transformers", "megatron", "jax")]
assert not loaded, loaded
assert "tilewright.bench" not in sys.modules
print("good")
"""
    assert python(code, CUDA_VISIBLE_DEVICES="") == "good"


def test_declaring_every_op_asks_for_no_compiler_of_torch(python):
    """Which takes 3 s to import. What is told to it all the same is told as its own decorator tells it."""
    code = """
import sys, tilewright as tw
tw.catalogue()
print([name for name in ("torch._dynamo", "torch._inductor") if name in sys.modules])
import torch
from tilewright.ops.quantise.quantize import stored_in
print(vars(torch.compiler.assume_constant_result(lambda: None)) == vars(stored_in))
"""
    assert python(code).split("\n") == ["[]", "True"]


def test_a_broken_driver_does_not_matter(python):
    """Triton's driver is not even asked for, so one that raises is not noticed."""
    code = """
import sys, triton
def broken(*_):
    raise RuntimeError("0 active drivers")
sys.modules["triton.runtime.driver"]._create_driver = broken  # `triton.runtime.driver` is an object of that module
import torch, tilewright as tw
tw.catalogue()
print(tuple(tw.rms_norm(torch.ones(2, 4)).shape))
"""
    assert python(code) == "(2, 4)"


def test_a_process_may_fork_after_importing(python):
    code = """
import os, torch, tilewright as tw
x = torch.ones(2, 4)
tw.rms_norm(x)
child = os.fork()
if child == 0:
    os._exit(0 if torch.equal(tw.rms_norm(x), tw.rms_norm(x)) else 1)
print(os.waitpid(child, 0)[1])
"""
    assert python(code) == "0"


def test_names(python, tmp_path):
    code = """
import tilewright as tw
names = dir(tw)
assert {"rms_norm", "glu", "cross_entropy", "quantize", "fp8", "Op", "kernel", "Draw", "Format", "Target"} <= set(names)
for name in names:
    getattr(tw, name)
for name in ("no_such_op", "_private", "rms_nrm"):
    try:
        getattr(tw, name)
    except AttributeError as error:
        assert name in str(error)
        assert ("did you mean rms_norm" in str(error)) == (name == "rms_nrm")
    else:
        raise SystemExit(f"{name} exists")
print(tw.__version__)
"""
    assert python(code, TILEWRIGHT_CACHE=str(tmp_path)) == "0.1.0"
    assert list(tmp_path.iterdir()) == []
