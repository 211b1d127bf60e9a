"""Which dtypes are ours: of every overload a plain call with each dtype, and in no other than these is one left to aten. And what
plain calls do not show of them: casts, numbers that a dtype cannot hold, quotients and steps in every dtype."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat, ulps
from tests.aten.declined import GPU_ONLY, REFUSED_OF, declined
from tests.aten.samples import DEVICE
from tests.aten.test_opinfo import scale
from tilewright.aten import table
from tilewright.aten.row import TAKEN
from tilewright.aten.table import overload_of
from tilewright.bench import tried
from tilewright.check.provided.aten import aten_of, blank, call_as, copied, exact_of, written

DTYPES = sorted(TAKEN, key=str)
NAMES = sorted(table.FORMS)
FIRST = ("sort", "topk")  # of whose results the second may be the place of another of equals


def test_what_is_declined_is_in_the_table_and_nothing_else():
    """With the very reason."""
    assert {name: tried.declines(name) for name in NAMES} == {name: declined(name) for name in NAMES}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, least: int = 0) -> Tensor:
    """Small numbers, of which none is 0 but bools, if these may be."""
    if dtype.is_floating_point:
        return (torch.rand(shape, device=DEVICE) + 0.5).to(dtype)
    ends = (least, 2) if dtype == torch.bool else (1, 9)
    return torch.randint(*ends, shape, device=DEVICE).to(dtype)


def dtypes_of(name: str) -> list[torch.dtype]:
    """Every one, or on a GPU, which compiles for each, two in turn."""
    at = NAMES.index(name)
    return DTYPES if DEVICE == "cpu" else [DTYPES[(2 * at + turn) % len(DTYPES)] for turn in range(2)]


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """What torch says of tensors of complex halves, and of `reduce`."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


@pytest.mark.parametrize("name", NAMES)
def test_every_dtype_that_aten_takes(name):
    """Is ours and gives aten's numbers, but for those in the table, which are aten's."""
    wrong: list[str] = []
    alone = aten_of(name, DEVICE) is not overload_of(name)  # aten has no kernel that a call could be left to
    for dtype in dtypes_of(name):
        reason = declined(name).get(dtype)
        if reason is not None and alone:
            continue
        torch.manual_seed(0)
        args, kwargs = call_as(name, dtype, partial(drawn, least=int(name == "remainder.Scalar_Tensor")))
        try:
            expected = written(name, aten_of(name, DEVICE)(*copied(args), **copied(kwargs)))
        except (RuntimeError, NotImplementedError, ZeroDivisionError):
            if DEVICE == "cpu" and dtype not in {*declined(name), *GPU_ONLY.get(name, ())}:
                wrong.append(f"{dtype}: aten refuses it, and ours does not")
            continue
        if DEVICE == "cpu" and dtype in {*REFUSED_OF.get(name, ()), *GPU_ONLY.get(name, ())}:
            wrong.append(f"{dtype}: aten takes it, which the table does not know")
        own, named = copied(args), copied(kwargs)
        with tw.aten.use("all", include=[name]):
            made = written(name, overload_of(name)(*own, **named))
            said = tw.aten.report()[name]
        if said != ({"taken": 1, "declined": {}} if reason is None else {"taken": 0, "declined": {reason: 1}}):
            wrong.append(f"{dtype}: {said}, and the table has {reason!r}")
        if reason is None:
            found = unlike(name, made, expected, args, kwargs)
            wrong += [f"{dtype}: {line}" for line in found]
    assert not wrong, "\n".join(wrong)


@contextlib.contextmanager
def in_float64() -> Iterator[None]:
    """What integers become where they become floats."""
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def unlike(name: str, made: Any, expected: Any, args: list[Any], kwargs: dict[str, Any]) -> list[str]:
    if table.ENGINE[name] in ("random", "attention"):  # whose values other tests are about; the latter has one dtype
        made, expected = blank(made), blank(expected)
    if name.partition(".")[0] in FIRST:
        made, expected = made[0], expected[0]
    truth = None
    if differences(made, expected):
        with contextlib.suppress(RuntimeError), in_float64():  # but of dtypes that no longer agree
            truth = written(name, exact_of(name, DEVICE)(*as_double(copied(args)), **as_double(copied(kwargs))))
            truth = truth[0] if name.partition(".")[0] in FIRST else truth
    packet = name.partition(".")[0].removesuffix("_")
    return differences(made, expected, truth, scale(packet, flat([*args, *kwargs.values()])))


# ---- beyond plain calls ----------------------------------------------------------------------------------------------

