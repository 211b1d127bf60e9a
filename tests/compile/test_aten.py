"""The kernels behind torch's operators: one call of every overload, and one of each form of every engine's kernels, compiled."""

from __future__ import annotations

import re

import pytest
import torch
import triton.language as tl
from torch import Tensor

from tests.compile import table as tables
from tilewright.aten import table
from tilewright.check.provided.aten import call_of
from tilewright.check.variants import Variant, variant
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

FP32, BF16, I64, BOOL = torch.float32, torch.bfloat16, torch.int64, torch.bool


def made(shape: tuple[int, ...], dtype: torch.dtype = FP32) -> Tensor:
    return torch.empty(shape, dtype=dtype)


def turned(shape: tuple[int, ...], dtype: torch.dtype = FP32) -> Tensor:
    return made(shape[::-1], dtype).permute(*range(len(shape))[::-1])


# Calls that take other kernels or other forms of them than plain ones do: what they are, an overload, its arguments
FORMS = {
    "a row for all": ("add.Tensor", made((64, 96), BF16), made((96,), BF16)),
    "turned tiles": ("add.Tensor", made((64, 96), BF16), turned((64, 96), BF16)),
    "turned bytes": ("clone", turned((512, 512), torch.uint8), {"memory_format": torch.contiguous_format}),
    "a number": ("mul.Tensor", made((64, 96), BF16), 2.5),
    "float64": ("exp", made((64,), torch.float64)),
    "integers": ("add.Tensor", made((64,), torch.uint8), made((64,), I64)),
    "powers of integers": ("pow.Tensor_Tensor", made((64,), torch.int32), made((64,), torch.int32)),
    "remainders of integers": ("remainder.Tensor", made((64,), torch.int32), made((64,), torch.int32)),
    "quotients of integers": ("floor_divide", made((64,), torch.int32), made((64,), torch.int32)),
    "bools": ("bitwise_not", made((64,), BOOL)),
    "floats cut to 64 bits": ("_to_copy", made((64,), BF16), {"dtype": I64}),
    "floats cut to 32 bits": ("_to_copy", made((64,)), {"dtype": torch.int32}),
    "floats cut to 16 bits": ("_to_copy", made((64,), torch.float64), {"dtype": torch.int16}),
    "floats cut to bytes": ("_to_copy", made((64,)), {"dtype": torch.uint8}),
    "floored quotients of 16 bits": ("floor_divide", made((64,), BF16), made((64,), BF16)),
    "integers that are close": ("isclose", made((64,), I64), made((64,), I64)),
    "integers that are all equal": ("allclose", made((64,), I64), made((64,), I64), 0.0, 0.0),
    "outer products of integers": ("addr", made((8, 9), I64), made((8,), I64), made((9,), I64)),
    "a threshold of integers": ("threshold", made((64,), torch.uint8), 3, 4),
    "losses that are not added up": ("mse_loss", made((64,), BF16), made((64,), BF16), 0),
    "steps of integers": ("linspace.out", 0, 9, 64, {"out": made((64,), torch.int32)}),
    "powers at steps of integers": ("logspace.out", 0, 9, 64, 2.0, {"out": made((64,), torch.int32)}),
    "more dimensions turned over than loops": ("flip", made((2, 3, 2, 3, 2, 3)), [0, 2, 4]),
    "a choice of bools": ("where.self", made((64,), BOOL), made((64,), BOOL), made((64,), BOOL)),
    "loops outside": ("neg", made((2, 3, 2, 3, 2, 3)).permute(3, 0, 5, 2, 4, 1)[..., ::2]),
    "columns": ("sum.dim_IntList", made((256, 512), BF16), [0]),
    "the middle": ("amax", made((8, 64, 40), BF16), [1]),
    "columns of moments": ("var_mean.correction", made((8192, 8192), BF16), [0]),
    "large rows": ("sum.dim_IntList", made((8192, 8192), BF16), [1]),
    "large columns": ("sum.dim_IntList", made((8192, 8192), BF16), [0]),
    "large rows of fp32": ("sum.dim_IntList", made((8192, 8192)), [1]),
    "channels of a sum": ("sum.dim_IntList", made((32, 512, 64, 64), BF16), [0, 2, 3]),
    "odd rows of a sum": ("sum.dim_IntList", made((8192, 8191), BF16), [1]),
    "odd columns of moments": ("var_mean.correction", made((8192, 8191), BF16), [0]),
    "large columns with an index": ("max.dim", made((8192, 8192), BF16), 0),
    "a large loss": ("mse_loss", made((8192, 8192), BF16), made((8192, 8192), BF16)),
    "parts of a sum": ("sum", made((1 << 22,), BF16)),
    "parts with an index": ("max.dim", made((2, 1 << 20), BF16), 1),
    "parts of moments": ("var_mean.correction", made((2, 1 << 20), BF16), [1]),
    "a sum of bools": ("sum", made((256,), BOOL)),
    "the largest of integers": ("max.dim", made((8, 64), I64), 1),
    "columns of a scan": ("cumsum", made((64, 512), BF16), 0),
    "odd columns of a scan": ("cumsum", made((1 << 20, 13)), 0),
    "parts of a scan": ("cumsum", made((1 << 20,), BF16), 0),
    "parts of a scan with an index": ("cummax", made((1 << 20,), BF16), 0),
    "a scan of integers": ("cummin", made((8, 64), torch.int32), 1),
    "rows side by side": ("cat", [made((4096, 33), BF16), made((4096, 33), BF16)], 1),
    "odd rows of bools side by side": ("cat", [made((4097, 33), BOOL), made((4097, 33), BOOL)], 1),
    "odd rows of 64 bits side by side": ("cat", [made((4097, 33), I64), made((4097, 33), I64)], 1),
    "unlike rows side by side": ("cat", [made((4096, 65), BF16), made((4096, 3), BF16)], 1),
    "odd rows of three side by side": ("cat", [made((4097, 33), BOOL)] * 3, 1),
    "elements in turn": ("cat", [made((65536, 1), BF16), made((65536, 1), BF16)], 1),
    "elements twice": ("repeat", made((65536, 1), BF16), [1, 2]),
    "elements several times": ("repeat", made((65536, 1), BF16), [1, 3]),
    "rows again": ("repeat", made((1024, 1024), BF16), [2, 2]),
    "a patch of odd rows": ("constant_pad_nd", made((1024, 1024), BF16), [1, 1]),
    "a patch of odd rows of bools": ("constant_pad_nd", made((1024, 1024), BOOL), [1, 1]),
    "a patch of bools": ("constant_pad_nd", made((8, 8), BOOL), [1, 1]),
    "a band of bools": ("triu", made((8, 8), BOOL)),
    # index
    "rows in whole words": ("embedding", made((512, 1024), BF16), made((128,), I64)),
    "two indices": ("index.Tensor", made((64, 64, 8)), [made((9,), I64), made((9,), I64)]),
    "three indices that add": ("_index_put_impl_", made((8, 9, 7)), [made((9,), I64)] * 3, made((9,)), True),
    "rows that are ordered by digits": ("index_add", made((512, 1024), BF16), 0, made((65536,), I64), made((65536, 1024), BF16)),
    "sums of integers": ("index_add", made((8, 64), I64), 0, made((99,), I64), made((99, 64), I64)),
    "products by index": ("scatter.reduce", made((8, 64)), 0, made((99, 64), I64), made((99, 64)), {"reduce": "multiply"}),
    "a mask that broadcasts": ("masked_select", made((64, 96), BF16), made((96,), BOOL)),
    "among 64-bit numbers": ("isin.Tensor_Tensor", made((640,), I64), made((640,), I64)),
    "among many numbers": ("isin.Tensor_Tensor", made((65536,), I64), made((640,), I64)),
    # sort
    "a sort in registers": ("sort", made((64, 512))),
    "a sort of 16 bits in registers": ("sort", made((64, 256), BF16)),
    "a sort by digits": ("sort", made((64, 8192))),
    "a sort of 64 bits": ("sort", made((2, 70), I64)),
    "the first of long lines": ("topk", made((8, 151936)), 50),
    "the first of 16 bits": ("topk", made((8, 8192), BF16), 8),
    "many that come first": ("topk", made((8, 8192), BF16), 100),
    "the first of odd lines": ("topk", made((8, 1001), torch.uint8), 8),
    "the first of 64 bits": ("topk", made((8, 1000), I64), 8),
    # random
    "draws into a view": ("normal_", made((64, 96))[:, ::2]),
    "draws of 64 bits": ("normal_", made((64,), torch.float64)),
    "dropout of 16 bits": ("native_dropout", made((64, 64), BF16), 0.5, True),
    "dropout one by one": ("native_dropout", made((63, 63)), 0.5, True),
    "losses of several programs": ("nll_loss_forward", made((2048, 96), BF16), made((2048,), I64), None, 1, -100),
    "losses one by one": ("nll_loss_forward", made((64, 96), BF16), made((64,), I64), None, 0, -100),
}  # fmt: skip


