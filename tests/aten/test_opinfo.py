"""Every replaced operator on torch's own samples: values, dtypes, strides, exceptions and gradients are aten's."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.aten.compare import as_double, differences, flat
from tests.aten.declined import LEFT_OF
from tests.aten.samples import DEVICE, ENTRIES, dtypes_of, error_samples, samples
from tilewright.aten import table
from tilewright.aten.table import overload_of
from tilewright.check.provided.aten import aten_of, blank, call_of, copied, drawn, exact_of, written

# Samples of an entry and dtype, each with its twin that is not contiguous; a GPU compiles for most of them. Twelve would be half as
# much again of most of this net's CPU seconds (`tests/seconds.py` has its budget), and are seldom of a kind that eight are not
MOST = 8 if DEVICE == "cpu" else 2
# Entries of which every call is one of ours, or a composite's leaf. `clamp_min` is none: its samples are all of another overload
NAMES = [
    "__radd__", "__rand__", "__rdiv__", "__rmod__", "__rmul__", "__ror__", "__rpow__", "abs", "add", "addcdiv", "addcmul",
    "addr", "all", "allclose", "amax", "angle", "any", "arange", "argmax", "argmin", "atan", "bfloat16", "bitwise_and",
    "bitwise_not", "bitwise_or", "bool", "cat", "clamp", "clone", "column_stack", "constant_pad_nd", "cos", "count_nonzero",
    "cummax", "cummin", "cumsum", "diag", "diag_embed", "diagflat", "div.floor_rounding", "div.no_rounding_mode",
    "div.trunc_rounding", "dot", "double", "dstack", "eq", "erf", "exp", "exp2", "eye", "fill", "flip", "fliplr", "flipud",
    "float_power", "floor_divide", "full", "full_like", "ge", "gt", "half", "hstack", "isclose", "isfinite", "isinf", "isnan",
    "kron", "le", "lerp", "linalg.vecdot", "linalg.vector_norm", "linspace", "log", "logspace", "logical_and", "logical_not",
    "logical_or", "logical_xor", "lt", "masked_fill", "max.binary", "max.reduction_no_dim", "max.reduction_with_dim", "maximum",
    "mean", "min.binary", "min.reduction_no_dim", "min.reduction_with_dim", "minimum", "mul", "nan_to_num",
    "native_dropout_backward", "ne", "neg", "nn.functional.celu", "nn.functional.elu", "nn.functional.gelu",
    "nn.functional.glu", "nn.functional.logsigmoid", "nn.functional.mse_loss", "nn.functional.normalize",
    "nn.functional.pad.constant", "nn.functional.relu", "nn.functional.selu", "nn.functional.silu", "nn.functional.softplus",
    "nn.functional.softsign", "nn.functional.tanhshrink", "nn.functional.threshold", "ones", "ones_like", "outer", "polar",
    "pow", "prod", "quantile", "reciprocal", "remainder", "repeat", "rsqrt", "select_scatter", "sigmoid", "sin",
    "slice_scatter", "sqrt", "square", "stack", "std", "std.unbiased", "sub", "sum", "sum_to_size", "tanh", "tile", "trace",
    "triu", "true_divide", "var_mean", "vdot", "vstack", "where", "zeros", "zeros_like",
    "byte", "char", "int", "long", "short",
    # index
    "__getitem__", "gather", "index_add", "index_put", "index_select", "isin", "masked_select", "nn.functional.cross_entropy",
    "nn.functional.embedding", "nn.functional.nll_loss", "nonzero", "repeat_interleave", "scatter", "scatter_add", "take_along_dim",
    # sort
    "argsort", "msort", "sort", "topk", "unique",
]  # fmt: skip
SOFTMAXES = ["softmax", "softmax.with_dtype", "log_softmax", "log_softmax.with_dtype", "_softmax_backward_data"]
NORMS = [
    "native_layer_norm", "native_batch_norm", "nn.functional.batch_norm", "nn.functional.instance_norm",
    "nn.functional.layer_norm", "nn.functional.group_norm", "nn.functional.rms_norm",
]  # fmt: skip
PRODUCTS = ["mm", "addmm", "bmm", "mv", "addmv", "matmul", "nn.functional.linear"]
WINDOWS = [
    "nn.functional.avg_pool2d", "nn.functional.max_pool2d", "max_pool2d_with_indices_backward", "nn.functional.interpolate.nearest",
    "nn.functional.upsample_nearest",
]  # fmt: skip
NAMES += [*SOFTMAXES, *NORMS, *PRODUCTS, *WINDOWS]
IN_PLACE = [n for n in NAMES if ENTRIES[n].get_inplace() is not None]
# Sums of terms that may cancel, where aten rounds other terms on the way than we do: errors are steps of the largest operand
SUMS = ["addr", "cumsum", "std", "std.unbiased", "var_mean"]
SUMS += [*NORMS, *PRODUCTS, "native_group_norm", "_softmax_backward_data"]
# The same of overloads that are no entries: means, and sums about them, of which the gradients are differences
SUMS += ["_fused_rms_norm", "_fused_rms_norm_backward"]
SUMS += [f"native_{kind}_norm_backward" for kind in ("batch", "group", "layer")]
if (
    DEVICE == "cpu"
):  # A product and a sum are rounded once by aten and by a GPU's compiler, and twice in the interpreter
    SUMS += ["add", "addcdiv", "addcmul", "lerp", "sub", "tanh_backward"]
POISONED = "out of bounds"  # what aten says of an index that is outside its range
GRADIENTS = [
    "add", "amax", "cat", "clamp", "cummax", "cumsum", "div.no_rounding_mode", "exp", "hstack", "kron", "lerp",
    "linalg.vector_norm", "masked_fill", "max.reduction_with_dim", "mean", "mul", "nn.functional.elu", "nn.functional.gelu",
    "nn.functional.glu", "nn.functional.logsigmoid", "nn.functional.mse_loss", "nn.functional.pad.constant",
    "nn.functional.celu", "nn.functional.relu", "nn.functional.silu", "nn.functional.threshold", "pow", "prod", "repeat",
    "sigmoid", "std", "sum", "tanh", "tile", "true_divide", "var_mean", "vstack", "where",
    "__getitem__", "gather", "index_add", "index_put", "index_select", "masked_select",
    "nn.functional.nll_loss", "scatter_add", "sort", "topk",
]  # fmt: skip
GRADIENTS += ["softmax", "log_softmax", *NORMS[4:], *PRODUCTS[:5], *WINDOWS[:2]]


def taken() -> int:
    return sum(one["taken"] for one in tw.aten.report().values())


@pytest.fixture(autouse=True)
def quiet():
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", category=UserWarning, module="torch")
        yield


def wrong(name: str, calls: list[tuple[Any, Any, Any]], call: Any) -> list[str]:
    """What differs, over calls (input, arguments, keywords): aten first, then ours, which must take one of them, unless the table
    leaves to aten what these are of."""
    expected = [call(*one) for one in calls]
    with tw.aten.use("all"):
        made = [call(*one) for one in calls]
        ran, said = taken(), tw.aten.report()
    reasons = [(one, reason) for one, own in said.items() for reason in own["declined"]]
    left = any(reason in LEFT_OF.get(one, {}).values() for one, reason in reasons)
    truths: list[Any] = [None] * len(calls)
    for at, (own, other) in enumerate(zip(made, expected)):
        if differences(own, other):
            with contextlib.suppress(RuntimeError, TypeError):  # of a call that mixes dtypes
                truths[at] = call(*(as_double(part) for part in calls[at]))
    found = [
        f"{shown(one)}: {line}"
        for one, own, other, truth in zip(calls, made, expected, truths)
        for line in [*differences(own, other, truth, scale(name, one)), *misplaced(one, own, other)]
    ]
    return found if ran or left else [*found, f"no replacement ran: {reasons}"]


def misplaced(call: tuple[Any, Any, Any], own: Any, other: Any) -> list[str]:
    """Which results share memory with an operand, or with another result, where aten's do not; and the reverse."""

    def sharing(made: Any) -> list[tuple[int, int]]:
        every = [
            t for t in flat([call[0], call[1], list(call[2].values()), made]) if isinstance(t, Tensor) and t.numel()
        ]
        places = [t.untyped_storage().data_ptr() for t in every]
        return [(a, b) for b in range(len(places)) for a in range(b) if places[a] == places[b]]

    return [] if sharing(own) == sharing(other) else [f"shares memory as {sharing(own)}, not as {sharing(other)}"]


