"""A config forced while it is measured: the kernel runs with it, its result is compared, and nothing of it stays behind."""

from __future__ import annotations

import pytest

import tilewright as tw
from tests.pretended import Pretended
from tilewright.bench import tune
from tilewright.runtime.kernel import Kernel

DIMS = {"tokens": 3, "hidden": 40}
KEY = {"N": 40}
DEFAULT, OTHER = ({"ROWS": rows, "COLS": 64, "num_warps": 4} for rows in (2, 4))


@pytest.fixture
def seen(monkeypatch):
    """The ROWS that glu's kernels were launched with."""
    found = []
    real = Kernel._prepare

    def prepare(self, ordered, options, grid, device):
        if self.name.startswith("glu_"):
            found.append((self.name, dict(zip(self.names, ordered))["ROWS"]))
        return real(self, ordered, options, grid, device)

    monkeypatch.setattr(Kernel, "_prepare", prepare)
    return found


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_the_kernel_runs_with_the_config_and_is_compared(seen, direction, monkeypatch):
    monkeypatch.setattr(tune.timing, "plan", lambda nbytes, l2: (2, 2))
    op, kernel = tw.catalogue()["glu"], f"glu_{direction}"
    with tw.force("triton"):
        subject = tune.Subject(op, DIMS, "", direction, Pretended())
        seen.clear()
        assert set(subject.measure(kernel, KEY, DEFAULT, OTHER)) == {"us", "method"}
        assert set(seen) == {(kernel, 2), (kernel, 4)}
        assert not op.plans and not op.backward_plans  # else later calls would run with the last candidate
        seen.clear()
        subject.measure(kernel, KEY, DEFAULT, DEFAULT)
        assert set(seen) == {(kernel, 2)}
        with pytest.raises(tune.Differs, match="does not launch"):
            subject.measure(kernel, {"N": 41}, DEFAULT, OTHER)
        subject.measure(kernel, KEY, DEFAULT, OTHER)
        subject._right[1][0].add_(1.0)
        with pytest.raises(tune.Differs, match="from the default's"):
            subject.measure(kernel, KEY, DEFAULT, OTHER)