def norm_rows(m: int, n: int, dtype: torch.dtype = BF16) -> tuple:
    """Of a backward pass over rows: the gradient, the operand, how long a row is, moments, and weights."""
    return (
        made((m, n), dtype),
        made((m, n), dtype),
        [n],
        made((m, 1)),
        made((m, 1)),
        made((n,), dtype),
        made((n,), dtype),
    )


IMAGES, MASK = (32, 512, 64, 64), [True, True, True]
C = 512
FORMS |= {
    "rows of a softmax": ("_softmax", made((8192, 8192), BF16), 1, False),
    "long rows of a softmax": ("_softmax", made((4096, 151936)), 1, False),
    "columns of a softmax": ("_log_softmax", made((8192, 8192), BF16), 0, False),
    "the middle of a softmax": ("_softmax", made((16, 512, 8192), BF16), 1, False),
    "odd rows of a softmax": ("_softmax", made((8192, 1001), BF16), 1, False),
    "rows of a softmax back": ("_softmax_backward_data", made((8192, 8192), BF16), made((8192, 8192), BF16), 1, BF16),
    "long rows of a softmax back": ("_softmax_backward_data", made((4096, 151936)), made((4096, 151936)), 1, FP32),
    "columns of a softmax back": ("_log_softmax_backward_data", made((8192, 8192), BF16), made((8192, 8192), BF16), 0, BF16),
    "the middle of a softmax back": (
        "_softmax_backward_data", made((16, 512, 8192), BF16), made((16, 512, 8192), BF16), 1, BF16,
    ),
    "rows of a norm": ("native_layer_norm", made((8192, 8192), BF16), [8192], made((8192,), BF16), made((8192,), BF16), 1e-5),
    "long rows of a norm": ("native_layer_norm", made((512, 65536), BF16), [65536], None, None, 1e-5),
    "a row of a norm by parts": ("native_layer_norm", made((2, 1 << 20), BF16), [1 << 20], None, None, 1e-5),
    "rows of a norm back": ("native_layer_norm_backward", *norm_rows(16384, 4096), MASK),
    "wide rows of a norm back": ("native_layer_norm_backward", *norm_rows(16384, 8192), MASK),
    "long rows of a norm back": ("native_layer_norm_backward", *norm_rows(512, 65536), MASK),
    "groups": ("native_group_norm", made(IMAGES, BF16), made((C,), BF16), made((C,), BF16), 32, C, 4096, 32, 1e-5),
    "groups by parts": ("native_group_norm", made((32, C, 56, 56), BF16), None, made((C,), BF16), 32, C, 3136, 32, 1e-5),
    "groups back": (
        "native_group_norm_backward", made(IMAGES, BF16), made(IMAGES, BF16), made((32, 32), BF16), made((32, 32), BF16),
        made((C,), BF16), 32, C, 4096, 32, MASK,
    ),
    "channels": (
        "native_batch_norm", made(IMAGES, BF16), made((C,)), made((C,)), made((C,)), made((C,)), True, 0.1, 1e-5,
    ),
    "few channels": (
        "native_batch_norm", made((64, 16, 64, 64), BF16), made((16,)), made((16,)), made((16,)), made((16,)), True, 0.1, 1e-5,
    ),
    "channels back": (
        "native_batch_norm_backward", made(IMAGES, BF16), made(IMAGES, BF16), made((C,)), None, None, made((C,)), made((C,)), True,
        1e-5, MASK,
    ),
    "channels last": ("native_batch_norm", made((65536, C), BF16), None, None, None, None, True, 0.1, 1e-5),
    "channels last back": (
        "native_batch_norm_backward", made((65536, C), BF16), made((65536, C), BF16), made((C,)), None, None, made((C,)),
        made((C,)), True, 1e-5, MASK,
    ),
    "vectors": ("_weight_norm_interface", made((4096, 4096), BF16), made((4096, 1), BF16), 0),
    "vectors across": ("_weight_norm_interface", made((4096, 4096), BF16), made((1, 4096), BF16), 1),
}  # fmt: skip