def scale(name: str, arguments: Any) -> float:
    """The largest number among the operands of a sum."""
    tensors = [t for t in flat(arguments) if isinstance(t, Tensor) and t.is_floating_point() and t.numel()]
    largest = [float(t.double().nan_to_num(0.0, 0.0, 0.0).abs().max()) for t in tensors]
    return max(largest, default=0.0) if name in SUMS else 0.0


def shown(call: tuple[Any, Any, Any]) -> str:
    def word(value: Any) -> str:
        if isinstance(value, Tensor):
            return f"{str(value.dtype).removeprefix('torch.')}{tuple(value.shape)}{value.stride()}"
        return str([word(v) for v in value]) if isinstance(value, (list, tuple)) else repr(value)

    return f"{word(call[0])}, {word(call[1])}, {call[2]}"


@pytest.mark.parametrize("name", NAMES)
def test_results_are_atens(name):
    op = ENTRIES[name]
    for dtype in dtypes_of(name):
        calls = [(s.input, s.args, s.kwargs) for s in samples(name, dtype, MOST)]
        found = wrong(name, calls, lambda x, args, kwargs: chosen(name, x, op(unshared(x, kwargs), *args, **kwargs)))
        assert not found, "\n".join(found)


def unshared(x: Any, kwargs: Any) -> Any:
    """A first operand that no other call sees: `embedding` writes into it where rows are longer than `max_norm`. On a GPU none is
    longer: torch's kernel shortens a row once for each row of indices that names it, all at once, and so to this or that length."""
    if kwargs.get("max_norm") is None:
        return x
    own = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device).copy_(x)
    return own if DEVICE == "cpu" else own.mul_(2.0**-10)


