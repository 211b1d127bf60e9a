"""The measuring code itself, on a pretended device: what is timed, what is checked, and what survives a bad case."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch

import tilewright as tw
from tilewright.bench import cases, check, floor, run, timing

ROOT = Path(__file__).resolve().parents[2]
MIB = 1 << 20


# --------------------------------------------------------------------------------------------------------------- timing


class Pretended:
    """A device with a clock of its own: calls cost what they say, replays repeat what was captured."""

    def __init__(self, capturable: bool = True) -> None:
        self.now = 0.0
        self.recording: list | None = None
        self.capturable = capturable
        self.flushes = 0

    def l2_bytes(self) -> int:
        return 60 * MIB

    def synchronize(self) -> None:
        pass

    def work(self, cost: float, effect=lambda: None) -> None:
        def happen() -> None:
            self.now += cost
            effect()

        if self.recording is None:
            happen()
        else:
            self.recording.append(happen)

    def capture(self, body):
        if not self.capturable:
            raise timing.CannotCapture("it copies to the host")
        self.recording = []
        body()
        recorded, self.recording = self.recording, None

        def replay() -> None:
            for happen in recorded:
                happen()

        return replay

    def mark(self) -> float:
        return self.now

    def elapsed_us(self, start: float, end: float) -> float:
        return end - start

    def flush(self) -> None:
        self.flushes += 1
        self.now += 1000.0


@pytest.mark.parametrize("nbytes", [1, 100_000, 68 * MIB, 240 * MIB, 5000 * MIB])
def test_plan_outgrows_the_cache(nbytes):
    sets, calls = timing.plan(nbytes, 60 * MIB)
    assert sets >= 2 and calls % sets == 0 and sets <= calls <= 8 * sets
    assert sets * nbytes >= 4 * 60 * MIB or sets == 64
    assert timing.plan(nbytes, 60 * MIB, once=True) == (sets, sets)


def test_graph_time_is_a_median_call():
    device = Pretended()
    costs = iter([10.0, 30.0])

    def make():
        cost = next(costs)
        return lambda: device.work(cost)

    assert timing.time_graph(make, 2, 8, device=device) == pytest.approx(20.0)
    assert device.flushes == 0


def test_results_rotate_with_the_sets():
    device = Pretended()
    alive: set[int] = set()
    most = []

    class Result:
        def __init__(self) -> None:
            alive.add(id(self))
            most.append(len(alive))

        def __del__(self) -> None:
            alive.discard(id(self))

    def call():
        device.work(5.0)
        return Result()

    seen = []
    timing.time_graph(lambda: call, 3, 12, device=device, inspect=lambda results: seen.extend(results))
    assert max(most[6:]) == 3  # neither one buffer written over and over, nor memory that grows with the calls
    assert len(seen) == 3 and all(isinstance(r, Result) for r in seen)


def test_overwritten_inputs_are_restored_outside_the_time():
    device = Pretended()
    fresh = [True, True]

    def make_for(i):
        def use() -> None:
            used.append(fresh[i])
            fresh[i] = False

        return lambda: device.work(7.0, use)

    def restore() -> None:
        device.now += 500.0
        fresh[:] = [True, True]

    used: list[bool] = []
    makers = iter([make_for(0), make_for(1)])
    assert timing.time_graph(lambda: next(makers), 2, 2, device=device, restore=restore) == pytest.approx(7.0)
    assert all(used[4:]) and len(used) > 30  # the first four are the warm-up
    assert device.flushes > 0
    with pytest.raises(ValueError, match="3 calls for 2 sets"):
        timing.time_graph(lambda: lambda: None, 2, 3, device=device, restore=restore)


def test_what_cannot_be_captured_is_timed_by_events_and_says_so():
    device = Pretended(capturable=False)
    seen = []

    def call():
        device.work(42.0)
        return "result"

    timed = timing.measure([call, call], 8, inspect=seen.extend, device=device)
    assert timed.us == pytest.approx(42.0) and timed.method == "events: it copies to the host"
    assert seen == ["result"] and device.flushes >= 25
    assert timing.measure([call], 4, device=Pretended()).method == "graph"


def test_a_wrong_result_is_not_taken_for_a_failed_capture():
    def refuse(results):
        raise check.Wrong("no")

    with pytest.raises(check.Wrong):
        timing.measure([lambda: None], 1, inspect=refuse, device=Pretended())


def test_host_time_takes_turns_and_ignores_a_slow_spell():
    now = [0]
    drained = []
    calls_since_drain = [0]

    def slow():
        calls_since_drain[0] += 1
        now[0] += 7_000_000 if len(drained) == 4 else 7_000

    def quick():
        calls_since_drain[0] += 1
        now[0] += 2_000

    def drain():
        drained.append(calls_since_drain[0])
        calls_since_drain[0] = 0
        now[0] += 123_456

    was = gc.isenabled()
    times = timing.time_host_each([slow, quick], batches=9, per_batch=10, clock=lambda: now[0], drain=drain)
    assert times == pytest.approx([7.0, 2.0])
    assert max(drained[1:]) == 10  # never more than one batch in the queue
    assert gc.isenabled() == was
    assert timing.time_host(quick, batches=3, per_batch=5, clock=lambda: now[0], drain=drain) == pytest.approx(2.0)


# ---------------------------------------------------------------------------------------------------------------- floor


@pytest.mark.parametrize(
    "read, written, expected",
    [
        (100, 100, (1, 1)),
        (67_108_864, 34_603_008, (2, 1)),
        (100_663_296, 69_206_016, (3, 2)),
        (10**9, 40_000, (1, 0)),
        (0, 7, (0, 1)),
        (1, 8, (1, 8)),
    ],
)
def test_proportion(read, written, expected):
    assert floor.proportion(read, written) == expected


def test_floor_programs_move_the_bytes_asked_for():
    with pytest.raises(ValueError, match="bytes to move"):
        floor.proportion(0, 0)
    for block, _, unroll in floor.CONFIGS:
        for read, written in ((67_108_864, 34_603_008), (10**9, 0), (5_000_000, 5_000_000)):
            count, factor = floor.programs(read, written, block, unroll)
            blocks = sum(floor.proportion(read, written)) * unroll
            assert count * blocks * block * 4 * factor == pytest.approx(read + written)
            assert 0.8 < factor < 1.2
    assert floor.programs(10, 10, 1024, 1) == (1, 1.0)


def test_stream_kernel_reads_and_writes_every_block():
    script = """
