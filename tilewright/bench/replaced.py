"""torch's own operators as cases: a call of them with our replacements in force, held against aten and float64.

Calls are data: a function of tensors, and a word for each tensor. What is timed is ours alone: a timed call that a replacement
declined is an error, and so is, of a case whose calls are to be declined, one that was taken.
"""

from __future__ import annotations

import contextlib
import itertools
import re
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

import tilewright as tw

from ..aten import table
from ..aten.row import Declined
from ..aten.signature import Signature, signature_of
from ..aten.table import name_of, overload_of
from ..aten.verdicts import Place, Verdicts
from ..check.provided.aten import Make, aten_of, call_of, drawn, exact_of
from ..core.cost import tensor_bytes
from ..core.target import INTERPRETING, TARGETS, Target, pretend
from ..runtime.kernel import Wanted, collect
from .cases import Case
from .check import Wrong
from .timing import Within

COMPOSITE = torch._C.DispatchKey.CompositeExplicitAutograd
WORD = re.compile(r"(\w+)\[([\w ]*)\](?: or (\S+))?( > 0)?(?: < (\w+))?( by rank| half one)?")
MATRIX = "any[rows columns]"
SPARE = 1 << 20  # bytes beside its results that a replacement may take more than aten does
NUMBERS = {"allclose"}  # which reads its result, and there is none without memory
UNMEASURED = "unmeasured"  # how calls are declined that no row declines: nothing is measured of them
SMALL = {"diagonal_backward"}  # whose sizes are numbers, which nothing makes larger
SMALL |= {"native_group_norm", "native_group_norm_backward"}
ALONE = {"max_pool2d_backward"}  # of which torch has no kernel
WHOLE = {
    "allclose",
    "isclose",
    "isfinite",
}  # of which a dispatch mode sees the parts, and which are replaced as they are


class Call(NamedTuple):
    """A function of tensors, and a word for each: `bool[rows columns]` names dtype (`any` is the case's, `same` repeats the first
    tensor) and dimensions, `or 0` makes half of the elements 0, `> 0` all of them positive; `< vocab` is how far integers go, `by
    rank` makes small ones likely as Zipf has it, `half one` makes half of them 0. `read` is the share of their bytes that cannot be
    left unread. `draws`: results are random, and are held against aten's of the same seed. `written` is the tensor, by its place,
    that is written in place."""

    function: Callable[..., Any]
    tensors: tuple[str, ...] = (MATRIX,)
    read: float = 1.0
    draws: bool = False
    written: int | None = None


