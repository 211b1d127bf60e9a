"""The process in which tensors are spread far apart ends with the status of its work, whatever its threads are doing."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# A thread inside of torch, as autograd's may be after a backward. With `work()` alone the status is -6, before Python 3.14
CHILD = """
import sys, threading, time
import torch
from tilewright.check.far_apart import end_after

def multiply():
    a = torch.ones(256, 256)
    while True:
        a @ a

def work():
    threading.Thread(target=multiply, daemon=True).start()
    time.sleep(0.2)
    {then}

end_after(work, sys.stderr)
"""


@pytest.mark.parametrize(
    "then, status, says", [("pass", 0, ""), ("raise ValueError('a wrong number')", 1, "a wrong number")]
)
def test_a_thread_that_is_left_does_not_change_the_status(then, status, says):
    code = CHILD.format(then=then)
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == status and says in done.stderr, (done.returncode, done.stderr[-2000:])
