"""Products and gathers with more than 2^31 elements in a factor or in the result: some elements against float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.gpu.test_large import FREE, sampled
from tilewright.check.oracle import rms

pytestmark = pytest.mark.gpu
TALL = (600_001, 4096, 128)  # rows, inner, columns: the first factor is past 2^31
WIDE = (70_016, 128, 33_024)  # the result is
FORMATS = {
    "fp8": (tw.fp8("1x128", ways="row"), tw.fp8("128x128", ways="row")),
    "fp8_row": (tw.fp8("row", ways="row"), tw.fp8("row", ways="row")),
    "int8": (tw.int8("row"), tw.int8("row")),
    "mxfp8": (tw.mx("e4m3"), tw.mx("e4m3")),
}
ROUNDING = 2e-3  # to bf16; of so few elements the large ones decide


@pytest.fixture(autouse=True)
def room() -> None:
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < FREE:
        pytest.skip(f"needs {FREE >> 30} GiB of the device's memory, free")


def normal(*shape: int, seed: int) -> Tensor:
    source = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=source, device="cuda", dtype=torch.bfloat16)


def compare(found: Tensor, exact: Tensor) -> None:
    error = rms(found.double() - exact)
    assert error <= ROUNDING * rms(exact), f"relative RMS error {error / rms(exact):.2e}"


def some(rows: int, columns: int) -> tuple[Tensor, Tensor]:
    """Rows at the start, at every 2^31 elements and at the end; columns all over."""
    return sampled(rows, columns, False), torch.arange(0, columns, max(1, columns // 500), device="cuda")


@pytest.mark.parametrize("shape", [TALL, WIDE], ids=["factor", "result"])
@pytest.mark.parametrize("name", FORMATS)
def test_scaled_mm(name, shape):
    M, K, N = shape
    a, b = (tw.quantize(normal(n, K, seed=n), fmt) for n, fmt in zip((M, N), FORMATS[name]))
    made = tw.scaled_mm(a, b.t(), out_dtype=torch.bfloat16)
    rows, columns = some(M, max(K, N))
    columns = columns[columns < N]
    whole, other = (q.dequantize(torch.float32) for q in (a, b))
    compare(made[rows][:, columns], whole[rows].double() @ other[columns].double().t())


def test_sparse_mm():
    """Rows about every 2^31 elements are wanted, and no others."""
    inner, columns, _ = TALL
    wanted, rows = sampled(inner, columns, False), normal(inner, columns, seed=1)
    weights = torch.zeros(2, inner, device="cuda", dtype=torch.bfloat16)
    weights[:, wanted] = normal(2, len(wanted), seed=2)
    compare(tw.sparse_mm(weights, rows), weights[:, wanted].double() @ rows[wanted].double())


@pytest.mark.parametrize("shape", [TALL, WIDE], ids=["factor", "result"])
def test_matmul(shape):
    M, K, N = shape
    a, b = normal(M, K, seed=1), normal(N, K, seed=2)
    rows, columns = some(M, max(K, N))
    columns = columns[columns < N]
    compare(tw.matmul(a, b.t())[rows][:, columns], a[rows].double() @ b[columns].double().t())


@pytest.mark.parametrize("shape", [TALL, WIDE], ids=["factor", "result"])
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_groups_of_rows(fp8, shape):
    M, K, N = shape
    M = M // 128 * 128
    ends = [0, 128, M // 256 * 128, M // 256 * 128, M]
    offsets = torch.tensor(ends[1:], device="cuda", dtype=torch.int32)
    a, b = normal(M, K, seed=1), normal(4, N, K, seed=2)
    rows, columns = some(M, max(K, N))
    columns = columns[columns < N]
    if fp8:
        qa, qb = tw.quantize(a, FORMATS["fp8"][0]), tw.quantize(b, FORMATS["fp8"][1])
        made = tw.grouped_mm(qa, qb, offsets, transposed_b=True, out_dtype=torch.bfloat16)
        a, b = qa.dequantize(torch.float32), qb.dequantize(torch.float32)
    else:
        made = tw.grouped_mm(a, b, offsets, transposed_b=True)
    group = torch.searchsorted(offsets, rows.int(), right=True)
    exact = torch.einsum("rk,rnk->rn", a[rows].double(), b[group][:, columns].double())
    compare(made[rows][:, columns], exact)


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
def test_groups_of_tokens(fp8):
    """Three matrices of 2^30 elements from groups of few tokens, one of them empty."""
    T, M, N = 512, 32_768, 32_896
    offsets = torch.tensor([128, 128, 512], device="cuda", dtype=torch.int32)
    a, b = normal(T, M, seed=1), normal(T, N, seed=2)
    rows, columns = (torch.arange(0, n, n // 300, device="cuda") for n in (M, N))
    if fp8:
        columnwise = tw.fp8("1x128", ways="col")
        qa, qb = (tw.quantize(t, columnwise, offsets=offsets) for t in (a, b))
        made = tw.grouped_mm(qa, qb, offsets, transposed_a=True, out_dtype=torch.bfloat16)
        a, b = qa.dequantize(torch.float32), qb.dequantize(torch.float32)
    else:
        made = tw.grouped_mm(a, b, offsets, transposed_a=True)
    for group, (start, end) in enumerate(((0, 128), (128, 128), (128, 512))):
        exact = a[start:end, rows].double().t() @ b[start:end, columns].double()
        found = made[group][rows][:, columns]
        compare(found, exact) if end > start else torch.testing.assert_close(found, torch.zeros_like(found))


def test_embedding():
    """Rows of a table past 2^31, and their gradient."""
    weight = normal(600_001, 4096, seed=1).requires_grad_()
    ids = torch.tensor([600_000, 0, 524_288, 524_287, 600_000], device="cuda")
    made = tw.embedding(ids, weight)
    assert torch.equal(made, weight[ids])
    dy = normal(5, 4096, seed=2)
    made.backward(dy)
    exact = dy.double()
    assert torch.equal(weight.grad[600_000], (exact[0] + exact[4]).to(torch.bfloat16))
    assert torch.equal(weight.grad[524_288], dy[2]) and torch.equal(weight.grad[524_287], dy[3])
    assert int(weight.grad.count_nonzero(1).gt(0).sum()) == 4


def test_column_amax():
    x = normal(600_001, 4096, seed=1)
    assert torch.equal(tw.column_amax(x)[0], x.abs().amax(0).float())
