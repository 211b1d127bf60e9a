"""Which way a compiled kernel is launched, without a GPU: launchers that are known directly, every other by Triton's own call."""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import triton.language as tl
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw
from tilewright.core import private, triton_versions
from tilewright.core.nest import labels, leaves, mapped
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime import kernel as module
from tilewright.runtime import launch as launches
from tilewright.runtime import list_launch, plan, replay
from tilewright.runtime.kernel import argument_class, kernel
from tilewright.runtime.list_launch import ListLaunch

STREAM, FUNCTION, META = 99, 7, (4, 1, 0)
DIRECT = {"3.6": launches.CudaLaunch, "3.7": ListLaunch, "3.8": ListLaunch, "3.9": ListLaunch}
every_version = pytest.mark.parametrize("version", DIRECT)


def row_call(self, gridX, gridY, gridZ, stream, function, *args): ...


def list_call(
    self, gridX, gridY, gridZ, stream, function, kernel_metadata, launch_metadata, launch_enter_hook, launch_exit_hook, *args
): ...  # fmt: skip


def driver_of(version: str) -> ModuleType:
    """Triton's module for NVIDIA's driver, as far as launching goes. Its launchers keep what they are called with."""
    driver = ModuleType(f"driver_of_{version}")
    driver.launched, driver.refuses = [], None

    def launch(*args: Any) -> None:
        if driver.refuses is not None:
            raise driver.refuses
        driver.launched.append(args)

    def box(arg: Any, meta: dict) -> list:
        return [(arg.base.data_ptr(), tuple(arg.shape), meta["block_size"]), *arg.shape, *arg.strides]

    driver.CudaLauncher = type("CudaLauncher", (), {"__module__": driver.__name__, "launch": staticmethod(launch)})
    driver.CudaLauncher.__call__ = row_call if version == "3.6" else list_call
    if version == "3.6":
        driver._BASE_ARGS_FORMAT = "iiiKKppOOOOOO"
        return driver
    active = SimpleNamespace(utils=SimpleNamespace(launch=launch))
    driver.triton = SimpleNamespace(runtime=SimpleNamespace(driver=SimpleNamespace(active=active)))
    driver.annotate_arguments = lambda types: ["kernel"] * len(types)
    driver.make_tensordesc_arg = box if version == "3.7" else lambda arg, meta, base_args: box(arg, meta)
    return driver


class Compiled:
    """What Triton's compiler returns, as far as launching it goes."""

    function, packed_metadata = FUNCTION, META

    def __init__(
        self, driver: ModuleType, types: tuple = ("*fp32", "i32"), scratch: int = 0, launcher: str = "CudaLauncher"
    ):
        self.run = driver.CudaLauncher() if launcher == "CudaLauncher" else type(launcher, (), {})()
        self.run.global_scratch_size, self.run.profile_scratch_size = scratch, 0
        self.run.launch_cooperative_grid, self.run.launch_pdl = False, True
        flat = [t for _, t in leaves(types) if t != "constexpr"]
        self.run.kernel_signature = b"".join(b"x" * (5 if t.startswith("tensordesc") else 1) for t in flat)
        self.src = SimpleNamespace(signature=dict(enumerate(types)))
        self.metadata = SimpleNamespace(
            tensordesc_meta=[{"block_size": [8, 8]} for t in flat if t.startswith("tensordesc")]
        )
        self.public: list[tuple] = []

    def __getitem__(self, grid: tuple) -> Any:
        return lambda *args: self.public.append((grid, args))


@kernel(grid=lambda a: (3,))
def nothing(X, N):
    pass