TWO = (MATRIX, MATRIX)
TURNED = (MATRIX, "any[columns rows]")
CALLS: dict[str, Call] = {
    # pointwise
    "neg": Call(torch.neg),
    "add": Call(torch.add, TWO),
    "gelu": Call(F.gelu),
    "where": Call(torch.where, ("bool[rows columns]", *TWO)),
    "addcmul": Call(torch.addcmul, (MATRIX, *TWO)),
    "pow": Call(torch.pow, (f"{MATRIX} > 0", MATRIX)),
    "add_row": Call(torch.add, (MATRIX, "any[columns]")),
    "add_column": Call(torch.add, (MATRIX, "any[rows 1]")),
    "add_transposed": Call(lambda x, y: x + y.t(), TURNED),
    "transpose": Call(lambda x: x.t().contiguous()),
    "clone": Call(torch.clone),
    "masked_fill_value": Call(
        lambda x, mask, value: x.masked_fill(mask, value), (MATRIX, "bool[rows columns]", "any[]")
    ),
    "masked_fill": Call(lambda x, mask: x.masked_fill(mask, 0.5), (MATRIX, "bool[rows columns]")),
    "isclose": Call(torch.isclose, (MATRIX, "same[rows columns] or 9")),
    "isfinite": Call(torch.isfinite, (f"{MATRIX} or inf",)),
    "isinf": Call(torch.isinf, (f"{MATRIX} or inf",)),
    "mul_transposed": Call(lambda x, y: x * y.t(), TURNED),
    "copy_transposed_": Call(lambda x, y: x.copy_(y.t()), TURNED, written=0),
    "fill_value_": Call(lambda x, value: x.fill_(value), (MATRIX, "any[]"), read=0.0, written=0),
    "masked_fill_value_": Call(
        lambda x, mask, value: x.masked_fill_(mask, value), (MATRIX, "bool[rows columns]", "any[]"), written=0
    ),
    # pointwise, of operands that lie otherwise than the first, or with gaps
    "masked_fill_transposed": Call(lambda x, mask: x.masked_fill(mask.t(), 0.5), (MATRIX, "bool[columns rows]")),
    "masked_fill_value_transposed": Call(
        lambda x, mask, value: x.masked_fill(mask.t(), value), (MATRIX, "bool[columns rows]", "any[]")
    ),
    "masked_fill_value_transposed_": Call(
        lambda x, mask, value: x.masked_fill_(mask.t(), value), (MATRIX, "bool[columns rows]", "any[]"), written=0
    ),
    "isclose_transposed": Call(lambda x, y: torch.isclose(x, y.t()), TURNED),
    "isfinite_strided": Call(lambda x: torch.isfinite(x[:, ::2]), (f"{MATRIX} or inf",)),
    "isinf_strided": Call(lambda x: torch.isinf(x[:, ::2]), (f"{MATRIX} or inf",)),
    # index map
    "pad": Call(lambda x: F.pad(x, (1, 1, 1, 1))),
    "pad_transposed": Call(lambda x: F.pad(x.t(), (1, 1, 1, 1))),
    "triu": Call(torch.triu, read=0.5),
    "flip": Call(lambda x: x.flip(1)),
    "slice_scatter": Call(lambda x, y: x.slice_scatter(y, 1, 0, y.shape[1]), (MATRIX, "any[rows part]")),
    "slice_scatter_transposed": Call(lambda x, y: x.slice_scatter(y.t(), 1, 0, y.shape[0]), (MATRIX, "any[part rows]")),
    "select_scatter": Call(lambda x, y: x.select_scatter(y, 0, 1), (MATRIX, "any[columns]")),
    "cat": Call(lambda x, y: torch.cat((x, y), 1), TWO),
    "stack": Call(lambda x, y: torch.stack((x, y), -1), TWO),
    "repeat": Call(lambda x: x.repeat(2, 2)),
    "repeat_interleave": Call(lambda x: x.repeat_interleave(2, 1)),
    # reductions
    "sum_last": Call(lambda x: x.sum(1)),
    "sum_first": Call(lambda x: x.sum(0)),
    "sum_middle": Call(lambda x: x.unflatten(0, (16, -1)).sum(1)),
    "sum_all": Call(torch.sum),
    "std_last": Call(lambda x: x.std(1)),
    "max_last": Call(lambda x: x.max(1)),
    "max_first": Call(lambda x: x.max(0)),
    "argmax_last": Call(lambda x: x.argmax(1)),
    "argmax_first": Call(lambda x: x.argmax(0)),
    "argmax_all": Call(torch.argmax),
    "var_mean_last": Call(lambda x: torch.var_mean(x, 1)),
    "var_mean_first": Call(lambda x: torch.var_mean(x, 0)),
    "var_mean_all": Call(torch.var_mean),
    "mse_loss": Call(F.mse_loss, TWO),
    "count_nonzero": Call(torch.count_nonzero, (f"{MATRIX} or 0",)),
    "allclose": Call(torch.allclose, (MATRIX, "same[rows columns]")),
    "mse_loss_transposed": Call(lambda x, y: F.mse_loss(x, y.t()), TURNED),
    "count_nonzero_strided": Call(lambda x: torch.count_nonzero(x[:, ::2]), (f"{MATRIX} or 0",)),
    # scans
    "cumsum_last": Call(lambda x: x.cumsum(1)),
    "cumsum_first": Call(lambda x: x.cumsum(0)),
    "cummax_last": Call(lambda x: x.cummax(1)),
    "cummin_last": Call(lambda x: x.cummin(1)),
}
aten = torch.ops.aten
IMAGES, LAST = "any[images channels height width]", "any[images height width channels]"
CHANNELS = "any[channels]", "any[channels]"
ROWS_OF = "float32[rows 1]", "float32[rows 1] > 0", "any[columns]", "any[columns]"
HALVED, HALVED_LAST = "any[images channels rows columns]", "any[images rows columns channels]"
GROUPS = 32
ALL = [True, True, True]


