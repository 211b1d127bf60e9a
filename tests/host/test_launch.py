"""Which way a compiled kernel is launched, without a GPU: the launcher that is known directly, every other by Triton's own call."""

from __future__ import annotations

import warnings
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

import tilewright as tw
from tilewright.core.nest import labels, leaves, mapped
from tilewright.runtime import kernel as module
from tilewright.runtime import plan
from tilewright.runtime.kernel import argument_class, kernel


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


# ---- tuples as arguments ---------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    data: Any
    stride: Any


def test_leaves_of_arguments_and_their_names():
    given = [3, Pair("x", (1, None)), ("y", 2)]
    assert list(leaves(given)) == [
        ((0,), 3),
        ((1, 0), "x"),
        ((1, 1, 0), 1),
        ((1, 1, 1), None),
        ((2, 0), "y"),
        ((2, 1), 2),
    ]
    assert labels("A", given[1]) == {(0,): "A.data", (1, 0): "A.stride.0", (1, 1): "A.stride.1"}
    assert labels("A", 3) == {(): "A"}
    doubled = mapped(lambda path, leaf: (path, leaf), Pair("x", (1,)))
    assert doubled == Pair(((0,), "x"), (((1, 0), 1),)) and isinstance(doubled, Pair)


def test_a_replay_puts_the_addresses_of_its_own_call_into_tuples(monkeypatch):
    """What is no tensor stays, also a tuple of the launcher's own; a launch keeps no tensor alive."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(plan, "raw_stream", lambda device: 99)
    compiled, launched = Compiled("CudaLauncher"), []
    compiled.packed_metadata = (1, 2)
    compiled.run.launch = lambda *args: launched.append(args)
    x, y = torch.zeros(8), torch.zeros(8)
    with plan.Recorder([x, y]) as recorder:
        ordered = [x, Pair(y[2:], 5), ((x, None), y), ("a word", 1), 7]
        recorder.launch(plan.CudaLaunch(compiled, (3,), ordered), ordered)
    launch, places = recorder.launches[0]
    replay = launch.bind(places)
    replay([], [1000, 2000])
    head, own = launched[0][: plan.CudaLaunch.HEAD], launched[0][plan.CudaLaunch.HEAD :]
    assert own == (1000, (2008, 5), ((1000, None), 2000), ("a word", 1), 7)
    assert head[3] == 99 and head[9] == (1, 2)


def test_the_variant_depends_on_what_lies_in_a_tuple():
    one = argument_class(Pair(torch.zeros(8), 16), True)
    assert one == argument_class(Pair(torch.ones(8), 32), True)
    others = [
        Pair(torch.zeros(8), 1),
        Pair(torch.zeros(8), 17),
        Pair(None, 16),
        Pair(torch.zeros(8).half(), 16),
        (torch.zeros(8),),
    ]
    assert all(argument_class(other, True) != one for other in others)
    assert argument_class(Pair(torch.zeros(8), 17), False) == argument_class(Pair(torch.zeros(8), 1), False)