@pytest.fixture
def drivers(monkeypatch):
    """A driver's module for each version."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    for launching in (launches, list_launch, replay):
        monkeypatch.setattr(launching, "raw_stream", lambda device: STREAM)
    monkeypatch.setattr(module, "_said", set())
    monkeypatch.setattr(nothing, "_direct", {})
    found = {version: driver_of(version) for version in DIRECT}
    for driver in found.values():
        monkeypatch.setitem(sys.modules, driver.__name__, driver)
    triton_versions.launcher_of.cache_clear()
    yield found
    triton_versions.launcher_of.cache_clear()


@pytest.fixture
def prepared(monkeypatch, drivers):
    """The launch made of a compiled kernel."""

    def prepare(compiled: Compiled, ordered: list | None = None) -> Any:
        monkeypatch.setattr(nothing, "variant", lambda *_: compiled)
        return nothing._prepare(ordered or [None, 5], {}, (3,), 0)

    return prepare


def own_of(version: str, launched: tuple) -> list:
    """The kernel's own arguments of a launch; what goes before them is as that version's launcher takes it."""
    if version == "3.6":
        head, own = launched[:13], list(launched[13:])
        assert head[1:] == (1, 1, STREAM, FUNCTION, False, True, None, None, META, None, None, None)
    else:
        *head, own = launched
        annotations = ["kernel"] * len(own)
        assert head[1:13] == [1, 1, STREAM, FUNCTION, False, True, META, None, None, None, None, None]
        assert head[13:] == [annotations, b"x" * len(own)]
    return own


def test_the_installed_launcher_is_known():
    assert triton_versions.launches_directly()


@every_version
def test_known_launcher_is_called_directly_after_a_trial_that_launches_nothing(prepared, drivers, version):
    compiled, driver = Compiled(drivers[version]), drivers[version]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launch = prepared(compiled)
        assert type(launch) is DIRECT[version]
    assert [args[0] for args in driver.launched] == [0]  # of programs
    launch.first()
    assert driver.launched[1][0] == 3 and own_of(version, driver.launched[1]) == [None, 5]
    assert type(prepared(compiled)) is DIRECT[version] and len(driver.launched) == 2  # a variant is tried once
    assert not compiled.public


@every_version
def test_a_refused_trial_leaves_the_kernel_to_the_public_call_and_says_so_once(prepared, drivers, version):
    drivers[version].refuses = TypeError("function takes 14 arguments")
    compiled = Compiled(drivers[version])
    with pytest.warns(RuntimeWarning, match="refused nothing: function takes 14 arguments"):
        launch = prepared(compiled)
    assert isinstance(launch, launches.PublicLaunch) and launch.bind is None
    launch.first()
    assert compiled.public == [((3, 1, 1), (None, 5))]
    drivers[version].refuses = None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert isinstance(prepared(compiled), launches.PublicLaunch)
    assert not drivers[version].launched


def test_an_error_of_the_driver_is_no_refusal(prepared, drivers):
    drivers["3.9"].refuses = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    with pytest.raises(RuntimeError, match="illegal memory"):
        prepared(Compiled(drivers["3.9"]))


def test_arguments_that_are_not_as_compiled_are_refused(prepared, drivers):
    for types in (("*fp32",), ("*fp32", "i32", "i32"), ("*fp32", ("i32", "i32"))):
        with pytest.warns(RuntimeWarning, match="public launch"):
            assert isinstance(prepared(Compiled(drivers["3.9"], types)), launches.PublicLaunch)


def changed(driver: ModuleType, **attributes: Any) -> ModuleType:
    for name, value in attributes.items():
        delattr(driver, name) if value is None else setattr(driver, name, value)
    return driver


@pytest.mark.parametrize(
    "change",
    [
        lambda drivers: {"driver": drivers["3.9"], "launcher": "SomeLauncher"},
        lambda drivers: {"driver": changed(drivers["3.6"], _BASE_ARGS_FORMAT="iiiKKppOOOOOOO")},
        lambda drivers: {"driver": changed(drivers["3.9"], annotate_arguments=None)},
        lambda drivers: (setattr(drivers["3.9"].CudaLauncher, "__call__", row_call), {"driver": drivers["3.9"]})[1],
    ],
    ids=("name", "head", "functions", "order"),
)
def test_another_launcher_falls_back_and_says_so_once(prepared, drivers, change):
    compiled = Compiled(**change(drivers))
    with pytest.warns(RuntimeWarning, match="public launch, which costs the host more per call .*not known"):
        launch = prepared(compiled)
    assert isinstance(launch, launches.PublicLaunch)
    launch.first()
    assert compiled.public == [((3, 1, 1), (None, 5))]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        prepared(Compiled(**{"driver": drivers["3.9"], "launcher": "SomeLauncher"}))


@every_version
def test_scratch_memory_and_hooks_take_tritons_own_call(prepared, drivers, version, monkeypatch):
    assert isinstance(prepared(Compiled(drivers[version], scratch=64)), launches.PublicLaunch)
    hooked = SimpleNamespace(runtime=SimpleNamespace(launch_enter_hook=print, launch_exit_hook=None))
    monkeypatch.setattr(module.triton, "knobs", hooked)
    assert isinstance(prepared(Compiled(drivers[version])), launches.PublicLaunch)


def test_contraction_is_stated(monkeypatch):
    """Triton 3.10 changes the default, and bits are promised."""
    seen = {}
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(
        nothing.jit, "warmup", lambda *args, **options: seen.update(options) or SimpleNamespace(run=None, asm={})
    )
    monkeypatch.setattr(nothing, "variants", {})
    nothing.variant([None, 5], {"num_warps": 2}, (3,), 0)
    assert seen == {"grid": (3,), "num_warps": 2, "enable_fp_fusion": True}


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


class Descriptor:
    """A tensor descriptor, as far as launching goes."""

    def __init__(self, base: torch.Tensor) -> None:
        self.base, self.shape, self.strides = base, list(base.shape), list(base.stride())
        self.block_shape, self.layout = [8, 8], "layout"


@every_version
def test_a_replay_puts_the_addresses_of_its_own_call_into_tuples(drivers, version):
    """What is no tensor stays, also a tuple that is constant; a launch keeps no tensor alive."""
    x, y = torch.zeros(8), torch.zeros(8)
    types = ("*fp32", ("*fp32", "i32"), (("*fp32", "constexpr"), "*fp32"), "constexpr", "i32")
    compiled = Compiled(drivers[version], types)
    with plan.Recorder([x, y]) as recorder:
        ordered = [x, Pair(y[2:], 5), ((x, None), y), ("a word", 1), 7]
        recorder.launch(DIRECT[version](compiled, (3,), ordered), ordered)
    launch, places = recorder.launches[0]
    replay = launch.bind(places)
    replay([], [1000, 2000])
    own = own_of(version, drivers[version].launched[0])
    if version == "3.6":
        assert own == [1000, (2008, 5), ((1000, None), 2000), ("a word", 1), 7]
    else:
        assert own == [1000, 2008, 5, 1000, 2000, 7]  # flat, and without constants


@every_version
def test_a_replay_makes_descriptors_of_its_own_call(drivers, version):
    x, n = torch.zeros(16, 16), torch.zeros(16, 16)
    compiled = Compiled(drivers[version], ("i32", "tensordesc<fp32[8,8],layout>"))
    with plan.Recorder([x]) as recorder:
        ordered = [3, Descriptor(x)]
        recorder.launch(DIRECT[version](compiled, (3,), ordered), ordered)
    launch, places = recorder.launches[0]
    replay = launch.bind(places)
    for _ in range(2):  # the second time it is remembered
        replay([n], [n.data_ptr()])
        own = own_of(version, drivers[version].launched.pop())
        if version == "3.6":
            assert own[0] == 3 and own[1].base is n and own[1].block_shape == [8, 8]
        else:
            assert own == [3, (n.data_ptr(), (16, 16), [8, 8]), 16, 16, 16, 1]
    replay([x], [x.data_ptr()])
    box = own_of(version, drivers[version].launched.pop())[1]
    assert (box.base is x) if version == "3.6" else box[0] == x.data_ptr()


def recorded(version: str, driver: ModuleType, given: list[torch.Tensor], made: int) -> tuple[Any, plan.Recorder]:
    """(what was allocated, the recorder) of a run that is one launch: the kernel takes allocations first, then what was given in
    another order."""
    types = (*["*fp32"] * made, "constexpr", *["*fp32"] * len(given), "i32")
    with plan.Recorder(given) as recorder:
        results = [torch.empty(8) for _ in range(made)]
        ordered = [*results, None, *reversed(given), 5]
        recorder.launch(DIRECT[version](Compiled(driver, types), (3,), ordered), ordered)
    return results, recorder


@pytest.fixture
def straight(monkeypatch):
    """No plan takes the way of plans with several launches."""
    for launch in (launches.CudaLaunch, ListLaunch):
        monkeypatch.setattr(launch, "bind", lambda *_: pytest.fail("bound"))


@every_version
@pytest.mark.parametrize("count", [1, 2, 3, 4])  # up to three are read one by one
@pytest.mark.parametrize("made", [0, 1, 2])
def test_the_only_launch_of_a_plan_is_made_with_the_addresses_of_the_call(drivers, straight, version, count, made):
    launched = drivers[version].launched
    results, recorder = recorded(version, drivers[version], [torch.zeros(8) for _ in range(count)], made)
    function = recorder.plan(results[0] if made == 1 else (*results, None)).function
    given = [torch.zeros(8) for _ in range(count)]
    for _ in range(2):
        found = function(tuple(given))
        found = (found,) if made == 1 else found[:-1]
        assert len(found) == made and all(t.shape == (8,) for t in found)
        own = [v for v in own_of(version, launched.pop()) if v is not None]
        assert own == [t.data_ptr() for t in (*found, *reversed(given))] + [5] and not launched
    for at in range(count):
        shifted = [torch.zeros(9)[1:] if i == at else t for i, t in enumerate(given)]
        assert function(shifted) is None and not launched


@every_version
def test_the_only_launch_of_a_plan_may_take_slots_in_tuples_in_parts_and_more_than_once(drivers, version):
    """An argument within a slot, one that is there twice, a tuple of one and a tuple in a tuple beside constants; a result that is
    one of two allocations; an argument that the kernel does not get."""
    x, z, unread = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    types = (("*fp32", "*fp32", "i32"), "*fp32", ("*fp32",), (("*fp32", "i32"), "*fp32", "i32"), "*fp32", "i32")
    with plan.Recorder([x, z, unread]) as recorder:
        y, temporary = torch.empty(8), torch.empty(4)
        ordered = [(x, x[4:], 5), z[2:], (y,), ((temporary, 6), z, 7), y, 8]
        recorder.launch(DIRECT[version](Compiled(drivers[version], types), (3,), ordered), ordered)
    function, given = recorder.plan((y, None)).function, [torch.zeros(8) for _ in range(3)]
    for _ in range(2):
        found, none = function(tuple(given))
        own = own_of(version, drivers[version].launched.pop())
        first, second, made = given[0].data_ptr(), given[1].data_ptr(), found.data_ptr()
        room = own[3][0][0] if version == "3.6" else own[5]
        assert none is None and found.shape == (8,) and room not in (first, second, made, 0)
        wanted = [(first, first + 16, 5), second + 8, (made,), ((room, 6), second, 7), made, 8]
        assert own == (wanted if version == "3.6" else [v for _, v in leaves(wanted)])
    assert not drivers[version].launched
    assert function((*given[:2], torch.zeros(9)[1:])) is None and not drivers[version].launched


@every_version
def test_a_launch_that_is_not_the_only_one_or_takes_a_part_is_bound(drivers, version):
    """Two launches; a view; an argument that no launch takes."""
    for views in (False, True):
        x, z = torch.zeros(8), torch.zeros(8)
        with plan.Recorder([x, z]) as recorder:
            y = torch.empty(8)
            for tensor in (x[4:],) if views else (x, z):
                ordered = [tensor, None, y]
                compiled = Compiled(drivers[version], ("*fp32", "constexpr", "*fp32"))
                recorder.launch(DIRECT[version](compiled, (3,), ordered), ordered)
        found = recorder.plan(y).function((x, z))
        own = [[v for v in own_of(version, args) if v is not None] for args in drivers[version].launched]
        first = x.data_ptr() + 16 * views
        assert own == [[first, found.data_ptr()], [z.data_ptr(), found.data_ptr()]][: 2 - views]
        drivers[version].launched.clear()
        shifted = torch.zeros(9)[1:]
        assert recorder.plan(y).function((x, shifted)) is None and not drivers[version].launched  # not aligned
    with_box = Compiled(drivers[version], ("tensordesc<fp32[8,8],layout>", "*fp32"))
    launch = DIRECT[version](with_box, (3,), [Descriptor(torch.zeros(16, 16)), torch.zeros(8)])
    assert launch.sent([(0,), (1,)]) is None


@every_version
def test_memory_that_host_code_keeps_is_an_argument_of_each_launch(drivers, version):
    x, kept, used = torch.zeros(8), torch.zeros(8), []
    with plan.Recorder([x]) as recorder:
        recorder.adopt(kept, lambda: used.append(1))
        compiled = Compiled(drivers[version], ("*fp32", "*fp32"))
        recorder.launch(DIRECT[version](compiled, (3,), [kept, x]), [kept, x])
    assert recorder.plan(()).function((x,)) == () and used == [1]
    assert own_of(version, drivers[version].launched.pop()) == [kept.data_ptr(), x.data_ptr()]


@every_version
@pytest.mark.parametrize("launches", [1, 2])
def test_memory_that_is_written_is_apart_in_every_call(drivers, version, launches):
    room = torch.zeros(64)
    x, w, out = room[:8], room[16:24], room[32:40]
    with plan.Recorder([x, w, out]) as recorder:
        for _ in range(launches):
            compiled = Compiled(drivers[version], ("*fp32", "*fp32", "*fp32"))
            recorder.launch(DIRECT[version](compiled, (3,), [x, w, out]), [x, w, out])
    made, launched = recorder.plan((), written=(2,)), drivers[version].launched
    for start in (32, 8, 24, 0, 4, 12, 16, 20):
        meets = start not in (32, 8, 24)
        given = x, w, room[start : start + 8]
        assert made.apart([t.data_ptr() for t in given]) is not meets
        assert made.function(given) == (None if meets else ()) and len(launched) == launches * (not meets)
        launched.clear()
        assert made.function(given, True) == () and len(launched) == launches  # who asks for it has looked
        launched.clear()


@every_version
@pytest.mark.parametrize("launches", [1, 2])
def test_a_plan_of_a_call_that_was_not_aligned_is_for_such_calls(drivers, version, launches):
    x = torch.zeros(9)[1:]
    with plan.Recorder([x]) as recorder:
        for _ in range(launches):
            recorder.launch(DIRECT[version](Compiled(drivers[version], ("*fp32",)), (3,), [x]), [x])
    assert recorder.plan(()).function((x,)) == () and len(drivers[version].launched) == launches


@pytest.mark.parametrize("current", [0, 1])
def test_a_plan_runs_on_the_device_of_its_tensors(monkeypatch, current):
    entered = []

    class Device:
        def __init__(self, device: torch.device) -> None:
            entered.append(device.index)

        def __enter__(self) -> None:
            entered.append("in")

        def __exit__(self, *error: Any) -> None:
            entered.append("out")

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "device", Device)
    made = replay._on_device(
        torch.device("cuda", 0), lambda tensors, meeting: (entered.append("run"), tensors, meeting)
    )
    assert made("tensors", True)[1:] == ("tensors", True)
    assert entered == (["run"] if current == 0 else [0, "in", "run", "out"])
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert replay._on_device(torch.device("cuda", 0), print) is print


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


# ---- dependent launches


def add_one(X, N, LEADS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr):
    pass


def dependent_kernel(dependent: Any = True) -> module.Kernel:
    default = {"BLOCK": 128, "num_warps": 2}
    return module.Kernel(add_one, lambda a: (3,), default=lambda a: default, dependent=dependent)


def asked(one: module.Kernel, arch: str, **constants: Any) -> tuple[bool, bool]:
    """Of a launch on a chip: what its programs are told, and whether it asks to begin early."""
    with pretend(TARGETS[arch]), module.collect() as found:
        one(torch.empty(8), 8, **{"LEADS": False, **constants})
    (wanted,) = found
    assert wanted.options.keys() <= {"num_warps", "launch_pdl"} and wanted.options.get("launch_pdl") in (None, True)
    return wanted.ordered[-1], wanted.options.get("launch_pdl", False)


def test_a_dependent_kernel_asks_to_begin_early_where_a_chip_can():
    for arch, target in TARGETS.items():
        assert asked(dependent_kernel(), arch) == (target.early_launch, target.early_launch)
    assert {target.early_launch for target in TARGETS.values()} == {True, False}


def test_a_function_says_which_launches_are_dependent():
    one = dependent_kernel(lambda a: not a.LEADS)
    assert asked(one, "sm_90") == (True, True) and asked(one, "sm_90", LEADS=True) == (False, False)


def test_no_launch_begins_early_in_an_interpreter_or_where_that_is_switched_off(monkeypatch):
    for name, value in (("INTERPRETING", True), ("EARLY", False)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, value)
            assert asked(dependent_kernel(), "sm_90") == (False, False)


@pytest.mark.parametrize("said", ["0", "1", ""])
def test_the_environment_switches_dependent_launches_off(forked, said):
    done = forked("from tilewright.runtime import kernel; print(kernel.EARLY)", TILEWRIGHT_DEPENDENT=said)
    assert done.stdout.strip() == str(said != "0"), done.stderr


def test_the_constant_is_the_kernel_s_own():
    with pytest.raises(TypeError, match="not for callers"):
        asked(dependent_kernel(), "sm_90", DEPENDENT=False)
    for function, dependent in ((add_one, False), (nothing.jit.fn, True)):
        with pytest.raises(TypeError, match="if and only if"):
            module.Kernel(function, lambda a: (3,), dependent=dependent)


def test_launches_that_begin_early_are_variants_of_their_own():
    one = dependent_kernel()
    early, late = ([torch.empty(8), 8, False, 128, said] for said in (True, False))
    assert one.key(early, {"num_warps": 2, "launch_pdl": True}, 0) != one.key(late, {"num_warps": 2}, 0)


# ---- calls of torch's own


class Seen(TorchDispatchMode):
    """The operators that come to the dispatcher."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def calling(
    function: Callable[..., Any], views: Callable[[torch.Tensor], Sequence[torch.Tensor]], given: torch.Tensor
) -> Callable[..., Any]:
    """The function of a plan that is one call of torch's own: of views of what is given, of nothing, and of the result."""
    with torch.no_grad(), plan.Recorder([given]) as recorder:
        result = torch.empty(4)
        plan.Call.now(function, *views(given), None, result)
    return recorder.plan(result).function


