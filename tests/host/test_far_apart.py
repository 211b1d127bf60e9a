"""The process in which tensors are spread far apart ends with the status of its work, whatever its threads are doing."""

from __future__ import annotations

import pytest

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
def test_a_thread_that_is_left_does_not_change_the_status(forked, then, status, says):
    done = forked(CHILD.format(then=then))
    assert done.returncode == status and says in done.stderr, (done.returncode, done.stderr[-2000:])