FORMS |= {
    "large products": ("addmm", made((4096,), BF16), made((4096, 4096), BF16), made((4096, 4096), BF16)),
    "turned products": ("addmm", made((4096,), BF16), turned((4096, 4096), BF16), turned((4096, 4096), BF16)),
    "a product of the gemm folder": ("mm", made((4096, 4096), BF16), made((4096, 4096), BF16)),
    "a batch in bulk": ("bmm", made((64, 1024, 1024), BF16), made((64, 1024, 1024), BF16)),
    "a turned batch in bulk": ("bmm", made((64, 1024, 1024), BF16).mT, made((64, 1024, 1024), BF16).mT),
    "odd products": ("mm", made((4097, 999), BF16), made((999, 1001), BF16)),
    "products of fp32": ("mm", made((1024, 1024)), made((1024, 1024))),
    "rows times a vector": ("mv", made((4096, 4096), BF16), made((4096,), BF16)),
    "columns times a vector": ("mv", turned((4096, 4096), BF16), made((4096,), BF16)),
}  # fmt: skip


def last(shape: tuple[int, ...]) -> Tensor:
    return made(shape, BF16).to(memory_format=torch.channels_last)


SMALLER = (32, 512, 32, 32)
FORMS |= {
    "windows that meet": ("max_pool2d_with_indices", made(IMAGES, BF16), [3, 3], [2, 2], [1, 1]),
    "windows that meet back": (
        "avg_pool2d_backward", made(SMALLER, BF16), made(IMAGES, BF16), [3, 3], [2, 2], [1, 1], False, True, None,
    ),
    "the largest back": (
        "max_pool2d_with_indices_backward", made(SMALLER, BF16), made(IMAGES, BF16), [2, 2], [2, 2], [0, 0], [1, 1], False,
        made(SMALLER, torch.int64),
    ),
}  # fmt: skip
FORMS |= {
    what: (name, *(layout(t) if isinstance(t, tuple) else t for t in given))
    for kind, layout in (("", lambda shape: made(shape, BF16)), (" of channels last", last))
    for what, name, *given in (
        (f"averages{kind}", "avg_pool2d", IMAGES, [2, 2]),
        (f"averages back{kind}", "avg_pool2d_backward", SMALLER, IMAGES, [2, 2], [2, 2], [0, 0], False, True, None),
        (f"the largest{kind}", "max_pool2d_with_indices", IMAGES, [2, 2]),
        (f"nearest{kind}", "upsample_nearest2d", SMALLER, [64, 64]),
        (f"bicubic{kind}", "_upsample_bicubic2d_aa", SMALLER, [20, 20], False),
    )
}  # fmt: skip


