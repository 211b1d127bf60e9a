"""What torch's samples leave out: empty, expanded, non-dense and misaligned operands, awkward sizes, numbers, overlaps, and
composites."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat, ulps
from tests.aten.samples import DEVICE
from tests.aten.test_opinfo import scale
from tilewright.aten import reduction, table
from tilewright.aten.leaves import LEAVES
from tilewright.aten.table import overload_of
from tilewright.check.provided.aten import aten_of, blank, call_of, copied, drawn, exact_of, written

FP32 = torch.float32
CALLS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + x.flip(0) if x.dim() else x + x,
    "neg": torch.neg,
    "number": lambda x: x * 2.5,
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "clamp_min": lambda x: x.clamp_min(0.25),
    "sum": lambda x: x.sum(),
    "first": lambda x: x.amax(0) if x.dim() and x.shape[0] else x.sum(),
    "last": lambda x: x.sum(-1),
    "argmax": lambda x: x.argmax() if x.numel() else x.sum(),
    "cumsum": lambda x: x.cumsum(-1),
    "cummax": lambda x: x.cummax(0),
    "zeros": torch.zeros_like,
    "clone": torch.clone,
    "triu": lambda x: x.triu() if x.dim() > 1 else x.clone(),
}
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "empty": lambda: torch.empty(0),
    "empty rows": lambda: torch.empty(0, 5),
    "empty columns": lambda: torch.empty(5, 0),
    "no dimensions": lambda: torch.randn(()),
    "expanded": lambda: torch.randn(5, 1).expand(5, 7),
    "all of one": lambda: torch.randn(1).expand(3, 4),
    "channels last": lambda: torch.randn(2, 5, 3, 4).to(memory_format=torch.channels_last),
    "not dense": lambda: torch.randn(6, 9)[::2, 1::3],
    "turned": lambda: torch.randn(40, 70).t(),
    "rank 6": lambda: torch.randn(2, 3, 2, 3, 2, 2).permute(5, 0, 3, 1, 4, 2),
    "1": lambda: torch.randn(1),
    "7": lambda: torch.randn(7),
    "127": lambda: torch.randn(127),
    "1025": lambda: torch.randn(1025),
    "65537": lambda: torch.randn(65537),
    "127 x 1025": lambda: torch.randn(127, 1025),
    "misaligned": lambda: torch.randn(1026)[1:],
    "NaN": lambda: torch.tensor([1.0, float("nan"), 3.0, float("nan"), -1.0]),
    "infinities": lambda: torch.tensor([float("inf"), 1.0, float("-inf"), float("inf")]),
    "equals": lambda: torch.tensor([[1.0, 2.0, 2.0], [2.0, 2.0, 0.0]]),
    "bf16": lambda: torch.randn(33, 65).bfloat16(),
    "int32": lambda: torch.randint(-9, 9, (33, 65), dtype=torch.int32),
    "large int32": lambda: torch.full((9,), 2**30, dtype=torch.int32),
    "uint8": lambda: torch.randint(0, 255, (33, 5), dtype=torch.uint8),
    "bool": lambda: torch.randint(0, 2, (33, 5)).bool(),
}


def taken() -> int:
    return sum(one["taken"] for one in tw.aten.report().values())


def both(call: Callable[[], Any], declined: dict[str, Any] | None = None) -> tuple[Any, Any, int]:
    """(aten's, ours, how many calls were ours); `declined` is filled with the others, and why."""

    def run() -> Any:
        try:
            return call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    aten = run()
    with tw.aten.use("all"):
        ours = run()
        if declined is not None:
            declined.update({name: one["declined"] for name, one in tw.aten.report().items() if one["declined"]})
        return aten, ours, taken()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", CALLS)
def test_awkward_operands(name, layout):
    torch.manual_seed(0)
    x, call = LAYOUTS[layout](), CALLS[name]
    declined: dict[str, Any] = {}
    aten, ours, ran = both(lambda: call(x), declined)
    scale = (
        float(x.double().nan_to_num(0, 0, 0).abs().sum())
        if name == "cumsum" and x.numel() and x.dtype != torch.bool
        else 0.0
    )
    truth = call(as_double(x)) if isinstance(aten, (Tensor, tuple)) and x.is_floating_point() else None
    assert not differences(ours, aten, truth, scale)
    if (
        x.numel()
        and x.dtype == FP32
        and (x.is_contiguous() or name in ("add", "neg", "number", "clamp", "sum", "cumsum", "cummax", "clone"))
    ):
        assert ran and not declined, declined


def turned(value: Any, those: Sequence[Tensor]) -> Any:
    """Arguments of a call, of which those tensors lie with the first dimension innermost, without a gap."""
    if isinstance(value, dict):
        return {name: turned(one, those) for name, one in value.items()}
    if isinstance(value, list):
        return [turned(one, those) for one in value]
    return value.transpose(0, -1).contiguous().transpose(0, -1) if any(value is t for t in those) else value


# Of vectors that are turned aten's kernels read others: the composite above them has copied them
COPIED_ABOVE = {"_weight_norm_interface", "_weight_norm_interface_backward"}
BY_ATEN = [n for n in sorted(table.FORMS.keys() - COPIED_ABOVE) if aten_of(n, DEVICE) is overload_of(n)]


@pytest.mark.parametrize("name", BY_ATEN)
def test_operands_that_are_turned(name):
    """A call of every overload with all operands turned, with the first alone, and with the last alone: results lie as aten's."""
    packet = name.partition(".")[0].removesuffix("_")
    torch.manual_seed(0)
    plain = call_of(name, partial(drawn, device=DEVICE))
    every = [t for t in flat([plain[0], list(plain[1].values())]) if isinstance(t, Tensor) and t.dim() > 1]

    def call(overload: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        try:
            made = written(name, overload(*args, **kwargs))
        except RuntimeError as error:
            return str(error)
        return blank(made) if table.ENGINE[name] == "random" else made  # whose values other tests are about

    for those in (every, every[:1], every[-1:]) if len(every) > 1 else (every,):
        given = [turned(part, those) for part in plain]
        expected = call(overload_of(name), *map(copied, given))
        own = [copied(part) for part in given]
        with tw.aten.use("all", include=[name]):
            made = call(overload_of(name), *own)
        truth = None if isinstance(expected, str) else call(exact_of(name, DEVICE), *map(as_double, map(copied, given)))
        assert not differences(made, expected, truth, scale(packet, [*plain[0], *plain[1].values()])), len(those)


def test_offsets_past_32_bits():
    """A view whose last element lies 2^31 elements on, of memory that no page is touched of but two."""
    n = 2**31 + 5
    x = torch.empty(n, dtype=torch.uint8).as_strided((2, 3), (n - 5, 2))
    x.copy_(torch.tensor([[1, 2, 3], [4, 5, 6]]))
    aten, ours, ran = both(lambda: (x + 1, x.sum(0), x.flip(0), x.cumsum(0)))
    assert ran >= 4 and not differences(ours, aten)


# ---- numbers in tensors' places --------------------------------------------------------------------------------------

NUMBERS = (True, 3, 2.5)


@pytest.mark.parametrize("dtype", [FP32, torch.bfloat16, torch.int64, torch.uint8, torch.bool])
@pytest.mark.parametrize("number", NUMBERS)
def test_numbers_promote_as_atens(number, dtype):
    x = torch.tensor([1, 0, 1, 1]).to(dtype)
    calls = [
        lambda: x + number, lambda: x * number, lambda: number - x, lambda: x / number, lambda: x // number, lambda: x % number,
        lambda: x == number, lambda: x < number, lambda: torch.where(x != 0, x, number), lambda: x**number,
        lambda: number**x, lambda: torch.add(x, number, alpha=2), lambda: x.clone().add_(number), lambda: x.clone().fill_(number),
        lambda: x.clone().masked_fill_(x != 0, number), lambda: x.clamp(max=number), lambda: x.to(FP32) + number,
        lambda: torch.full_like(x, number), lambda: x[:0] + number, lambda: x.sum() + number,
    ]  # fmt: skip
    for at, call in enumerate(calls):
        declined: dict[str, Any] = {}
        aten, ours, ran = both(call, declined)
        assert not differences(ours, aten), at
        assert ran or isinstance(aten, str), (at, declined)


@pytest.mark.parametrize("exponent", [0, 1, 2, 3, 0.5, -0.5, -1, -2, 1.75, -2.25, 63.0])
def test_powers_by_a_number(exponent):
    """Some have formulas of their own; a plan for one is not taken for another."""
    x = torch.tensor(
        [float("-inf"), float("inf"), -0.0, 0.0, -1.0, 1.0, float("nan"), 2.5, -3.0, 1e-30, 1e30, 0.7, 1.4]
    )
    whole = torch.tensor([-3, 0, 1, 7])

    def call() -> Any:
        for other in (exponent, 2.625, exponent):  # the last is made by a plan
            made = x**other
        return (
            made,
            (x[5:] * 2).pow_(exponent),
            whole**exponent if isinstance(exponent, int) and exponent >= 0 else None,
        )

    aten, ours, ran = both(call)
    truth = x.double() ** exponent, (x[5:].double() * 2) ** exponent, None
    assert ran and not differences(ours, aten, truth)


def test_powers_are_as_exact_as_atens():
    """Bases and exponents of every size, results of which are all of fp32's."""
    torch.manual_seed(0)
    base = torch.exp2(torch.rand(20_000) * 200 - 100)
    exponent = (torch.rand(20_000) * 290 - 160) / torch.log2(base)
    aten, ours, ran = both(lambda: base**exponent)
    assert ran and not differences(ours, aten, base.double() ** exponent.double())


@pytest.mark.parametrize("results", [(-151, 128), (-150, -126), (-126.5, -125.5), (126, 128), (-1, 1)], ids=str)
@pytest.mark.parametrize("bases", [(-149, 128), (-149, -126), (-0.52, 0.51), (-0.001, 0.001)], ids=str)
def test_powers_are_within_a_step(bases, results):
    """Of the whole range; both are given by their logarithms. Below the normal numbers a step is that of the lowest."""
    torch.manual_seed(0)
    base = torch.exp2(torch.empty(20_000, dtype=torch.float64).uniform_(*bases)).to(FP32)
    base = base[base != 1]
    exponent = (torch.empty_like(base, dtype=torch.float64).uniform_(*results) / torch.log2(base.double())).to(FP32)
    _, ours, ran = both(lambda: base**exponent)
    truth = base.double() ** exponent.double()
    assert ran and ulps(ours, truth, 0.0)[truth < torch.finfo(FP32).max].max() < 1


def test_powers_of_special_numbers():
    """C's: of zeros, infinities, NaNs and negative numbers, by exponents that are even, odd, fractions, or huge."""
    sizes = [0.0, 2.0**-149, 1e-40, 2.0**-126, 1e-10, 0.25, 0.5, 1 - 2.0**-24, 1.0, 1 + 2.0**-23, 1.5, 2.0, 3.0]
    sizes += [2.0**23 - 0.5, 2.0**24 - 1, 2.0**24, 2.0**24 + 2, 1e30, torch.finfo(FP32).max, math.inf, math.nan]
    numbers = torch.tensor([sign * size for size in sizes for sign in (1, -1)])
    base, exponent = (each.flatten() for each in torch.meshgrid(numbers, numbers, indexing="ij"))
    _, ours, ran = both(lambda: base**exponent)
    truth = base.double() ** exponent.double()
    nearest = truth.to(FP32)
    assert ran and torch.equal(ours.isnan(), truth.isnan())
    assert torch.equal(ours.signbit() & ~ours.isnan(), truth.signbit() & ~truth.isnan())
    within = (nearest != 0) & nearest.isfinite()
    assert torch.equal(ours[~within].nan_to_num(), nearest[~within].nan_to_num())
    assert ulps(ours, truth, 0.0)[within].max() < 1


@pytest.mark.parametrize("approximate", ["none", "tanh"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gelu_of_every_16_bit_number(dtype, approximate):
    """The formula for 16 bits is as good as rounded to nearest where aten's is, and below that where aten's sums cancel."""
    x = torch.arange(1 << 16).to(torch.int16).view(dtype)
    if x.is_cuda:  # whose exponentials take what is no normal number for 0
        x = x[(x.double().abs() > 2.0**-125) | x.isnan()]
    aten, ours, ran = both(lambda: F.gelu(x, approximate=approximate))
    wide = x.double()
    slope = 2 * math.sqrt(2 / math.pi) * (1 + 0.044715 * wide * wide)
    below = 0.5 * torch.erfc(wide * -math.sqrt(0.5)) if approximate == "none" else torch.sigmoid(slope * wide)
    exact = wide * below
    over = ~aten.isfinite() & ~exact.isnan()  # aten's kernel for some CPUs doubles the largest before it halves them
    assert torch.equal(ours[over], exact.to(dtype)[over])
    assert ran and not differences(ours[~over], aten[~over], exact[~over])
    near = wide.abs() < 8
    assert ulps(ours, wide * below, 0.0)[near].max() < 0.52


def test_steps_that_end_at_0():
    """Where counting from the start would leave a little more."""
    for start, end, steps in ((-2.0, 0.0, 50), (1.0, 0.0, 50), (3.0, 1e-9, 50), (0.0, 1.0, 50)):
        aten, ours, ran = both(lambda own=(start, end, steps): torch.linspace(*own))
        assert ran and ours[-1] == aten[-1] == torch.tensor(end) and ours[0] == start
        torch.testing.assert_close(ours, aten, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("value", [1, 3.14])
def test_sums_with_products_are_rounded_as_atens_on_a_gpu(value):
    """The sum once, with the product of the tensors rounded before unless the number is 1: here sums cancel, and every other order
    has other bits."""
    torch.manual_seed(0)
    y, z = torch.rand(64, 1) + 0.5, torch.rand(1, 65) + 0.5
    x = -float(value) * (y * z)
    x[:, 64] = torch.tensor(float("inf"))
    product = y.double() * z.double() if value == 1 else (y * z).double()
    exact = (x.double() + torch.tensor(float(value)).double() * product).float()
    with tw.aten.use("all", include=["addcmul"]):
        assert torch.equal(torch.addcmul(x, y, z, value=value), exact) and taken() == 1


def test_int64_and_a_float():
    """Not float64, though the number is one in C++: declined or taken, it is fp32."""
    x = torch.arange(3)
    for names in ("neg", "add.Tensor"):
        with tw.aten.use("all", include=names):
            assert (x + 2.0).dtype == FP32
    with tw.aten.use("all"):
        assert (x + 1j).dtype == torch.complex64  # declined, and wrapped for aten


@pytest.mark.parametrize(
    ("dtype", "shape", "turn"),
    [
        (torch.uint8, (272, 256), lambda x: x.t()),
        (torch.int8, (144, 512), lambda x: x[:, 16:].t()),  # from another word on
        (torch.bool, (3, 2, 112, 128), lambda x: x[..., :112].permute(1, 0, 3, 2)),
        (torch.uint8, (256, 272), lambda x: x[:, 4:].t()),  # not in words
    ],
)
def test_bytes_are_turned(dtype, shape, turn):
    torch.manual_seed(0)
    x = turn(torch.randint(0, 2 if dtype == torch.bool else 256, shape).to(dtype))
    to = torch.zeros(*x.shape[:-1], x.shape[-1] + 16, dtype=dtype)[..., :-16]  # rows with a gap
    with tw.aten.use("all", include=["copy_"]):
        to.copy_(x)
        assert taken() == 1 and torch.equal(to, x)


# ---- in place --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        lambda x: x[1:].add_(x[:-1]), lambda x: x[1:].copy_(x[:-1]), lambda x: x.t().add_(x), lambda x: x[:, :3].mul_(x[:, 1:4]),
        lambda x: x.add_(x), lambda x: x[0].add_(x[1]), lambda x: x[0, :1].expand(4).add_(1), lambda x: x.add_(x[0]),
    ],
)  # fmt: skip
def test_memory_that_is_read_and_written(change):
    def call() -> Any:
        x = torch.arange(16.0).view(4, 4)
        return change(x).clone(), x, x._version

    aten, ours, _ = both(call)
    assert not differences(ours, aten)


def test_a_result_that_is_given():
    x = torch.arange(6.0).view(2, 3)
    for out in (torch.empty(2, 3), torch.empty(0), torch.empty(2, 3, dtype=torch.float64), torch.empty(3, 2).t()):

        def call(out=out) -> Any:
            own = out.clone()
            made = torch.where(x > 2, x, -x, out=own)
            sums = torch.cumsum(x, 0, out=out.clone())
            return own, made is own, sums, torch.sum(x, 0, out=torch.empty(3))

        aten, ours, _ = both(call)
        assert not differences(ours, aten)


# ---- composites ------------------------------------------------------------------------------------------------------

# A composite, and the replaced operator that it reaches
COMPOSITES: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "divide": (lambda x: torch.divide(x, 2.0), "div.Tensor"),
    "divide by a tensor, floored": (lambda x: torch.divide(x, x + 3, rounding_mode="trunc"), "div.Tensor_mode"),
    "true_divide": (lambda x: torch.true_divide(x, x + 3), "div.Tensor"),
    "div by a number": (lambda x: torch.ops.aten.div.Scalar(x, 2.0), "div.Tensor"),
    "hstack": (lambda x: torch.hstack((x, x)), "cat"),
    "vstack": (lambda x: torch.vstack((x, x)), "cat"),
    "tile": (lambda x: torch.tile(x, (2, 2)), "repeat"),
    "kron": (lambda x: torch.kron(x, x), "mul.Tensor"),
    "pad": (lambda x: F.pad(x, (1, 2)), "constant_pad_nd"),
    "where": (lambda x: torch.where(x > 0, 1.0, x), "where.self"),
    "where, the other way": (lambda x: torch.where(x > 0, x, 1.0), "where.self"),
    "contiguous": (lambda x: x.t().contiguous(), "clone"),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 1), "clone"),
    "diag": (lambda x: torch.diag(x[0]), "diag_embed"),
    "quantile": (lambda x: torch.quantile(x, torch.tensor([0.1, 0.75]), dim=1), "sort"),
    "reshape": (lambda x: x.t().reshape(-1), "clone"),
    "to": (lambda x: x.to(torch.float64), "_to_copy"),
    "rms_norm": (lambda x: F.rms_norm(x, x.shape[-1:]), "mul.Tensor"),
    "var": (lambda x: x.std(), "std.correction"),
    "fill": (lambda x: x * torch.ones(3).fill_(2.0), "fill_.Scalar"),
}