def turned(x: Tensor) -> Tensor:
    """Images of which channels are last, in the order of dimensions that torch has."""
    return x.permute(0, 3, 1, 2)


def groups(x: Tensor) -> tuple[int, int, int, int]:
    return x.shape[0], x.shape[1], x.shape[2] * x.shape[3], GROUPS


def groups_back(dy: Tensor, x: Tensor, mean: Tensor, rstd: Tensor, w: Tensor) -> Any:
    return aten.native_group_norm_backward(dy.contiguous(), x.contiguous(), mean, rstd, w, *groups(x), ALL)


def moments_of(x: Tensor, *moments: Tensor) -> list[Tensor]:
    """Moments as a backward pass takes them: a processor's are of the operand's dtype."""
    return list(moments) if x.is_cuda or x.is_meta else [t.to(x.dtype) for t in moments]


def averages_back(dy: Tensor, x: Tensor) -> Tensor:
    return aten.avg_pool2d_backward(dy, x, [2, 2], [2, 2], [0, 0], False, True, None)


MOMENTS = f"any[images {GROUPS}]", f"any[images {GROUPS}] > 0"
CALLS |= {
    # rows
    "softmax_last": Call(lambda x: torch.softmax(x, 1)),
    "softmax_last_back": Call(lambda y, dy: aten._softmax_backward_data(dy, y, 1, y.dtype), TWO),
    "softmax_first": Call(lambda x: torch.softmax(x, 0)),
    "softmax_middle": Call(lambda x: torch.softmax(x.unflatten(0, (16, -1)), 1)),
    "log_softmax_last": Call(lambda x: torch.log_softmax(x, 1)),
    "log_softmax_first": Call(lambda x: torch.log_softmax(x, 0)),
    "softmax_first_back": Call(lambda y, dy: aten._softmax_backward_data(dy, y, 0, y.dtype), TWO),
    "log_softmax_first_back": Call(lambda y, dy: aten._log_softmax_backward_data(dy, y, 0, y.dtype), TWO),
    "log_softmax_middle_back": Call(
        lambda y, dy: aten._log_softmax_backward_data(*(t.unflatten(0, (16, -1)) for t in (dy, y)), 1, y.dtype), TWO
    ),
    "layer_norm": Call(
        lambda x, w, b: torch.native_layer_norm(x, x.shape[1:], w, b, 1e-5), (MATRIX, "any[columns]", "any[columns]")
    ),
    "layer_norm_back": Call(
        lambda dy, x, *m: aten.native_layer_norm_backward(dy, x, x.shape[1:], *moments_of(x, *m), ALL), (*TWO, *ROWS_OF)
    ),
    "group_norm": Call(lambda x, w, b: F.group_norm(x, GROUPS, w, b), (IMAGES, *CHANNELS)),
    "group_norm_last": Call(lambda x, w, b: F.group_norm(turned(x), GROUPS, w, b), (LAST, *CHANNELS)),
    "group_norm_back": Call(groups_back, (IMAGES, IMAGES, *MOMENTS, "any[channels]")),
    "group_norm_last_back": Call(
        lambda dy, x, *rest: groups_back(turned(dy), turned(x), *rest), (LAST, LAST, *MOMENTS, "any[channels]")
    ),
    "batch_norm": Call(
        lambda x, w, b: aten.native_batch_norm(x, w, b, None, None, True, 0.1, 1e-5), (IMAGES, *CHANNELS)
    ),
    "batch_norm_back": Call(
        lambda dy, x, w, *m: aten.native_batch_norm_backward(dy, x, w, None, None, *moments_of(x, *m), True, 1e-5, ALL),
        (IMAGES, IMAGES, "any[channels]", "float32[channels]", "float32[channels] > 0"),
    ),
    "weight_norm": Call(lambda v, g: torch._weight_norm_interface(v, g, 0), (MATRIX, "any[rows 1]")),
    "weight_norm_back": Call(
        lambda dw, v, g, norms: aten._weight_norm_interface_backward(dw, v, g, norms, 0),
        (*TWO, "any[rows 1]", "float32[rows 1] > 0"),
    ),
    # products
    "mm": Call(torch.mm, (MATRIX, "any[columns rows]")),
    "mv": Call(torch.mv, (MATRIX, "any[columns]")),
    "addmv": Call(torch.addmv, ("any[rows]", MATRIX, "any[columns]")),
    "bmm": Call(torch.bmm, ("any[batch rows columns]", "any[batch columns rows]")),
    # windows
    "avg_pool": Call(lambda x: F.avg_pool2d(x, 2), (IMAGES,)),
    "avg_pool_last": Call(lambda x: F.avg_pool2d(turned(x), 2), (LAST,)),
    "avg_pool_back": Call(averages_back, (HALVED, IMAGES)),
    "avg_pool_last_back": Call(lambda dy, x: averages_back(turned(dy), turned(x)), (HALVED_LAST, LAST)),
    "max_pool": Call(lambda x: aten.max_pool2d_with_indices(x, [2, 2]), (IMAGES,)),
    "max_pool_last": Call(lambda x: aten.max_pool2d_with_indices(turned(x), [2, 2]), (LAST,)),
}