def needed(name: str, args: list, kwargs: dict, chip: str = "sm_90") -> list[Variant]:
    """What a call of an overload compiles."""
    with pretend(TARGETS[chip]), collect() as wanted:
        table.FORMS[name](*args, **kwargs)
    return [variant(one, chip) for one in wanted]


def everything() -> dict[str, Variant]:
    """Every variant once, by the name of the first call that needs it."""
    calls = [(name, name, *call_of(name, made)) for name in sorted(table.FORMS)]
    for what, (name, *args) in FORMS.items():
        named = args.pop() if isinstance(args[-1], dict) else {}
        calls.append((what.replace(" ", "-"), name, args, named))
    found: dict[str, tuple[str, Variant]] = {}
    for what, name, args, kwargs in calls:
        for at, one in enumerate(needed(name, args, kwargs)):
            found.setdefault(one.name, (f"{what}-{at}" if at else what, one))
    return dict(found.values())


VARIANTS = everything()


def test_every_kernel_is_there():
    assert {one.kernel.name for one in VARIANTS.values()} == {
        "pointwise_flat", "pointwise_tiles", "turn_bytes", "reduce_tiles", "reduce_parts", "scan_tiles", "patch", "patch_odd",
        "band", "ramp", "ramp_between",
        "rows_beside", "rows_gathered", "in_turn", "several_times", "tiles_again",
        "softmax_rows", "softmax_rows_backward", "softmax_columns", "softmax_columns_backward",
        "softmax_long", "softmax_long_backward",
        "normalise", "normalise_backward", "normalise_rows", "rows_backward", "normalise_cells", "normalise_held",
        "normalise_cells_backward", "column_sums", "add_parts",
        "product_tiles", "vector_product", "matmul_tiles", "batch_tiles",
        "average_pool", "average_pool_backward", "largest_pool", "largest_pool_backward", "nearest", "bicubic",
        # index
        "move_by_index", "place_keys", "sum_runs", "sum_slices", "sum_parts", "drop_key", "order_by_count", "radix_count",
        "radix_scan", "radix_move", "count_set", "begin_blocks", "write_set", "write_coordinates", "begin_buckets", "is_among",
        "keys_in_order", "repeated", "nll_places", "nll_total", "nll_gradient",
        # sort
        "sort_rows", "sort_keys", "sort_results", "select_first", "keep_few", "sort_few", "count_first", "write_first", "lengths",
        # random
        "draw", "drop",
        # attention
        "attention_forward",
    }  # fmt: skip


