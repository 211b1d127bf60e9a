"""The realistic speed of light of this machine: what streaming and matrix products reach, not the data sheet.

Bandwidth is that of the streaming kernel of `floor.py`. A matrix rate is 2 M N K over the time of a product, torch's or
one of ours, the best over a sweep of large shapes: as a burst, and sustained, after a second of back-to-back products
has brought the chip to the clock that its power allows. On an H200 the two differ by 15 %, so a rate without its clock
says little.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from ..core.tensor import cdiv
from ..op import force
from . import timing
from .floor import floor_us

STREAMED = 1 << 30  # bytes: far above every L2
SHAPES = (
    (4096, 4096, 4096),
    (8192, 4096, 4096),
    (8192, 8192, 4096),
    (8192, 8192, 8192),
    (16384, 8192, 4096),
    (16384, 8192, 8192),
)
FLOPS_PER_US = 5e8  # only to size graphs, never part of a result
SUSTAINED_US = 1e6
MEASURED_US = 3e5  # after that second
Shape = tuple[int, int, int]
Product = Callable[[int, int, int], Callable[[], Tensor]]


@dataclass(frozen=True)
class Light:
    """One row: a rate in its unit, for matrices also the sustained one, the shape and the maker of the product that reached it, and
    the SM clock then."""

    what: str
    unit: str
    burst: float | None
    sustained: float | None = None
    shape: Sequence[int] | None = None
    clock_mhz: int | None = None
    note: str = ""
    by: str = ""

    def row(self) -> dict[str, Any]:
        return asdict(self)


# ---------------------------------------------------------------- matrix products


def plain(dtype: torch.dtype) -> Product:
    def make(M: int, N: int, K: int) -> Callable[[], Tensor]:
        a, b = (torch.randn(shape, device="cuda").to(dtype) for shape in ((M, K), (N, K)))
        out = torch.empty(M, N, dtype=dtype, device="cuda")
        return lambda: torch.mm(a, b.t(), out=out)

    return make


def fp8(M: int, N: int, K: int) -> Callable[[], Tensor]:
    """An FP8 product with one scale a tensor, whose sums stay in the tensor cores."""
    a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((M, K), (N, K)))
    one = torch.ones((), device="cuda")
    return lambda: torch._scaled_mm(a, b.t(), one, one, out_dtype=torch.bfloat16, use_fast_accum=True)


def int8(M: int, N: int, K: int) -> Callable[[], Tensor]:
    a, b = (torch.randint(-128, 128, shape, dtype=torch.int8, device="cuda") for shape in ((M, K), (N, K)))
    return lambda: torch._int_mm(a, b.t())


def block_operands(M: int, N: int, K: int) -> dict[str, Any]:
    """FP8 operands with a scale for 1x128 elements of a row, and for 128x128 of a weight."""
    a, b = (torch.randn(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((M, K), (N, K)))
    scale_a, scale_b = (torch.rand(shape, device="cuda") for shape in ((cdiv(K, 128), M), (cdiv(N, 128), cdiv(K, 128))))
    recipes = {"recipe_a": "BlockWise1x128", "recipe_b": "BlockWise128x128"}
    return {"a": a, "b": b.t(), "scale_a": scale_a.t(), "scale_b": scale_b, **recipes}


def fp8_block(M: int, N: int, K: int) -> Callable[[], Tensor]:
    from ..gemm import library, scaled_mm

    return library.prepared(scaled_mm.product.signature.bind((), block_operands(M, N, K)))


def ours(name: str, operands: Callable[[int, int, int], dict[str, Any]]) -> Product:
    """A product by kernels of ours, never a library's."""

    def make(M: int, N: int, K: int) -> Callable[[], Tensor]:
        from .. import catalogue

        op, given = catalogue()[name], operands(M, N, K)

        def call() -> Tensor:
            with force("triton"), torch.no_grad():
                return op.function(**given)

        return call

    return make


def bf16_operands(M: int, N: int, K: int) -> dict[str, Any]:
    a, b = (torch.randn(shape, device="cuda").to(torch.bfloat16) for shape in ((M, K), (N, K)))
    return {"a": a, "b": b.t()}


def row_operands(dtype: torch.dtype) -> Callable[[int, int, int], dict[str, Any]]:
    """Operands with a scale for each row of both factors, for sums that stay in the tensor cores."""

    def make(M: int, N: int, K: int) -> dict[str, Any]:
        spread = 40.0 if dtype == torch.int8 else 1.0
        a, b = ((spread * torch.randn(shape, device="cuda")).to(dtype) for shape in ((M, K), (N, K)))
        scale_a, scale_b = (torch.rand(n, 1, device="cuda") for n in (M, N))
        both = {"scale_a": scale_a, "scale_b": scale_b, "recipe_a": "RowWise", "recipe_b": "RowWise"}
        return {"a": a, "b": b.t(), "accumulate": "fast", **both}

    return make