def chosen(name: str, x: Any, made: Any) -> Any:
    """A result; of equals, `topk` may choose any: instead of indices, what they name."""
    if name != "topk":
        return made
    sizes = [d for d in range(x.dim()) if made[1].shape[d] != x.shape[d]]
    return made[0], x.gather(sizes[0], made[1]) if sizes else made[0]


def in_place(op: Any) -> Any:
    def call(x: Tensor, args: Any, kwargs: Any) -> Any:
        copy = x.clone()
        before = copy._version
        try:
            made = op.get_inplace()(copy, *args, **kwargs)
        except RuntimeError as error:  # a result that the first operand cannot hold
            return type(error).__name__
        return copy, made is copy, copy._version - before

    return call


@pytest.mark.parametrize("name", IN_PLACE)
def test_in_place_the_tensor_is_the_result(name):
    calls = [(s.input, s.args, s.kwargs) for s in samples(name, torch.float32, 2) if isinstance(s.input, Tensor)]
    if torch.float32 not in ENTRIES[name].supported_dtypes(DEVICE):
        calls = [(s.input, s.args, s.kwargs) for s in samples(name, torch.int32, 2)]
    found = wrong(name, calls, in_place(ENTRIES[name]))
    assert not found, "\n".join(found)


# Entries that take `out=`, and the overload for it, where one is replaced
OUT = {
    "addmm": "addmm.out", "addmv": "addmv.out", "arange": "arange.start_out", "cumsum": "cumsum.out", "eye": "eye.m_out",
    "floor_divide": "floor_divide.out", "linspace": "linspace.out", "logspace": "logspace.out", "mm": "mm.out", "mv": "addmv.out",
    "sum": "sum.IntList_out", "where": "where.self_out",
}  # fmt: skip
GIVEN: dict[str, Callable[[Tensor], Tensor]] = {
    "as the result": torch.empty_like,
    "of size 0": lambda t: t.new_empty(0),
    "of another size": lambda t: t.new_empty([n + 1 for n in t.shape] or 2),
    "of more dimensions": lambda t: t.new_empty([2, *t.shape]),
    "of another float": lambda t: torch.empty_like(t, dtype=torch.float64),
    "of integers": lambda t: torch.empty_like(t, dtype=torch.int32),
    "with gaps": lambda t: t.new_empty([*t.shape, 2])[..., 0],
    "turned": lambda t: t.new_empty(t.shape[::-1]).permute(*range(t.dim())[::-1]),
}


@pytest.mark.parametrize("name", OUT)
def test_results_that_are_given_are_atens(name):
    """Values, the tensor itself, its strides and memory after it was resized, warnings and exceptions."""
    op, dtype = ENTRIES[name], dtypes_of(name)[0]
    given = [(s.input, s.args, s.kwargs) for s in samples(name, dtype, 8)]  # of which one is tried
    given = [one for one in given[::2] if name != "sum" or one[2].get("dim") is not None]
    given = [one for one in given if all(t.numel() for t in flat(one[:2]) if isinstance(t, Tensor))]
    x, args, kwargs = max(given, key=lambda one: op(one[0], *one[1], **one[2]).numel())
    plain = op(x, *args, **kwargs)
    truth = op(as_double(x), *as_double(args), **as_double(kwargs))

    def call(make: Callable[[Tensor], Tensor]) -> list[Any]:
        out = make(plain)
        version = out._version
        with warnings.catch_warnings(record=True) as heard:
            warnings.simplefilter("always")
            try:
                made = op(x, *args, **kwargs, out=out)
            except Exception as error:
                return [type(error), str(error), out.shape, out.stride()]
        said = [str(one.message) for one in heard if "Overriding" not in str(one.message)]
        return [out, made is out, out._version - version, out.untyped_storage().nbytes(), *said]

    expected = {what: call(make) for what, make in GIVEN.items()}
    with tw.aten.use("all"):
        made = {what: call(make) for what, make in GIVEN.items()}
        said = tw.aten.report()[OUT[name]]
    assert said["taken"] and said["declined"], said
    for what, other in expected.items():
        exact = [truth, *[None] * (len(other) - 1)]
        assert not differences(made[what], other, exact, scale(name, [x, *args])), what