@pytest.mark.parametrize("name", COMPOSITES)
def test_composites_reach_a_leaf_and_keep_their_gradient(name):
    call, leaf = COMPOSITES[name]

    def run() -> list[Tensor]:
        x = torch.tensor([[1.0, -2.0, 3.0], [0.5, 4.0, -1.0], [2.0, 2.5, 1.5]], requires_grad=True)
        made = call(x)
        made.double().square().sum().backward()
        return [made.detach(), x.grad]

    aten = run()
    with tw.aten.use("all"):
        ours = run()
        assert tw.aten.report()[leaf]["taken"], tw.aten.report()[leaf]
    for a, b in zip(ours, aten):
        torch.testing.assert_close(a, b)
    assert [t.stride() for t in ours] == [t.stride() for t in aten]


RANDOM = {name for name, engine in table.ENGINE.items() if engine == "random"}
# What a composite with a gradient reaches instead, where torch has a formula for its parts
WITH_A_GRADIENT = {"rms_norm": "mul.Tensor"} if DEVICE == "cpu" else {}


@pytest.mark.parametrize("name", LEAVES)
def test_every_leaf_is_reached_with_a_gradient(name):
    """By a plain call of each name that has no replacement of its own."""
    torch.manual_seed(0)
    given = call_of(name, partial(drawn, device=DEVICE))
    if name == "contiguous":
        given = [given[0][0].t().contiguous().t()], {}
    in_place = name.partition(".")[0].endswith("_")

    def run() -> list[Any]:
        args, kwargs = map(copied, given)
        leaves = [t for t in flat([args, list(kwargs.values())]) if isinstance(t, Tensor) and t.is_floating_point()]
        for t in leaves:
            t.requires_grad_()
        if in_place:  # of what is no leaf of autograd's
            args[0] = args[0].clone()
        made = overload_of(name)(*args, **kwargs)
        assert made is args[0] or not in_place
        shown = blank(made) if LEAVES[name] in RANDOM else made.detach()
        if not made.requires_grad:
            return [shown]
        try:
            return [shown, *torch.autograd.grad(made.double().square().sum(), leaves, allow_unused=True)]
        except RuntimeError as error:  # of what torch has no formula for
            return [shown, str(error)]

    aten = run()
    leaf = WITH_A_GRADIENT.get(name, LEAVES[name])
    with tw.aten.use("all", include=[leaf]):
        ours = run()
        assert tw.aten.report()[leaf]["taken"], tw.aten.report()[leaf]
    for a, b in zip(ours, aten, strict=True):
        assert isinstance(b, Tensor) or a == b
        if isinstance(b, Tensor):
            torch.testing.assert_close(a, b)
            assert a.stride() == b.stride()