PRODUCTS: dict[str, dict[str, Product]] = {
    "bf16": {"torch": plain(torch.bfloat16), "tilewright": ours("matmul", bf16_operands)},
    "fp16": {"torch": plain(torch.float16)},
    "tf32": {"torch": plain(torch.float32)},
    "fp8": {"torch": fp8, "tilewright": ours("scaled_mm", row_operands(torch.float8_e4m3fn))},
    "fp8_block": {"torch": fp8_block, "tilewright": ours("scaled_mm", block_operands)},
    "int8": {"torch": int8, "tilewright": ours("scaled_mm", row_operands(torch.int8))},
}


@contextlib.contextmanager
def tf32() -> Iterator[None]:
    """Inside, torch multiplies fp32 on tensor cores, as TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def burst_us(make: Callable[[], Callable[[], Any]], flops: float, device: timing.Device) -> float:
    """Microseconds a product, by a short graph of them."""
    calls = max(2, min(16, round(timing.GRAPH_US * FLOPS_PER_US / flops)))
    return timing.measure([make(), make()], calls - calls % 2, device=device).us


def sustained_us(
    call: Callable[[], Any], us: float, device: timing.Device, clock: Callable[[], int | None]
) -> tuple[float, int | None]:
    """(Microseconds a product once the chip has worked for a second, its clock then)."""
    for _ in range(max(1, round(SUSTAINED_US / us))):
        call()
    count = max(1, round(MEASURED_US / us))
    start = device.mark()
    for _ in range(count):
        call()
    end = device.mark()
    mhz = clock()  # while the queue still holds work: asked after it, an idle chip would answer
    device.synchronize()
    return device.elapsed_us(start, end) / count, mhz


def matrix(
    name: str,
    product: Product | Mapping[str, Product],
    device: timing.Device,
    clock: Callable[[], int | None],
    shapes: Sequence[Shape] = SHAPES,
) -> Light:
    """The best rate of one dtype, in TFLOP/s (integers: TOP/s), over shapes and over those who make the product."""
    unit = "TOP/s" if name == "int8" else "TFLOP/s"
    makers = product if isinstance(product, Mapping) else {"": product}
    best: tuple[float, Shape, float, str] | None = None
    why = ""
    for by, (M, N, K) in itertools.product(makers, shapes):
        flops = 2.0 * M * N * K
        try:
            us = burst_us(lambda: makers[by](M, N, K), flops, device)  # noqa: B023
        except (RuntimeError, AttributeError, TypeError, NotImplementedError) as error:  # this torch or chip has none
            why = why or f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:120]}"
            continue
        if best is None or flops / us > best[0]:
            best = flops / us, (M, N, K), us, by
    if best is None:
        return Light(name, unit, None, note=why)
    rate, (M, N, K), us, by = best
    steady, mhz = sustained_us(makers[by](M, N, K), us, device, clock)
    return Light(name, unit, rate / 1e6, 2.0 * M * N * K / steady / 1e6, (M, N, K), mhz, by=by)


# ---------------------------------------------------------------- memory, clock, all


def bandwidth(what: str, floor: Callable[[int, int], float] = floor_us) -> Light:
    """Bytes read and written a second, in TB/s."""
    read, written = {"copy": (STREAMED // 2, STREAMED // 2), "read": (STREAMED, 0), "write": (0, STREAMED)}[what]
    return Light(what, "TB/s", (read + written) / floor(read, written) / 1e6)


def sm_clock(index: int = 0) -> int | None:
    """The SM clock in MHz now, by NVML or nvidia-smi; None where there is neither."""
    try:
        nvml = importlib.import_module("pynvml")
        nvml.nvmlInit()
        return int(nvml.nvmlDeviceGetClockInfo(nvml.nvmlDeviceGetHandleByIndex(index), nvml.NVML_CLOCK_SM))
    except Exception:  # absent, or of another make: NVML's own errors are no standard ones
        pass
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    words = [tool, "--query-gpu=clocks.sm", "--format=csv,noheader,nounits", f"--id={index}"]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=10)
        return int(done.stdout.strip())
    except (OSError, ValueError, subprocess.TimeoutExpired):
        return None


NAMES = ("copy", "read", "write", *PRODUCTS)


def measure(
    name: str, device: timing.Device | None = None, clock: Callable[[], int | None] = sm_clock
) -> Light:  # fmt: skip
    """One row of the table, by name."""
    if name not in PRODUCTS:
        return bandwidth(name)
    with tf32() if name == "tf32" else contextlib.nullcontext():
        return matrix(name, PRODUCTS[name], timing.Cuda() if device is None else device, clock)