def test_a_call_of_torch_s_own_gets_slots_as_they_are_and_views_past_the_dispatcher():
    called = []
    make = calling(
        lambda *given: called.append(given), lambda x: (x, x.t(), x[1:].view(-1), x.t().t()), torch.zeros(4, 8)
    )
    assert len(called) == 1
    room = torch.arange(48.0)
    for start in (0, 8, 16):  # each slot begins elsewhere in its storage
        x = room[start : start + 32].view(4, 8)
        with Seen() as seen:
            made = make((x,))
        first, turned, flat, again, nothing, result = called[-1]
        assert first is x and again is x and nothing is None and result is made
        assert torch.equal(turned, x.t()) and torch.equal(flat, x[1:].flatten())
        assert turned.data_ptr() == x.data_ptr() and flat.data_ptr() == x[1].data_ptr()
        assert seen.names == ["aten.empty_strided.default"]  # the result


def test_a_call_of_torch_s_own_may_see_memory_as_another_dtype():
    called = []
    make = calling(lambda *given: called.append(given), lambda x: (x.view(torch.uint8),), torch.zeros(2, 8))
    x = torch.randn(2, 8)
    make((x,))
    assert called[-1][0].dtype == torch.uint8 and torch.equal(called[-1][0], x.view(torch.uint8))