def test_gradients_are_right():
    """By differences, in float64, through several engines at once."""

    def f(x: Tensor, y: Tensor) -> Tensor:
        return (torch.sigmoid(x) * F.gelu(y)).cumsum(0).amax(1) + F.pad(x, (1, 1)).mean(1) + (x / (y * y + 1)).std(1)

    torch.manual_seed(0)
    x, y = (torch.randn(3, 4, dtype=torch.float64, requires_grad=True) for _ in range(2))
    with tw.aten.use("all"):
        assert torch.autograd.gradcheck(f, (x, y))
        assert taken() > 100


REPEATED = 20  # times, all of the same bits
ROWS, COLUMNS = (70, 3) if DEVICE == "cpu" else (20_000, 64)  # of which a GPU's programs are at work at once


def norm_back(name: str, x: Tensor, dy: Tensor) -> Any:
    """Gradients of a norm: of what it is of, of weights and of what is added."""
    norm = {
        "layer": lambda x, w, b: F.layer_norm(x, (COLUMNS,), w, b),
        "group": lambda x, w, b: F.group_norm(x, 1, w, b),
        "batch": lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True),
    }[name]
    leaves = [t.detach().clone().requires_grad_() for t in (x, torch.ones(COLUMNS), torch.zeros(COLUMNS))]
    return torch.autograd.grad(norm(*leaves), leaves, dy)