def seed_at(device: torch.device) -> None:
    own = torch.cuda.default_generators[device.index] if device.type == "cuda" else torch.default_generator
    own.manual_seed(0)


def seeded(call: Callable[..., Any]) -> Callable[..., Any]:
    """A call that draws the same numbers every time. Its device's generator alone is seeded, which takes next to no time."""

    def function(first: Tensor, *others: Tensor) -> Any:
        seed_at(first.device)
        return call(first, *others)

    return function


ADDED = ("any[places columns]", "int64[rows] < places half one", MATRIX)
ADDED_TURNED = (*ADDED[:2], "any[columns rows]")
# index, sort, random
CALLS |= {
    "embedding_backward": Call(
        lambda grad, ids, table: torch.ops.aten.embedding_dense_backward(grad, ids, table.shape[0], -1, False),
        ("any[tokens columns]", "int64[tokens] < vocab by rank", "bool[vocab]")),
    "index_put": Call(lambda x, i, v: x.index_put((i,), v, accumulate=True), ADDED),
    "index_add": Call(lambda x, i, v: x.index_add(0, i, v), ADDED),
    "scatter_add": Call(lambda x, i, v: x.scatter_add(0, i[:, None].expand(v.shape), v), ADDED),
    "index_put_turned": Call(lambda x, i, v: x.index_put((i,), v.t(), accumulate=True), ADDED_TURNED),
    "index_put_impl_turned_": Call(
        lambda x, i, v: aten._index_put_impl_(x, [i], v.t(), True, False), ADDED_TURNED, written=0),
    "index_put_": Call(lambda x, i, v: x.index_put_((i,), v, accumulate=True), ADDED, written=0),
    "index_put_turned_": Call(lambda x, i, v: x.index_put_((i,), v.t(), accumulate=True), ADDED_TURNED, written=0),
    "index_put_impl_": Call(lambda x, i, v: aten._index_put_impl_(x, [i], v, True, False), ADDED, written=0),
    "index_add_": Call(lambda x, i, v: x.index_add_(0, i, v), ADDED, written=0),
    "scatter_add_": Call(lambda x, i, v: x.scatter_add_(0, i[:, None].expand(v.shape), v), ADDED, written=0),
    "masked_select": Call(torch.masked_select, (MATRIX, "bool[rows columns]")),
    "nonzero": Call(torch.nonzero, (f"{MATRIX} or 0",)),
    "nll_loss": Call(F.nll_loss, (MATRIX, "int64[rows] < columns")),
    "nll_loss_2d": Call(F.nll_loss, (IMAGES, "int64[images height width] < channels")),
    "nll_loss_2d_last": Call(lambda x, y: F.nll_loss(turned(x), y), (LAST, "int64[images height width] < channels")),
    "isin_strided": Call(
        lambda x, among: torch.isin(x[::2], among), ("int64[rows] < most", "int64[columns] < most")),
    "isin": Call(torch.isin, ("int64[rows] < most", "int64[columns] < most")),
    "topk_last": Call(lambda x: x.topk(8, 1)[0]),
    "topk_first": Call(lambda x: x.topk(8, 0)[0]),
    "topk_all": Call(lambda x: x.flatten().topk(8)[0]),
    "topk_50": Call(lambda x: x.topk(min(50, x.shape[1]), 1)[0]),
    "sort_last": Call(lambda x: x.sort(1)[0]),
    "rand_like": Call(seeded(torch.rand_like), read=0.0, draws=True),
    "randn_like": Call(seeded(torch.randn_like), read=0.0, draws=True),
    "dropout": Call(seeded(lambda x: torch.native_dropout(x, 0.5, True)), draws=True),
}  # fmt: skip
FLASH = "_flash_attention_forward"
QUERIES, SHARED = "bfloat16[batch length heads head_dim]", "bfloat16[batch length kv_heads head_dim]"
BEFORE = "bfloat16[batch heads length head_dim]"  # heads before their tokens


