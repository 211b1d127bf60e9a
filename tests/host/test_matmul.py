"""What is peculiar to matmul on the host: which dtypes meet, what comes of them, what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch

import tilewright as tw
from tilewright.core.target import TARGETS, pretend
from tilewright.core.tensor import power_of_two
from tilewright.gemm.matmul import lies_by_columns, matmul, tile_for

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def pair(dtype: torch.dtype, other: torch.dtype | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    source = torch.Generator().manual_seed(1)
    made = torch.randn(3, 40, generator=source), torch.randn(40, 5, generator=source)
    if dtype == torch.int8:
        return tuple((50 * t).to(dtype) for t in made)
    return made[0].to(dtype), made[1].to(other or dtype)


@pytest.mark.parametrize(
    ("dtypes", "made"),
    [
        ((torch.bfloat16,), torch.bfloat16),
        ((torch.float16,), torch.float16),
        ((torch.float32,), torch.float32),
        ((torch.float64,), torch.float64),
        ((E4M3, E5M2), torch.bfloat16),
        ((torch.int8,), torch.int32),
    ],
    ids=str,
)
def test_dtypes_of_results(dtypes, made):
    a, b = pair(*dtypes)
    y = matmul(a, b)
    assert y.dtype == made and y.shape == (3, 5)
    exact = a.double() @ b.double()
    error = (y.double() - exact).norm() / exact.norm()
    assert error <= (0 if made == torch.int32 else 2 * torch.finfo(made).eps)
    if made not in (torch.int32, torch.float64):
        assert matmul(a, b, out_dtype="float32").dtype == torch.float32


def test_sums_of_int8_are_exact_and_wrap():
    a, b = torch.full((1, 1 << 18), -128, dtype=torch.int8), torch.full((1 << 18, 1), -128, dtype=torch.int8)
    assert matmul(a[:, :100], b[:100]).item() == 100 * 128 * 128
    assert matmul(a, b).item() == 0  # 2**32


@pytest.mark.parametrize(
    ("dtypes", "options", "names"),
    [
        ((torch.bfloat16, torch.float16), {}, "a and b"),
        ((torch.bfloat16, E4M3), {}, "a and b"),
        ((torch.bfloat16,), {"acc_dtype": "float16"}, "acc_dtype"),
        ((torch.float32,), {"acc_dtype": "int32"}, "acc_dtype"),
        ((torch.int8,), {"acc_dtype": "float32"}, "acc_dtype"),
        ((torch.int8,), {"out_dtype": "bfloat16"}, "out_dtype"),
        ((torch.bfloat16,), {"out_dtype": "int32"}, "out_dtype"),
        ((torch.bfloat16,), {"out": torch.zeros(3, 5)}, "out"),
        ((torch.int8,), {"out": torch.zeros(3, 5)}, "out"),
        ((torch.int8,), {"bias": torch.zeros(5)}, "bias must be None for int8"),
        ((torch.bfloat16,), {"bias": torch.zeros(4)}, "bias"),
        ((torch.bfloat16,), {"c": torch.zeros(3, 4), "beta": 1.0}, "c"),
        ((torch.bfloat16,), {"act": "softplus"}, "act"),
    ],
    ids=str,
)
def test_refusals(dtypes, options, names):
    with pytest.raises((TypeError, ValueError), match=names):
        matmul(*pair(*dtypes), **options)


def test_fp8_has_no_gradient():
    a, b = pair(E4M3)
    with pytest.raises(TypeError, match="a.detach"):
        matmul(a.requires_grad_(), b)
    with torch.no_grad():
        matmul(a, b)


def test_how_matrices_lie():
    """Bulk copies want one dimension contiguous and steps of 16 bytes along the other."""
    t = torch.empty(24, 40, dtype=torch.bfloat16)
    assert lies_by_columns(t) is False and lies_by_columns(t.t()) is True
    assert lies_by_columns(t[:, 1:]) is None and lies_by_columns(t[:, ::2]) is None  # not aligned, not contiguous
    assert lies_by_columns(torch.empty(24, 41, dtype=torch.bfloat16)) is None
    assert lies_by_columns(torch.empty(1, 41, dtype=torch.bfloat16)) is None  # as of more rows: one binary serves all
    assert (
        lies_by_columns(t[:1].expand(24, 40)) is None and lies_by_columns(t[:1, :1].expand(24, 40)) is None
    )  # rows lie apart


@pytest.mark.parametrize("leading", [(3,), (2, 3)])
def test_making_ready_stores_nothing_where_a_library_multiplies(leading, monkeypatch):
    """A GPU may take cuBLAS, whose host code, here on a CPU, is torch's product; also where it goes through other memory."""
    source = torch.Generator().manual_seed(1)
    a, b = (torch.randn(*shape, generator=source).to(torch.bfloat16) for shape in ((*leading, 40), (40, 5)))
    y = torch.full((*reversed(leading), 5), torch.nan, dtype=torch.bfloat16)
    y = y if len(leading) == 1 else y.transpose(0, 1)  # whose leading dimensions are not one
    (library,) = (one for one in matmul.implementations if one.library)
    monkeypatch.setattr(type(matmul), "implementation", lambda self, values, device=None: library)
    tw.warmup(matmul, a, b, out=y)
    assert y.isnan().all()
    matmul.run(matmul.signature.bind((a, b), {"out": y}))
    assert torch.equal(y, a @ b)


def tile_of(
    M: int, K: int, N: int, dtype: torch.dtype = torch.bfloat16, how: str = "pieces", FORMAT: str | None = None
):
    a, b = torch.empty(M, K, dtype=dtype, device="meta"), torch.empty(N, K, dtype=dtype, device="meta").t()
    with pretend(TARGETS["sm_90"]):
        return tile_for(a, b, how, True, True, False, FORMAT)


@pytest.mark.parametrize(
    ("sizes", "sides"),
    [
        ((4096, 4096, 4096), (128, 256)),  # a tile for every SM
        ((256, 1152, 4608), (128, 128)),  # 72 tiles in the place of 36; with 144 some SMs would have two
        ((64, 1152, 4608), (64, 64)),
        ((128, 4096, 4096), (64, 64)),  # 128 tiles
        ((512, 4096, 4096), (128, 128)),
    ],
)
def test_tiles_are_smaller_where_sms_would_have_none(sizes, sides):
    assert tile_of(*sizes)[:2] == sides


def test_no_tile_is_wider_than_the_product_or_larger_than_shared_memory():
    kinds = (torch.bfloat16, "pieces"), (torch.float16, "half"), (torch.int8, "integer"), (E4M3, "codes")
    for M, N, (dtype, how) in itertools.product((1, 65, 300), (8, 48, 96, 1000), kinds):
        tile = tile_of(M, 512, N, dtype, how)
        assert max(16, power_of_two(N)) >= tile.N
        assert tile.stages * tile.K * (tile.M + tile.N) * dtype.itemsize <= TARGETS["sm_90"].shared_memory


def test_tiles_of_stored_codes_are_whole_blocks():
    assert tile_of(64, 512, 256, FORMAT="e4m3:1x128")[:2] == (128, 128)