SUMMED: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "index_put_": lambda x, i, dy: x[:7].clone().index_put_((i,), dy, accumulate=True),
    "index_add": lambda x, i, dy: x[:7].index_add(0, i, dy),
    "scatter_add": lambda x, i, dy: x[:7].scatter_add(0, i[:, None].expand_as(dy), dy),
    "embedding_dense_backward": lambda x, i, dy: torch.ops.aten.embedding_dense_backward(dy, i, 7, -1, False),
    **{f"native_{one}_norm_backward": lambda x, i, dy, one=one: norm_back(one, x, dy) for one in ("layer", "group", "batch")},
}  # fmt: skip


@pytest.mark.parametrize("name", SUMMED)
def test_the_same_bits_while_deterministic_algorithms_are_asked_for(name):
    """And the calls are ours, whose sums have one order."""
    torch.manual_seed(0)
    x, i, dy = torch.randn(ROWS, COLUMNS), torch.randint(0, 7, (ROWS,)), torch.randn(ROWS, COLUMNS)
    torch.use_deterministic_algorithms(True)
    try:
        with tw.aten.use("all"):
            made = [flat(SUMMED[name](x, i, dy)) for _ in range(REPEATED)]
            assert tw.aten.report()[name] == {"taken": REPEATED, "declined": {}}
    finally:
        torch.use_deterministic_algorithms(False)
    assert len({b"".join(t.cpu().numpy().tobytes() for t in one) for one in made}) == 1


