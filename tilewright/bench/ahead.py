"""The variants that a rival's autotuner times, compiled side by side: `triton.autotune` compiles one after the other, which takes
minutes where there are a hundred."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import triton
from triton.runtime.autotuner import Autotuner


@contextlib.contextmanager
def compiled_ahead(threads: int = os.cpu_count() or 1) -> Iterator[None]:
    """Inside, all variants that an autotuner will time are compiled, by several threads, before it times the first. What it times
    and what it chooses stay its own; a variant that does not compile fails where it would have."""
    plain = Autotuner.run

    def run(self: Autotuner, *args: Any, **kwargs: Any) -> Any:
        if len(self.configs) > 1:
            given = {name: value for name, value in kwargs.items() if name != "warmup"}
            with ThreadPoolExecutor(threads) as executor, triton.AsyncCompileMode(executor, ignore_errors=True):
                self.warmup(*args, **given)
        return plain(self, *args, **kwargs)

    Autotuner.run = run
    try:
        yield
    finally:
        Autotuner.run = plain