@pytest.mark.parametrize("name", [n for n in NAMES if ENTRIES[n].error_inputs_func is not None])
def test_what_aten_refuses_is_refused_alike(name):
    op = ENTRIES[name]

    def refused(sample: Any) -> Any:
        try:
            made = op(sample.input, *sample.args, **sample.kwargs)
        except Exception as error:
            return type(error), str(error)
        return [(t.dtype, t.shape) for t in flat(made) if isinstance(t, Tensor)]

    given = [e.sample_input for e in error_samples(name)]
    expected = [refused(sample) for sample in given]
    # An index outside its range poisons its own element, on every device
    told = [at for at, one in enumerate(expected) if isinstance(one, list) or POISONED not in one[1]]
    with tw.aten.use("all"):
        assert [refused(given[at]) for at in told] == [expected[at] for at in told]


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients_are_autograds(name):
    """Autograd stands above the replacements: its formulas run, on what they give."""
    op = ENTRIES[name]

    def gradients(sample: Any) -> list[Tensor]:
        leaves = [t for t in flat([sample.input, *sample.args]) if isinstance(t, Tensor) and t.is_floating_point()]
        leaves = [t.detach().requires_grad_() for t in leaves]
        rest = iter(leaves)

        def swapped(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(swapped, value))
            return next(rest) if isinstance(value, Tensor) and value.is_floating_point() else value

        x, args = swapped(sample.input), swapped(tuple(sample.args))
        made = [t for t in flat(op(x, *args, **sample.kwargs)) if t.is_floating_point() and t.requires_grad]
        total = sum((t.double() * torch.arange(1, t.numel() + 1).view(t.shape)).sum() for t in made)
        found = torch.autograd.grad(total, leaves, allow_unused=True) if made else []
        return [g for g in found if g is not None]

    given = list(samples(name, torch.float32, 2))
    expected = [gradients(sample) for sample in given]
    with tw.aten.use("all"), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        made = [gradients(sample) for sample in given]
        assert taken()
    assert not [one for one in told if "autograd" in str(one.message)]
    for own, other in zip(made, expected):
        assert len(own) == len(other)
        for a, b in zip(own, other):
            near = 1e-6 * max(1.0, float(b.nan_to_num(0.0, 0.0, 0.0).abs().max())) if b.numel() else 0.0
            torch.testing.assert_close(a, b, rtol=2e-6, atol=near, equal_nan=True)
            assert a.stride() == b.stride()


# ---- every overload --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(table.FORMS))
def test_every_overload_is_reached(name):
    """By a plain call of it, which no row declines; what the call writes into is compared too."""

    torch.manual_seed(0)
    args, kwargs = call_of(name, partial(drawn, device=DEVICE))
    doubles = as_double(copied(args)), as_double(copied(kwargs))
    truth = written(name, exact_of(name, DEVICE)(*doubles[0], **doubles[1]))

    def call(own: list[Any], named: dict[str, Any], overload: Any) -> tuple[Any, list[Tensor], list[Any]]:
        given = [t for t in flat([own, list(named.values())]) if isinstance(t, Tensor)]
        versions = [t._version for t in given]
        made = written(name, overload(*own, **named))
        return made, given, [(made is t, t._version - before) for t, before in zip(given, versions)]

    expected = call(copied(args), copied(kwargs), aten_of(name, DEVICE))
    own = copied(args), copied(kwargs)
    with tw.aten.use("all", include=[name]):
        made = call(*own, overload_of(name))
        assert tw.aten.report()[name] == {"taken": 1, "declined": {}}
    packet = name.partition(".")[0].removesuffix("_")
    if table.ENGINE[name] == "random":  # whose values other tests are about
        made, expected = ((blank(one[0]), [], one[2]) for one in (made, expected))
        truth = None
    assert not differences(made[0], expected[0], truth, scale(packet, [*args, *kwargs.values()]))
    assert made[2] == expected[2]
    exact = [t for t in flat([doubles[0], list(doubles[1].values())]) if isinstance(t, Tensor)]
    for own, other, (result, _), whole in zip(made[1], expected[1], made[2], exact):
        assert result or not differences(own, other, whole), "an operand was written to"
