"""Which way a compiled kernel is launched, without a GPU: the launcher that is known directly, every other by Triton's own call."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import tilewright as tw
from tilewright.runtime import kernel as module
from tilewright.runtime import plan
from tilewright.runtime.kernel import kernel


class Compiled:
    """What Triton's compiler returns, as far as launching it goes."""

    function, packed_metadata = 7, ()

    def __init__(self, launcher: str, scratch: int = 0) -> None:
        settings = {"global_scratch_size": scratch, "profile_scratch_size": 0}
        settings |= {"launch_cooperative_grid": False, "launch_pdl": False, "launch": None}
        self.run = type(launcher, (), settings)()
        self.launched: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args: self.launched.append((grid, args))


@kernel(grid=lambda a: (3,))
def nothing(X, N):
    pass


@pytest.fixture
def prepared(monkeypatch):
    """The launch made of a compiled kernel."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(module, "_said", set())

    def prepare(compiled: Compiled, known: bool = True) -> Any:
        monkeypatch.setattr(module, "PRIVATE_LAUNCHER", known)
        monkeypatch.setattr(nothing, "variant", lambda *_: compiled)
        return nothing._prepare([None, 5], {}, (3,), 0)

    return prepare


def test_known_launcher_is_called_directly(prepared):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(prepared(Compiled("CudaLauncher")), plan.CudaLaunch)


@pytest.mark.parametrize(("launcher", "known"), [("CudaLauncher", False), ("SomeLauncher", True)])
def test_another_launcher_falls_back_and_says_so_once(prepared, launcher, known):
    compiled = Compiled(launcher)
    with pytest.warns(RuntimeWarning, match="public launch"):
        launch = prepared(compiled, known)
    assert isinstance(launch, plan.PublicLaunch)
    launch.first()
    assert compiled.launched == [((3, 1, 1), (None, 5))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(Compiled(launcher), known)


def test_scratch_memory_and_hooks_take_tritons_own_call(prepared, monkeypatch):
    assert isinstance(prepared(Compiled("CudaLauncher", scratch=64)), plan.PublicLaunch)
    hooked = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=print, launch_exit_hook=None))
    monkeypatch.setattr(module.triton, "knobs", hooked)
    assert isinstance(prepared(Compiled("CudaLauncher")), plan.PublicLaunch)


def test_warmup_on_a_cpu_has_nothing_to_do():
    x = torch.randn(3, 8)
    tw.warmup(tw.rms_norm, x)
    with pytest.raises(ValueError, match="weight"):
        tw.warmup(tw.rms_norm, x, torch.ones(7))
    with pytest.raises(TypeError, match="function must be an operation of tilewright's, got builtin_function"):
        tw.warmup(print)