def test_vmap_and_autocast_stand_above():
    x = torch.randn(4, 6)
    call = lambda: flat([torch.func.vmap(lambda row: row.exp().sum())(x), torch.func.grad(lambda t: t.sin().sum())(x)])  # noqa: E731
    aten, ours, ran = both(call)
    assert ran and not differences(ours, aten, as_double(aten), 50.0)


def test_counts_past_what_fp32_holds(monkeypatch):
    """A sum of ones in fp32 stops at 2**24. Tiles are long here, for the interpreter's sake."""
    monkeypatch.setattr(reduction, "row_tile", lambda *_: (1, 1 << 17, 1))
    x = torch.ones(1).expand(2**24 + 5)
    with tw.aten.use("all", include=["count_nonzero"]):
        found = torch.count_nonzero(x)
        taken = tw.aten.report()["count_nonzero"]["taken"]
    assert (int(found), taken) == (2**24 + 5, 1)


@pytest.mark.parametrize(
    "call",
    [
        lambda x: torch.cumsum(x[1:], 0, out=x[:-1]), lambda x: torch.cumsum(x, 0, out=x),
        lambda x: torch.sum(x.view(5, 8), 0, out=x[3:11]),
    ],
)  # fmt: skip
def test_a_result_on_what_is_read_is_left_to_aten(call):
    """Programs would read what others have written."""
    made = [torch.arange(40.0) for _ in range(2)]
    wanted = raised(lambda: call(made[0]))
    with tw.aten.use("all", include=["cumsum", "sum"]):
        found = raised(lambda: call(made[1]))
        counts = tw.aten.report().values()
        assert any("a result that overlaps an operand" in one["declined"] for one in counts)
    assert found == wanted
    assert torch.equal(*made)


def raised(call: Callable[[], Any]) -> str | None:
    try:
        call()
    except RuntimeError as error:
        return str(error)
    return None