FLOATS = [d for d in DTYPES if d.is_floating_point]
INTEGERS = [d for d in DTYPES if not d.is_floating_point and d != torch.bool]
LAYOUTS: dict[str, Callable[[Tensor], Tensor]] = {
    "flat": lambda x: x,
    "turned": lambda x: x.t(),
    "with gaps": lambda x: x[::2, 1::3],
    "expanded": lambda x: x[:, :1].expand(5, 7),
    "one": lambda x: x[0, 0],
}


def ours(name: str, call: Callable[[], Any]) -> tuple[Any, Any, dict[str, Any]]:
    """(aten's, ours, what the report says of an overload); an exception by what it says. Ours is made three times, the last by a
    plan."""

    def run() -> Any:
        try:
            return call()
        except (RuntimeError, NotImplementedError) as error:
            return str(error)

    aten = run()
    with tw.aten.use("all", include=[name]):
        made = [run() for _ in range(3)][-1]
        return aten, made, tw.aten.report()[name]


def ends_of(to: torch.dtype, dtype: torch.dtype) -> Tensor:
    """Floats to cast to an integer: small ones, and those about the ends of what integers hold. A processor has its own answers for
    what is out of range, so there are none of these but on a GPU."""
    info, steps = torch.iinfo(to), torch.arange(-40, 41).double()
    near = [info.min, 0, info.max]
    if DEVICE != "cpu":
        near += [sign * 2.0**n for n in (7, 8, 15, 16, 31, 32, 63, 64) for sign in (-1, 1)]
    last = [2.0**-3 * max(1.0, abs(n) * torch.finfo(dtype).eps) for n in near]
    values = torch.cat([n + k * steps / 8 for n, small in zip(near, last) for k in (1.0, small)])
    values = values.to(dtype).double()
    if DEVICE == "cpu":
        return values[(values.trunc() >= info.min) & (values < 2.0 * (info.max // 2 + 1))].to(dtype)
    return torch.cat([values, torch.tensor([math.inf, -math.inf, math.nan, -0.0, 1e300])]).to(dtype)


@pytest.mark.parametrize("to", INTEGERS, ids=str)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_floats_are_cut_to_integers(dtype, to):
    """Every kind of value, and on a GPU also what is out of range, infinite or no number; new, written into memory with gaps, and
    one for all."""
    x = ends_of(to, dtype).to(DEVICE)
    x = x[: len(x) // 6 * 6].view(-1, 6)
    calls = {
        "_to_copy": lambda: (x.to(to), x.t().to(to), x[::2, 1::2].to(to), x[0, 0].to(to)),
        "copy_": lambda: (torch.zeros(x.shape, dtype=to).copy_(x), torch.zeros(*x.shape, 2, dtype=to)[..., 1].copy_(x)),
        "fill_.Tensor": lambda: torch.zeros(5, dtype=to).fill_(x[1, 1]),
        "fill.Tensor": lambda: torch.fill(torch.zeros(5, dtype=to), x[1, 1]),
    }
    for name, call in calls.items():
        aten, made, said = ours(name, call)
        assert said["taken"] and not said["declined"] and not differences(made, aten), name


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_numbers_that_a_dtype_cannot_hold_are_refused(dtype):
    """As aten refuses them, by a plan too; fractions of integers are cut, and negative ones wrap around to bytes."""
    x, mask = torch.ones(3, 4, dtype=dtype), torch.eye(3, 4).bool()
    calls = {
        "fill_.Scalar": lambda n: x.clone().fill_(n),
        "fill.Scalar": lambda n: torch.fill(x, n),
        "full_like": lambda n: torch.full_like(x, n),
        "masked_fill.Scalar": lambda n: x.masked_fill(mask, n),
        "masked_fill_.Scalar": lambda n: x.clone().masked_fill_(mask, n),
        "constant_pad_nd": lambda n: F.pad(x, (1, 1), value=n),
        "threshold": lambda n: F.threshold(x, n, 1),
        "threshold_backward": lambda n: torch.ops.aten.threshold_backward(x, x, n),
    }
    info = torch.finfo(dtype) if dtype.is_floating_point else None if dtype == torch.bool else torch.iinfo(dtype)
    numbers = [1, 2.75, -2.75, 300, -3, -300, 70000, 1e6, 1e39, 2.0**31, -0.5]
    numbers += (
        [] if info is None else [info.min, info.max, -info.max, info.max + 1 if isinstance(info.max, int) else math.inf]
    )
    numbers = [n for n in numbers if -(2**63) <= n < 2**63 or isinstance(n, float)]
    for name, call in calls.items():
        found = [n for n in numbers if differences(*ours(name, partial(call, n))[:2])]
        assert not found, (name, found)
        with tw.aten.use("all", include=[name]):
            said = [type(call_or(call, n)) for n in (1, 2, 3, 1e39, 4)]  # by one plan, but the fourth
        if dtype not in (torch.bool, torch.float64, *declined(name)):
            assert said == [Tensor, Tensor, Tensor, str, Tensor], name


def call_or(call: Callable[[Any], Tensor], number: float) -> Tensor | str:
    try:
        return call(number)
    except RuntimeError as error:
        return str(error)


STEPS = [
    (0, 10, 11),
    (3, 50, 7),
    (-7, 90, 33),
    (0.5, 3.0, 50),
    (100, -3, 20),
    (1, 1, 5),
    (-3.7, -100.2, 11),
    (2, 1e-9, 50),
]
STEPS += [(0, 7, 0), (5, 3, 1), (0, 127, 2), (-2.0, 0.0, 50)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_even_steps_in_every_dtype(dtype):
    """Integers are aten's, cut from numbers of which every bit counts; floats begin and end with the ends."""
    # Not to the last of 64 bits: how steps towards it are rounded, and what a cast gives of what is above, is each CPU's own
    far = [(0, min(torch.iinfo(dtype).max, 2**62 + 2**12), 9)] if dtype in INTEGERS else []
    for start, end, steps in [*STEPS, *far]:
        aten, made, said = ours("linspace.out", lambda own=(start, end, steps): torch.linspace(*own, dtype=dtype))
        truth = torch.linspace(start, end, steps, dtype=torch.float64)
        assert not differences(made, aten, truth), (start, end, steps)
        assert said["taken"] == 3 or dtype == torch.bool or isinstance(aten, str)
        if steps > 1 and dtype.is_floating_point:
            assert torch.equal(
                made[[0, -1]].double(), torch.tensor([start, end], dtype=torch.float64).to(dtype).double()
            )
    for start, end, steps, base in (
        (0, 6, 7, 2.0),
        (0.5, 2, 9, 2.7),
        (1, 0, 5, 10.0),
        (0, 2, 0, 10.0),
        (1.7, 0, 1, 10.0),
    ):
        own = (start, end, steps, base)
        aten, made, said = ours("logspace.out", lambda own=own: torch.logspace(*own, dtype=dtype))
        assert not differences(made, aten, torch.logspace(*own, dtype=torch.float64)), own
        assert said["taken"] == 3 or dtype == torch.bool


@pytest.mark.parametrize("dtype", FLOATS[:2], ids=str)
def test_floored_quotients_of_16_bits_are_rounded_once(dtype):
    """aten rounds each step of them to 16 bits, and so may miss the whole number."""
    torch.manual_seed(0)
    x, y = (torch.randn(300, 1) * 40).to(dtype), (torch.randn(1, 200) * 3).to(dtype)
    for call in (torch.floor_divide, partial(torch.div, rounding_mode="floor")):
        name = "floor_divide" if call is torch.floor_divide else "div.Tensor_mode"
        for other in (y, 3.0, -0.7):
            aten, made, said = ours(name, lambda other=other, call=call: call(x, other))
            truth = call(x.double(), as_double(other) if isinstance(other, Tensor) else other)
            assert said["taken"] == 3 and made.dtype == dtype and made.stride() == aten.stride()
            assert ulps(made, truth, 0.0).max() <= 0.5001  # half, of an ulp that a GPU's exp2 makes


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [*INTEGERS, torch.bool], ids=str)
def test_integers_in_questions_about_floats(dtype, layout):
    torch.manual_seed(0)
    x, y = (LAYOUTS[layout](drawn((5, 7), dtype)) for _ in range(2))
    far, near = (torch.tensor([2**40, 2**40 + n, 3]).to(dtype) for n in (1, 2))  # which fp32 does not tell apart
    calls: dict[str, Callable[[], Any]] = {
        "isfinite": x.isfinite,
        "isinf": x.isinf,
        "nan_to_num": lambda: (x.nan_to_num(), x.nan_to_num(2.5, 7.0)),
        "isclose": lambda: [torch.isclose(a, b, *t) for a, b in ((x, y), (far, near)) for t in ((), (0, 0), (0.2, 0.5), (0, 1))],
        "allclose": lambda: [torch.allclose(a, b, *t) for a, b in ((x, y), (x, x), (far, near)) for t in ((), (0, 0), (9.0, 9.0))],
        "addr": lambda: x if not x.dim() else [torch.addr(x, x[:, 0], x[0], beta=b, alpha=a) for b, a in ((1, 1), (3, -2), (0, 1))],
    }  # fmt: skip
    for name, call in calls.items():
        aten, made, said = ours(name, call)
        assert not differences(made, aten), name
        assert not said["declined"] and (said["taken"] or not x.dim()), (name, said)