ENGINES = {
    "add.Tensor": (made((64, 96), BF16), made((64, 96), BF16)),
    "sum.dim_IntList": (made((256, 512), BF16), [1]),
    "cumsum": (made((64, 512), BF16), 1),
    "constant_pad_nd": (made((64, 64), BF16), [1, 1]),
    "_softmax": (made((512, 1024), BF16), 1, False),
    "index_select": (made((512, 1024), BF16), 0, made((128,), I64)),
    "topk": (made((8, 1024), BF16), 8),
    "uniform_": (made((64,)),),
    "avg_pool2d": (made((2, 8, 16, 16), BF16), [2, 2]),
    "addmm": (made((64,), BF16), made((64, 64), BF16), made((64, 64), BF16)),
}


@pytest.mark.parametrize("chip", sorted(TARGETS.keys() - {"sm_90"}))
@pytest.mark.parametrize("name", ENGINES)
def test_an_overload_of_every_engine_compiles_for_other_chips(name, chip):
    for one in needed(name, [*ENGINES[name]], {}, chip):
        assert one.compile().shared_is_there, one.name


DIVISIONS = re.compile(r"(?:div|rem)\.[su]64")
# Overloads that divide numbers of 64 bits, and not those of elements
DIVIDE = (
    "floor_divide",
    "remainder",
    "div",
    "pow",
    "remainders-of-integers",
    "quotients-of-integers",
    "powers-of-integers",
)


@pytest.mark.parametrize("what", VARIANTS)
def test_it_compiles(what):
    """Without a spill, a reduction that Triton lowers wrongly, more shared memory than there is, or a division of 64 bits, which no
    count of elements here asks for."""
    made = VARIANTS[what].compile()
    assert made.spills == 0 and made.shared_is_there
    assert not tables.wrong_code(what, made)
    assert what.startswith(DIVIDE) or not DIVISIONS.search(made.text)


