"""Programs in processes of their own, of which not each imports torch and triton: that takes longer than most of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FORKS = """
import json, os, runpy, signal, sys, torch, triton
for line in sys.stdin:
    folder, environment = json.loads(line)
    if os.fork() == 0:
        signal.alarm(120)
        os.chdir(folder)
        os.environ.update(environment)
        for at, name in enumerate(("stdout", "stderr"), 1):
            os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), at)
        runpy.run_path("program.py", run_name="__main__")
        sys.exit()
    print(os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
"""


@pytest.fixture(scope="module")
def forked(tmp_path_factory) -> Iterator[Callable[..., subprocess.CompletedProcess[str]]]:
    """Run a program, with these names in its environment, in a child of a process that has imported torch and triton and nothing
    of ours."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKS], env=env, **pipes) as parent:

        def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
            folder = tmp_path_factory.mktemp("program")
            (folder / "program.py").write_text(code)
            print(json.dumps([str(folder), environment]), file=parent.stdin, flush=True)
            status = int(parent.stdout.readline())
            written = ((folder / name).read_text() for name in ("stdout", "stderr"))
            return subprocess.CompletedProcess(code, status, *written)

        yield run