@pytest.mark.parametrize("direct", [True, False])
def test_autograd_records_nothing_of_a_call_of_torch_s_own(monkeypatch, direct):
    """Where no tensor wants a gradient it is not even told so; neither where torch makes views that autograd knows."""
    if not direct:
        monkeypatch.setattr(launches, "strided_view", private.strided_view_of(None))
    recorded = []

    def doubled(x: torch.Tensor, turned: torch.Tensor, nothing: None, y: torch.Tensor) -> None:
        recorded.append(torch.is_grad_enabled())
        torch.mul(turned[:, 0], 2.0, out=y)

    make = calling(doubled, lambda x: (x, x.t()), torch.zeros(4, 4))
    recorded.clear()
    for wants, enabled in itertools.product((False, True), repeat=2):
        x = torch.randn(4, 4, requires_grad=wants)
        with torch.set_grad_enabled(enabled):
            y = make((x,))
            assert torch.is_grad_enabled() is enabled
        assert torch.equal(y, 2 * x[0]) and not y.requires_grad and not y._is_view()
        assert recorded.pop() is (enabled and not wants)


def test_a_view_past_the_last_element_is_looked_at_in_each_call():
    """Rows padded to four, as cuBLASLt reads scales: where memory ends before the padding does, nothing reads on."""

    def padded(storage: int) -> torch.Tensor:
        return torch.arange(float(storage)).as_strided((2, 3), (4, 1))

    called = []
    make = calling(lambda *given: called.append(given), lambda x: (x.as_strided((4, 2), (1, 4)),), padded(8))
    make((padded(8),))
    assert called[-1][0].tolist() == [[0.0, 4.0], [1.0, 5.0], [2.0, 6.0], [3.0, 7.0]]
    with pytest.raises(RuntimeError, match="out of bounds"):
        make((padded(7),))
    assert len(called) == 2


def test_a_call_of_torch_s_own_keeps_no_tensor_alive():
    x = torch.zeros(4, 4)
    make = calling(lambda *given: None, lambda x: (x, x.t()), x)
    kept = weakref.ref(x)
    del x
    assert kept() is None and make((torch.zeros(4, 4),)).shape == (4,)