import torch
from tilewright.bench.floor import stream
x = torch.randint(-2**31, 2**31 - 1, (3, 2, 64), dtype=torch.int32)
y = torch.full((3, 3, 64), 7, dtype=torch.int32)
stream[(3,)](x, y, READ=2, WRITE=0, BLOCK=64)
assert (y == 7).all()
stream[(3,)](x, y, READ=2, WRITE=3, BLOCK=64)
want = (x.long().sum(1) + torch.arange(3)[:, None]).to(torch.int32)
assert torch.equal(y, want[:, None].expand(3, 3, 64))
"""
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": _path()}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def _path() -> str:
    return os.pathsep.join(p for p in (str(ROOT), os.environ.get("PYTHONPATH")) if p)


# ---------------------------------------------------------------------------------------------------------------- cases


def test_traffic_is_the_published_minimum():
    """MB of the known benchmark rows, read once and written once."""
    for name, megabytes in {
        "rms_norm_quant_fwd/8192x2048": 68.19,
        "rms_norm_quant_row_fwd/8192x2048": 50.89,
        "silu_quant_fwd/8192x2048": 101.7,
        "silu_quant_bwd/8192x2048": 169.9,
        "cross_entropy_fwd/8192x157184": 2575.5,
        "cross_entropy_bwd/8192x157184": 5150.8,
    }.items():
        assert sum(cases.CASES[name].traffic) / 1e6 == pytest.approx(megabytes, rel=1e-3), name


def test_every_family_has_its_goal_and_its_further_shapes():
    assert len(cases.CASES) == 10 * 5 + 1
    for name, _, _, _, goal, own, further in cases.FAMILIES:
        assert cases.CASES[f"{name}/{'x'.join(map(str, own.values()))}"].goal == goal
        for dims in further:
            held = cases.CASES[f"{name}/{'x'.join(map(str, dims.values()))}"]
            assert held.goal == pytest.approx(goal - 0.05) and held.dims is dims


def _quantize(y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Groups of 128 along the last dimension, the multiplier found by trying powers of two."""
    codes, scales = torch.zeros(y.shape, dtype=torch.float8_e4m3fn), torch.zeros(y.shape[0], -(-y.shape[1] // 128))
    for i in range(y.shape[0]):
        for j in range(scales.shape[1]):
            group = y[i, j * 128 : (j + 1) * 128]
            power = max(k for k in range(-40, 40) if group.abs().max().item() * 2.0**k <= 448)
            codes[i, j * 128 : (j + 1) * 128] = (group * 2.0**power).to(torch.float8_e4m3fn)
            scales[i, j] = 2.0**-power
    return codes, scales


def _quantized(y: torch.Tensor) -> types.SimpleNamespace:
    """What `Quantized` looks like, both ways."""
    codes, scales = _quantize(y.float())
    column = [_quantize(y[i : i + 128].float().t()) for i in range(0, y.shape[0], 128)]
    return types.SimpleNamespace(
        data=codes,
        scale=scales.t(),
        data_t=torch.cat([c.view(torch.uint8) for c, _ in column], 1).view(torch.float8_e4m3fn),
        scale_t=torch.stack([s[:, 0] for _, s in column]),
    )


def _flip(q, field, change):
    """A copy of `q` with one field changed."""
    pieces = {k: v.clone() for k, v in vars(q).items()}
    change(pieces[field])
    return types.SimpleNamespace(**pieces)


def test_right_codes_pass_and_wrong_ones_do_not():
    torch.manual_seed(0)
    y = torch.randn(200, 192, dtype=torch.float64) * torch.logspace(-6, 6, 192, dtype=torch.float64)
    q = _quantized(y)
    truth = y.__getitem__
    assert check.compare_quantized(q, truth, "y") < 1e-3
    row_only = types.SimpleNamespace(**{**vars(q), "data_t": None, "scale_t": None})
    assert check.compare_quantized(row_only, truth, "y") < 1e-3
    wrong = {
        "scale doubled": ("scale", lambda t: t.mul_(2)),
        "column scale of another block": ("scale_t", lambda t: t.copy_(t.flip(1))),
        "one code far off": ("data", lambda t: t.view(torch.uint8)[3, 5].bitwise_xor_(0x10)),
        "one column code far off": ("data_t", lambda t: t.view(torch.uint8)[190, 199].bitwise_xor_(0x10)),
        "transposed codes missing": ("data_t", lambda t: t.view(torch.uint8)[:, 130:].fill_(0xFF)),
        "unwritten scale": ("scale", lambda t: t[1, 199:].fill_(float("nan"))),
    }
    for what, (field, change) in wrong.items():
        with pytest.raises(check.Wrong):
            check.compare_quantized(_flip(q, field, change), truth, what)
    with pytest.raises(check.Wrong, match="neither"):
        check.compare_quantized(types.SimpleNamespace(data=None, scale=None, data_t=None, scale_t=None), truth, "y")


def test_a_step_off_is_allowed_only_rarely():
    y = torch.randn(128, 256, dtype=torch.float64)
    q = _quantized(y)

    def step(count):
        def change(t):
            flat = t.view(torch.uint8).view(-1)
            at = (flat % 128 > 8).nonzero()[:count, 0]
            flat[at] -= 1

        return _flip(q, "data", change)

    assert check.compare_quantized(step(3), y.__getitem__, "y") == pytest.approx(3 / y.numel())
    with pytest.raises(check.Wrong, match="differ by a step"):
        check.compare_quantized(step(200), y.__getitem__, "y")


def test_bands_hold_the_first_and_the_last_row():
    for rows in (1, 127, 128, 129, 1000, 16384):
        bands = check.bands(rows)
        assert bands[0].start == 0 and bands[-1].stop == rows and len(bands) <= 6
        assert all(b.start % 128 == 0 and 0 < b.stop - b.start <= 128 for b in bands)
    assert [c for part in check.chunks(10, 4, 12) for c in range(part.start, part.stop)] == list(range(10))


SMALL = {"tokens": 200, "hidden": 256, "vocab": 300}


def _small(name: str, monkeypatch) -> cases.Work:
    """The family's work at small dimensions on the CPU, its ops replaced by plain float32 torch."""

    def rms_norm(x, weight, eps=1e-6):
        x32 = x.float()
        return (x32 * torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)

    def glu(x):
        gate, up = x.float().chunk(2, -1)
        return (torch.nn.functional.silu(gate) * up).to(x.dtype)

    def cross_entropy(logits, labels, reduction, inplace_backward=False):
        return torch.nn.functional.cross_entropy(logits.float(), labels, reduction=reduction)

    def backward_of(op, args, options, grads):
        def call():
            leaves = [a.detach().clone().requires_grad_() if _floating(a) else a for a in args]
            wanted = [a for a in leaves if _floating(a)]
            found = list(torch.autograd.grad(op(*leaves, **options), wanted, grads))
            if options.get("inplace_backward"):
                found[0] = args[0].copy_(found[0])
            return tuple(found)

        return call

    monkeypatch.setattr(cases, "tw", types.SimpleNamespace(rms_norm=rms_norm, glu=glu, cross_entropy=cross_entropy))
    monkeypatch.setattr(cases, "backward_of", backward_of)
    build = next(row[2] for row in cases.FAMILIES if row[0] == name)
    return build(SMALL, 0, "cpu")


def _floating(value) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


PLAIN = (
    "rms_norm_fwd",
    "rms_norm_bwd",
    "launch_rms_norm",
    "silu_fwd",
    "silu_bwd",
    "cross_entropy_fwd",
    "cross_entropy_bwd",
)


@pytest.mark.parametrize("name", PLAIN)
def test_checks_accept_an_honest_result_and_refuse_damaged_ones(name, monkeypatch):
    work = _small(name, monkeypatch)
    result = work.call()
    assert 0 < work.check(result) < 2.1e-3
    tensors = list(result) if isinstance(result, tuple) else [result]
    for damaged in tensors:
        before = damaged.clone()
        for damage in (
            lambda t: t.mul_(1.02),
            lambda t: t.view(-1)[-1:].add_(t.abs().max()),
            lambda t: t.view(-1)[-1:].fill_(float("nan")),
            lambda t: t.zero_(),
        ):
            damage(damaged)
            with pytest.raises(check.Wrong):
                work.check(result)
            damaged.copy_(before)
    work.check(result)


def test_many_small_errors_are_refused_as_one_large_one_is():
    truth = torch.randn(64, 64, dtype=torch.float64)
    with pytest.raises(check.Wrong, match="relative RMS error 0.004"):
        check.compare([(truth * 1.004, truth)], 1.7e-3, 2.0**-7, "y")


# The reference, which is what a CPU runs, neither overwrites its input nor quantises a gradient.
OF_THE_REFERENCE = [row for row in cases.FAMILIES if row[0] not in ("cross_entropy_bwd", "silu_quant_bwd")]


@pytest.mark.parametrize("row", [pytest.param(r, id=r[0]) for r in OF_THE_REFERENCE if r[1] in tw.catalogue()])
def test_the_library_itself_passes_the_checks(row):
    work = row[2](SMALL, 0, "cpu")
    assert work.check(work.call()) < 2.1e-3


def test_an_unwritten_row_between_the_bands_is_seen(monkeypatch):
    monkeypatch.setitem(SMALL, "tokens", 2000)
    work = _small("rms_norm_fwd", monkeypatch)
    result = work.call()
    assert not any(b.start <= 300 < b.stop for b in check.bands(2000))
    result[300, 17] = float("nan")
    with pytest.raises(check.Wrong, match="never written"):
        work.check(result)
    work = _small("cross_entropy_bwd", monkeypatch)
    result = work.call()
    work.check(result)
    result[0][300, 17] = 1.0
    with pytest.raises(check.Wrong, match="sums to"):
        work.check(result)


def test_cross_entropy_backward_restores_its_logits(monkeypatch):
    work = _small("cross_entropy_bwd", monkeypatch)
    first = work.call()[0].clone()
    work.restore()
    assert torch.equal(work.call()[0], first)
    assert not torch.equal(work.call()[0], first)
    with pytest.raises(check.Wrong, match="not written over"):
        work.check((first,))


class Rerunning(Pretended):
    """A device whose replays, of two calls, really compute again."""

    def capture(self, body):
        def replay() -> None:
            body()
            self.now += 10.0

        return replay


def _case(name: str, work, traffic: tuple[int, int] = (MIB, MIB)) -> cases.Case:
    return cases.Case(name, "op", SMALL, lambda dims, seed, device: work(), traffic, "fraction", 0.9)


@pytest.fixture
def pretended(monkeypatch):
    """The measuring process without a device."""
    device = Rerunning()
    monkeypatch.setattr(timing, "Cuda", lambda: device)
    monkeypatch.setattr(timing, "WARM_US", 0.0)
    monkeypatch.setattr(check, "poison", lambda nbytes: None)
    monkeypatch.setattr(run, "floor_us", lambda read, written: 4.0)
    monkeypatch.setattr(timing, "plan", lambda nbytes, l2, once=False: (2, 2))
    return device


@pytest.mark.parametrize("name", [n for n in PLAIN if n != "launch_rms_norm"])
def test_a_case_is_checked_timed_and_set_beside_its_floor(name, monkeypatch, pretended):
    row = run.measure_case(_case(name, lambda: _small(name, monkeypatch)))
    assert row["us"] == pytest.approx(5.0) and row["measured"] == pytest.approx(0.8)
    assert row["method"] == "graph" and 0 < row["error"] < 2.1e-3


def test_a_result_that_goes_wrong_in_the_timed_run_gives_no_time(pretended):
    answers = iter([0.0])

    def verify(result: float) -> float:
        if result:
            raise check.Wrong("y: off")
        return result

    work = cases.Work(lambda: next(answers, 1.0), verify)
    with pytest.raises(check.Wrong, match="right when called alone, wrong in the timed run: y: off"):
        run.measure_case(_case("x", lambda: work))