@pytest.mark.parametrize(
    ("what", "kernel", "programs"),
    [
        ("columns of moments", "reduce_tiles", 8),
        ("columns of a softmax", "softmax_columns", 5),
        ("columns of a softmax back", "softmax_columns_backward", 4),
        ("groups back", "normalise_cells_backward", 5),
        ("groups by parts", "normalise_cells", 5),
    ],
)
def test_an_sm_holds_as_many_as_are_counted_on(what, kernel, programs):
    """Of which the time is what is on its way at once: registers come in eights, and an SM has 65536."""
    name, *args = FORMS[what]
    one = next(one for one in needed(name, args, {}) if one.kernel.name == kernel).compile()
    assert programs * one.threads * (-(-one.registers // 8) * 8) <= 65536


@pytest.mark.parametrize(("name", "dtype"), [("nonzero", BOOL), ("sum", torch.int8)])
def test_more_elements_than_32_bits_count_are_divided_in_64(name, dtype):
    """Of a view with gaps, whose elements have several loops."""
    x = torch.empty((1 << 15, 2, 1 << 16), dtype=dtype, device="meta")[:, 1, ::3].unsqueeze(0).expand(6, -1, -1)
    assert x.numel() > 2**31 and DIVISIONS.search(needed(name, [x], {})[0].compile().text)


@pytest.mark.parametrize("what", ["large rows", "large columns", "large rows of fp32", "channels of a sum", "averages"])
def test_large_sums_move_whole_words(what):
    """And divide no element's number by the size of a loop, which is a call of a routine that takes a hundred instructions."""
    name, *args = FORMS[what]
    made = needed(name, args, {})[0].compile()
    assert made.count("LDG.E.128") >= 2 and not made.count("LDG.E.U16") and not made.count("CALL")


@pytest.mark.parametrize(("chip", "pairs"), [("sm_90", True), ("sm_80", False)])
def test_the_largest_of_16_bits_is_found_two_at_a_time(chip, pairs):
    """By chips that compare two at once."""
    with pretend(TARGETS[chip]), collect() as wanted:
        table.FORMS["max.dim"](made((64, 8192), BF16), 1)
    how = variant(wanted[0]).constants["HOW"]
    assert how.COMPUTE is (tl.bfloat16 if pairs else tl.float32)


@pytest.mark.parametrize(
    "what", ["rows side by side", "unlike rows side by side", "elements in turn", "elements twice", "rows again"]
)
def test_short_rows_are_read_in_whole_words(what):
    """And written so, unless they are unlike; and the row of an element is found without a division."""
    name, *args = FORMS[what]
    made = needed(name, args, {})[0].compile()
    assert made.count("LDG.E.128") and not made.count("LDG.E.U16") and not made.count("CALL")
    assert bool(made.count("STG.E.U16")) == ("unlike" in what)


@pytest.mark.parametrize("to", [torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8], ids=str)
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16, torch.float64], ids=str)
def test_a_cast_of_floats_is_the_instruction_that_atens_is(dtype, to):
    """What it gives out of range, and of NaNs, is then aten's too. nvcc cuts floats to narrow integers by way of an int32, whose
    last bits they are; torch has bytes cut by way of an int64."""
    text = needed("_to_copy", [made((64,), dtype)], {"dtype": to})[0].compile().text
    bits = 64 if to in (torch.int64, torch.uint8) else 32
    assert set(re.findall(r"cvt\.rzi\.(\w+)\.\w+", text)) == {f"s{bits}"}


def test_steps_of_integers_are_counted_as_aten_does():
    """In fp32, and a step and what it is added to rounded once."""
    text = needed("linspace.out", [0, 9, 64], {"out": made((64,), torch.int32)})[0].compile().text
    assert "fma.rn.f32" in text and not re.search(r"(?:mul|add)(?:\.rn)?\.f32", text)


def test_every_value_of_a_number_is_one_variant():
    with pretend(TARGETS["sm_90"]), collect() as wanted:
        for value in (0.0, 1.0, 2.0, -3.5, 1e300, 16.0):
            table.FORMS["mul.Tensor"](made((64,)), value)
    assert len(wanted) == 6 and len({one.kernel.key(one.ordered, one.options, 0) for one in wanted}) == 1