def attended(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    """o and lse of flash attention, whose other results nobody writes. aten has it in 16 bits on a GPU alone: what is exact is by
    the formula, and so is a processor's where it is not replaced."""
    if q.dtype == torch.float64:  # one sequence at a time: the scores of all of them may not fit into memory
        made = [flashed(exact_of(FLASH, "cuda"), *(t[at, None] for t in (q, k, v)), causal) for at in range(len(q))]
        return [torch.cat(parts) for parts in zip(*made)]
    return flashed(aten_of(FLASH, "cpu") if q.is_cpu else overload_of(FLASH), q, k, v, causal)


def flashed(function: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, causal: bool) -> list[Tensor]:
    return list(function(q, k, v, None, None, q.shape[1], k.shape[1], 0.0, causal, False)[:2])


def turned_heads(*tensors: Tensor) -> list[Tensor]:
    """As `scaled_dot_product_attention` hands on what lies with heads before their tokens."""
    return [t.transpose(1, 2) for t in tensors]


# attention
CALLS |= {
    "attention": Call(lambda *given: attended(*given, causal=False), (QUERIES,) * 3),
    "attention_causal": Call(lambda *given: attended(*given, causal=True), (QUERIES,) * 3),
    "attention_shared_causal": Call(lambda *given: attended(*given, causal=True), (QUERIES, SHARED, SHARED)),
    "attention_turned": Call(lambda *given: attended(*turned_heads(*given), causal=False), (BEFORE,) * 3),
    "attention_turned_causal": Call(lambda *given: attended(*turned_heads(*given), causal=True), (BEFORE,) * 3),
}


class Word(NamedTuple):
    """What a word says of a tensor."""

    shape: list[int]
    dtype: torch.dtype
    same: bool
    other: float | None
    positive: bool
    below: int = 100
    spread: str = ""

    @staticmethod
    def read(word: str, case: Case) -> Word:
        kind, names, other, positive, below, spread = WORD.fullmatch(word).groups()
        shape = [case.dims[n] if n in case.dims else int(n) for n in names.split()]
        dtype = getattr(torch, case.dtype if kind in ("any", "same") else kind)
        most = 100 if below is None else case.dims[below]
        return Word(
            shape,
            dtype,
            kind == "same",
            None if other is None else float(other),
            positive is not None,
            most,
            spread or "",
        )


def drawn_by(word: Word, source: torch.Generator, given: list[Tensor]) -> Tensor:
    """A tensor by its word, on the generator's device, beside those that are `given` already."""
    shape, dtype, same, other, positive, below, spread = word
    settings = {"generator": source, "device": source.device}
    if same:
        made = given[0].clone()
    elif dtype.is_floating_point or dtype.is_complex:
        made = torch.randn(shape, dtype=torch.promote_types(dtype, torch.float32), **settings).to(dtype)
    else:
        made = torch.randint(0, 2 if dtype == torch.bool else below, shape, dtype=dtype, **settings)
    if spread == " by rank":
        made = (float(below) ** torch.rand(shape, dtype=torch.float64, **settings)).to(dtype) - 1
    elif spread:
        made[torch.rand(shape, **settings) < 0.5] = 0
    if other is not None:
        made[torch.rand(shape, **settings) < 0.5] = other
    return made.abs() + 0.25 if positive else made


def drawn_for(case: Case, source: torch.Generator) -> list[Tensor]:
    made: list[Tensor] = []
    for word in CALLS[case.call].tensors:
        made.append(drawn_by(Word.read(word, case), source, made))
    return made


# ---- what is timed ---------------------------------------------------------------------------------------------------


@dataclass
class Replaced:
    """One buffer set of a case and what can be done with it."""

    case: Case
    function: Callable[..., Any]
    given: Sequence[Any]
    names: tuple[str, ...] | None = None  # of the overloads that are replaced; None: all
    kept: Tensor | None = None  # what the call writes over, as it was
    steps, coarse, flops = False, False, None

    @staticmethod
    def build(case: Case, seed: int = 0, device: str = "cuda") -> Replaced:
        source = torch.Generator(device).manual_seed(seed)
        kind = here(case) if case.direction == "choice" else None  # which is about one overload
        names = None if kind is None else (kind.overload,)
        call, given = CALLS[case.call], drawn_for(case, source)
        return Replaced(
            case, call.function, given, names, None if call.written is None else given[call.written].clone()
        )

    @property
    def overwrites(self) -> bool:
        """Whether the call writes over an argument: the next one then has another."""
        return self.kept is not None

    @property
    def tensors(self) -> list[Tensor]:
        return [t for t in flat(self.given) if isinstance(t, Tensor)]

    @property
    def values(self) -> dict[str, Any]:
        return {str(at): value for at, value in enumerate(self.given)}

    @cached_property
    def plain(self) -> Callable[[], Any]:
        """The call alone: aten's, unless it is made inside of something."""
        if not self.case.options.get("new_shapes"):
            return partial(self.function, *self.given)
        function, others = self.function, itertools.cycle(shapes_of(self.given))
        return lambda: function(*next(others))

    @cached_property
    def call(self) -> Callable[[], Any]:
        """The call with replacements in force. A CPU has none but in the interpreter."""
        if not INTERPRETING and not any(t.is_cuda for t in self.tensors):
            return self.plain
        if self.case.options.get("auto"):
            return Within(self.plain, partial(choosing, self.case))
        return Within(self.plain, partial(replacing, self.names, self.case.options.get("declined", False)))

    def restore(self) -> None:
        if self.kept is not None:
            self.given[CALLS[self.case.call].written].copy_(self.kept)

    def apart(self, result: Any) -> list[Any]:
        """What a call gave, apart from the arguments, which are as they were."""
        made = flat(result)
        if self.overwrites:
            made = [one.clone() for one in made]
            self.restore()
        return made

    def traffic(self, result: Any) -> tuple[int, int]:
        """(bytes read, bytes written) that a call with this result cannot do without."""
        share = CALLS[self.case.call].read
        return round(share * sum(map(tensor_bytes, self.tensors))), tensor_bytes(tuple(flat(result)))

    def result_bytes(self, result: Any) -> int:
        memory = {t.untyped_storage().data_ptr() for t in self.tensors}
        made = [t for t in flat(result) if isinstance(t, Tensor)]
        return sum(tensor_bytes(t) for t in made if t.untyped_storage().data_ptr() not in memory)

    def verify(self, result: Any) -> float:
        """The largest relative error against aten in float64. Raises `Wrong`."""
        found, aten = self.apart(result), self.apart(self.function(*self.given))
        draws = self.case.call is not None and CALLS[self.case.call].draws
        truth = list(map(doubled, aten)) if draws else flat(self.function(*(doubled(t) for t in self.given)))
        if len(found) != len(aten):
            raise Wrong(f"{len(found)} results, not {len(aten)}")
        running = self.case.call.startswith("cum")
        about = any(word in self.case.call for word in ("norm", "mean", "attention"))
        scale = max(map(largest, self.tensors)) if about else 0.0
        return max(error_of(*each, running or draws, scale) for each in zip(found, aten, truth))


@contextlib.contextmanager
def replacing(names: Sequence[str] | None, declined: bool | str) -> Iterator[None]:
    """Replacements in force; at the end, whether the calls inside were whose they should be. Raises `Wrong`."""
    block = tw.aten.use("all", include=names)
    if declined == UNMEASURED:
        block.request = replace(block.request, verdicts=Verdicts(Place.here(), ()))
    with block:
        yield
        said = tw.aten.report()
    taken = [name for name, one in said.items() if one["taken"]]
    reasons = [f"{name} ({', '.join(one['declined'])})" for name, one in said.items() if one["declined"]]
    if declined and (taken or not reasons):
        raise Wrong(f"taken, where aten should be: {', '.join(taken)}")
    if not declined and (reasons or not taken):
        raise Wrong(f"aten's, not ours: {', '.join(reasons) or 'no replacement was called'}")


@contextlib.contextmanager
def choosing(case: Case) -> Iterator[None]:
    """What mode "auto" replaces for a program that makes a case's call alone: what that reaches, or nothing."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="aten: nothing is replaced")
        block = tw.aten.use("auto", observed=tw.aten.Calls(Place.here().gpu, Counter(kinds_here(case))))
    with block:
        yield


def shapes_of(given: Sequence[Tensor]) -> list[list[Tensor]]:
    """Matrices of thousands of shapes in the memory of those that are given, themselves first."""
    rows, columns = given[0].shape
    shapes = [(r, c) for r in range(rows, rows // 2, -1) for c in range(columns, 3 * columns // 4 - 1, -1)]
    return [[t.flatten()[: r * c].view(r, c) for t in given] for r, c in shapes]


def flat(made: Any) -> list[Any]:
    return [one for part in made for one in flat(part)] if isinstance(made, (tuple, list)) else [made]


def doubled(value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    return value.double() if value.is_floating_point() else value.to(torch.complex128) if value.is_complex() else value


def largest(t: Tensor) -> float:
    return float(t.abs().max()) if t.is_floating_point() else 0.0


def error_of(own: Any, aten: Any, truth: Any, running: bool = False, scale: float = 0.0) -> float:
    """Relative RMS error of a result; integers are exact, and so is what is no tensor. Raises `Wrong` where an element is off by
    more than twice aten's largest error and a step of the dtype, or all together by more than twice aten's and a step. Running sums
    cancel, and aten's on a CPU are of float64: of them three steps of the largest. Of means, sums about them and logarithms of sums
    of exponentials, steps are of the largest operand, `scale`."""
    if not isinstance(own, Tensor):
        if own is not aten:
            raise Wrong(f"{own}, aten's is {aten}")
        return 0.0
    for what in ("dtype", "shape", "stride"):
        pair = [getattr(t, what)() if what == "stride" else getattr(t, what) for t in (own, aten)]
        if pair[0] != pair[1]:
            raise Wrong(f"{what} {pair[0]}, aten's is {pair[1]}")
    if not (own.is_floating_point() or own.is_complex()):
        if not torch.equal(own, aten):
            raise Wrong(f"{int((own != aten).sum())} of {own.numel()} elements are not aten's")
        return 0.0
    eps, size = torch.finfo(own.dtype).eps, float(truth.abs().square().mean().sqrt()) or 1.0
    apart, theirs = (doubled(own) - truth).abs(), (doubled(aten) - truth).abs()
    step = 3 * eps * truth.abs().max() if running and truth.numel() else eps * truth.abs()
    fine = min(eps, torch.finfo(torch.float32).eps)  # of what is computed in
    step = step.clamp(min=3 * fine * scale)
    if not bool((apart <= 2 * theirs.max() + step).all()):
        raise Wrong(f"an element is off by {float(apart.max()):.3g}, aten's by {float(theirs.max()):.3g} at most")
    error, least = (float(t.square().mean().sqrt()) / size for t in (apart, theirs))
    if not error <= 2 * least + (3 if running else 1) * eps + fine * scale / size:
        raise Wrong(f"relative RMS error {error:.3g}, aten's is {least:.3g}")
    return error


# ---- every overload --------------------------------------------------------------------------------------------------


def overloads(case: Case, device: str = "cuda") -> Iterator[tuple[str, Replaced]]:
    """A plain call of each overload that is replaced, with `times` as many rows as the tests give it."""

    def taller(make: Make) -> Make:
        return lambda shape, *dtype: make(
            (shape[0] * case.dims.get("times", 1), *shape[1:]) if shape[:1] == (6,) else shape, *dtype
        )

    for name in sorted(table.FORMS.keys() - ALONE):
        make = partial(drawn, device=device)
        args, named = call_of(name, make if name in SMALL else taller(make))
        yield (
            name,
            Replaced(case, partial(with_names, overload_of(name), tuple(named)), [*args, *named.values()], (name,)),
        )


def with_names(overload: Callable[..., Any], names: tuple[str, ...], *given: Any) -> Any:
    """A call of which the last arguments have names."""
    count = len(given) - len(names)
    return overload(*given[:count], **dict(zip(names, given[count:])))


# ---- which code ------------------------------------------------------------------------------------------------------


class Routing(TorchDispatchMode):
    """Inside, what replacements take is theirs, on any tensors: the router itself needs a GPU. `seen`: what was called."""

    def __init__(self, forms: Mapping[str, Callable[..., Any]] = table.FORMS) -> None:
        super().__init__()
        self.forms, self.seen = forms, set()
        self.within: set[Any] = set()  # composites that are being taken apart

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = name_of(func)
        self.seen.add(name)
        if name in self.forms:
            with contextlib.suppress(Declined):
                return self.forms[name](*args, **(kwargs or {}))
        if func.has_kernel_for_dispatch_key(COMPOSITE) and func not in self.within:
            self.within.add(func)  # one that calls itself is torch's
            try:
                with (
                    self
                ):  # what it calls is seen too; where there is no memory torch may have a kernel that calls nothing
                    return func._op_dk(COMPOSITE, *args, **(kwargs or {}))
            finally:
                self.within.discard(func)
        return func(*args, **(kwargs or {}))


class Composites(TorchFunctionMode):
    """Inside, composites that are replaced as they are are replaced: a dispatch mode sees what torch makes of them."""

    def __init__(self, forms: Mapping[str, Callable[..., Any]]) -> None:
        super().__init__()
        self.forms = forms

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        with contextlib.suppress(Declined):
            if name in WHOLE:
                return self.forms[name](*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


_kinds: dict[tuple, list[Signature]] = {}  # by case, of which there are many buffer sets


def kinds_here(case: Case) -> list[Signature]:
    """The kinds of call that a case's call makes on this chip."""
    key = case.call, case.dtype, *case.dims.items()
    if key not in _kinds:
        there = torch.cuda.is_available()
        _kinds[key] = kinds_of(case, Target.of(torch.cuda.current_device()) if there else TARGETS["sm_90"])
    return _kinds[key]


def here(case: Case) -> Signature | None:
    """The kind of call that a case is on this chip; None if it makes several."""
    return alone(kinds_here(case))


def alone(kinds: Sequence[Signature]) -> Signature | None:
    return kinds[0] if len(kinds) == 1 else None


def blank_call(case: Case) -> Replaced:
    """A case over tensors without memory, to be routed."""
    words = [Word.read(word, case) for word in CALLS[case.call].tensors]
    return Replaced(case, CALLS[case.call].function, [blank(word) for word in words])


def blank(word: Word) -> Tensor:
    return torch.empty(word.shape, dtype=word.dtype, device="meta")


def reached(case: Case, target: Target) -> Signature | None:
    """The kind of call that a case is on a chip, by the one overload that it reaches; None if these are several."""
    return alone(kinds_of(case, target))


def kinds_of(case: Case, target: Target) -> list[Signature]:
    """The kinds of call that a case's call makes on a chip, by the overloads that it reaches."""
    seen: list[Signature] = []

    def noted(name: str, form: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.append(signature_of(name, args, kwargs))
            try:
                return form(*args, **kwargs)
            except Declined:
                seen.pop()
                raise

        return call

    route(blank_call(case), target, {name: noted(name, form) for name, form in table.FORMS.items()})
    return seen


def launches(case: Case, target: Target) -> list[Wanted]:
    """The launches of a case on a chip, found without that chip and without memory."""
    if case.options.get("declined"):
        return []
    if case.call is None:
        made = [one for name, one in overloads(case, "meta") if name not in NUMBERS]
    else:
        made = [blank_call(case)]
    return [wanted for one in made for wanted in route(one, target, table.FORMS)]


def route(work: Replaced, target: Target, forms: Mapping[str, Callable[..., Any]]) -> list[Wanted]:
    """Make a call on a chip that is not there; its launches."""
    unread = contextlib.suppress(RuntimeError) if work.case.call in NUMBERS else contextlib.nullcontext()
    with pretend(target), torch.no_grad(), collect() as found, unread, Composites(forms), Routing(forms):
        work.function(*work.given)
    return found
