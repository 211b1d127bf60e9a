"""Replaced operators on a launcher that keeps what it is given: addresses, numbers, sizes and streams of calls made by plans."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

import tilewright as tw
from tests.host.test_launch import Compiled, driver_of
from tilewright.aten import plans, pointwise, reduction, router
from tilewright.core import triton_versions
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime import kernel as kernels
from tilewright.runtime import launch as launches
from tilewright.runtime import list_launch

VERSIONS = ("3.6", "3.9")


class Gpu:
    """A CPU that is taken for one: kernels are launched at its key by a launcher that keeps what it is given."""

    def __init__(self, version: str) -> None:
        self.version, self.driver, self.stream, self.compiled = version, driver_of(version), 99, 0
        self.capturing = False

    def variant(self, kernel: Any, ordered: list, options: Any, grid: tuple, device: int) -> Compiled:
        key = kernel.key(ordered, options, device)
        if key not in kernel.variants:
            if self.capturing:
                raise kernels.NotCompiledError
            self.compiled += 1
            constants = {p.name for p in kernel.jit.params if p.is_constexpr}
            types = tuple(
                "constexpr" if n in constants or v is None else "*fp32" if isinstance(v, Tensor) else "i32"
                for n, v in zip(kernel.names, ordered)
            )
            kernel.variants[key] = Compiled(self.driver, types)
        return kernel.variants[key]

    def launches(self) -> list[tuple[int, int, list]]:
        """(programs, stream, the kernel's own arguments) of all launches since, but for trials of none."""
        found = [args for args in self.driver.launched if args[0]]
        self.driver.launched.clear()
        own = [a[13:] if self.version == "3.6" else a[-1] for a in found]
        return [
            (a[0], a[3], [v.data_ptr() if isinstance(v, Tensor) else v for v in given]) for a, given in zip(found, own)
        ]


@pytest.fixture(params=VERSIONS)
def gpu(request, monkeypatch):
    own = Gpu(request.param)
    monkeypatch.setitem(sys.modules, own.driver.__name__, own.driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device", lambda index: contextlib.nullcontext())
    for module in (launches, list_launch, plans):
        monkeypatch.setattr(module, "raw_stream", lambda device: own.stream)
    monkeypatch.setattr(kernels.Kernel, "variant", lambda kernel, *given: own.variant(kernel, *given))
    monkeypatch.setattr(router, "INTERPRETING", True)  # which registers at the processor's key
    monkeypatch.setattr(plans, "_variants", {})
    known = triton_versions.launcher_of
    known.cache_clear()
    for kernel in (pointwise.pointwise_flat, pointwise.pointwise_tiles, reduction.reduce_tiles, reduction.reduce_parts):
        monkeypatch.setattr(kernel, "variants", {})
        monkeypatch.setattr(kernel, "_direct", {})
    with pretend(TARGETS["sm_90"]):
        yield own
    known.cache_clear()


def test_addresses_numbers_and_streams_are_a_later_calls(gpu):
    with tw.aten.use("all", include="mul.Tensor"):
        for i in range(6):
            x = torch.ones(4, 8)
            gpu.stream = 100 + i
            made = x * (i + 0.5)
            [(programs, stream, args)] = gpu.launches()
            assert (programs, stream) == (1, 100 + i) and gpu.compiled == 1
            assert args[:2] == [made.data_ptr(), x.data_ptr()]
            assert 32 in args and plans.float_bits(i + 0.5) in args


def test_a_new_shape_takes_what_is_compiled(gpu):
    """And no run, once calls that lie alike have made plans, of whole words and of others: the number of elements and the grid
    follow."""
    with tw.aten.use("all", include="add.Tensor"):
        for _ in range(3):
            torch.ones(4, 8) + torch.ones(4, 8)
            torch.ones(5, 7) + torch.ones(5, 7)
        own, gpu.driver.launched[:] = router._active["add.Tensor"], []
        form, own.form = own.form, None  # which would fail
        for shape in ((64, 513), (2, 3, 5), (1025,)):
            x, y = torch.ones(shape), torch.ones(shape)
            made = x + y
            [(programs, _, args)] = gpu.launches()
            assert made.shape == shape and made.is_contiguous() and programs == -(-x.numel() // 1024)
            assert args[:3] == [made.data_ptr(), x.data_ptr(), y.data_ptr()] and x.numel() in args
        own.form = form
        assert gpu.compiled == 2
        torch.ones(8, 64).t() + torch.ones(64, 8)  # which lies otherwise
        assert gpu.compiled == 3


def test_several_launches_and_scratch_memory(gpu):
    with tw.aten.use("all", include="sum"):
        for _ in range(4):
            x = torch.ones(1 << 18)
            made = x.sum()
            tiles, parts = gpu.launches()
            assert x.data_ptr() in tiles[2] and made.data_ptr() in parts[2]
            shared = {a for a in tiles[2] if isinstance(a, int)} & {
                a for a in parts[2] if isinstance(a, int) and a > 1 << 32
            }
            assert len(shared) >= 1 and made.data_ptr() not in shared - {made.data_ptr()}
        assert gpu.compiled == 2


def test_misaligned_memory_takes_another_variant(gpu):
    with tw.aten.use("all", include="neg"):
        x = torch.ones(1 << 17)
        for _ in range(4):
            torch.neg(x)
        assert gpu.compiled == 1
        whole = torch.ones((1 << 17) + 4)
        for i in (1, 0, 1, 0, 1):
            torch.neg(whole[i : i + (1 << 17)])
        assert gpu.compiled == 2


def test_what_is_not_compiled_during_capture_is_atens(gpu):
    gpu.capturing = True
    with tw.aten.use("all", include="neg"):
        assert torch.equal(torch.neg(torch.ones(3)), torch.full((3,), -1.0))
        assert tw.aten.report()["neg"]["declined"] == {"a kernel that is not compiled, during graph capture": 1}
        gpu.capturing = False
        torch.neg(torch.ones(3))
        gpu.capturing = True
        torch.neg(torch.ones(3))
        torch.neg(torch.ones(5))
        assert tw.aten.report()["neg"]["taken"] == 3


def test_a_launcher_that_is_not_known_is_tritons_own_call(gpu, monkeypatch):
    monkeypatch.setattr(triton_versions, "launcher_of", lambda launcher: None)
    monkeypatch.setattr(kernels, "_said", set())
    with tw.aten.use("all", include="neg"), pytest.warns(RuntimeWarning, match="public launch"):
        for _ in range(4):
            torch.neg(torch.ones(3))
        assert tw.aten.report()["neg"]["taken"] == 4
    assert not gpu.driver.launched


def test_offsets_past_32_bits_are_another_variant(gpu):
    far = torch.empty(2**31 + 8, dtype=torch.uint8)
    with tw.aten.use("all", include="neg"):
        torch.neg(far[:12].view(2, 6)[:, ::2])
        torch.neg(far.as_strided((2, 3), (2**31, 2)))
        torch.neg(far.as_strided((2, 3), (2**31, 2)))
        assert gpu.compiled == 2
