"""`Draw`: named dimensions and a seed, turned into an op's arguments.

An op's `inputs(draw)` says what sensible arguments look like, once; tests draw odd sizes and every option from it, benchmarks
fix the dimensions and options by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# Sizes at which kernels break: nothing, one, primes, either side of a power of two, of a warp and of a 128 block.
SIZES = (0, 1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 100, 127, 128, 129, 200, 255, 257, 300, 384, 511, 513)


class Draw:
    """A source of an op's arguments. `dims` and `options` fix what they name; the seed decides the rest."""

    def __init__(
        self,
        seed: int = 0,
        dims: Mapping[str, int] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        largest: int = 64 * 1024,
    ) -> None:
        self.seed, self.dims, self.options = seed, dict(dims or {}), dict(options or {})
        self.dtype, self.device, self.largest = dtype, torch.device(device), largest
        self._choose = torch.Generator().manual_seed(seed)
        self._fill = torch.Generator(self.device).manual_seed(seed)

    def dim(self, name: str, sizes: Sequence[int] = SIZES) -> int:
        """A named dimension; drawn once, then the same wherever the name appears."""
        if name not in self.dims:
            left = self.largest
            for size in self.dims.values():
                left //= max(1, size)
            fitting = [s for s in sizes if s <= max(1, left)] or [min(sizes)]
            self.dims[name] = fitting[self._index(len(fitting))]
        return self.dims[name]

    def option(self, name: str, *choices: T) -> T:
        """One of several values of a named argument."""
        if name not in self.options:
            self.options[name] = choices[self._index(len(choices))]
        return self.options[name]

    def together(self, *rows: Mapping[str, Any]) -> None:
        """One of several rows of options that go together; what is fixed stays as it is. Each combination of options may be a
        binary, which takes seconds to compile: rows in which every two of them meet are few. Their turn comes with every third
        seed, since nets go through three dtypes."""
        self.options = {**rows[self.seed // 3 % len(rows)], **self.options}

    def maybe(self, name: str, make: Callable[[], T]) -> T | None:
        """An optional argument: present or None."""
        return make() if self.option(name, True, False) else None

    def tensor(
        self, *dims: str | int, dtype: torch.dtype | None = None, scale: float = 1.0, shift: float = 0.0
    ) -> Tensor:
        """Normal values, drawn in fp32 and rounded once."""
        values = torch.randn(self._shape(dims), generator=self._fill, device=self.device)
        return (values * scale + shift).to(dtype or self.dtype)

    def uniform(
        self, *dims: str | int, low: float = 0.0, high: float = 1.0, dtype: torch.dtype | None = None
    ) -> Tensor:
        values = torch.rand(self._shape(dims), generator=self._fill, device=self.device)
        return (values * (high - low) + low).to(dtype or self.dtype)

    def integers(self, *dims: str | int, low: int = 0, high: int = 2, dtype: torch.dtype = torch.int64) -> Tensor:
        """Integers in [low, high)."""
        return torch.randint(
            low, max(low + 1, high), self._shape(dims), generator=self._fill, device=self.device, dtype=dtype
        )

    def ends(self, rows: int) -> Tensor:
        """The end rows of a few groups, some perhaps empty, that cover all rows: what `offsets` arguments are."""
        dtype = self.option("index", torch.int32, torch.int64)
        count = self.dim("experts", (1, 2, 5))
        if "uneven" in self.options:  # sizes by which a group may be off their mean, 0.5 for a half
            by = self.options["uneven"]
            sizes = self.uniform(count, low=1.0 - by, high=1.0 + by, dtype=torch.float32).cumsum(0)
            ends = (sizes / sizes[-1] * rows).to(dtype)
        else:
            ends = self.integers(count, high=rows + 1, dtype=dtype)
        ends -= ends % self.options.get("aligned", 1)
        ends[-1:] = rows
        return ends.sort().values

    def spread(self, count: int, total: int, least: int, most: int) -> list[int]:
        """So many sizes from `least` to `most` that add up to `total`, evenly apart in their logarithms but for a bend, large and
        small ones mixed. They do not depend on the seed: benchmarks name them."""
        if count < 3 or not (count - 1) * least + most <= total <= least + (count - 1) * most:
            raise ValueError(f"no {count} sizes from {least} to {most} add up to {total}")
        low, high = 0.0, 64.0  # of the bend: the larger, the smaller the sizes
        for _ in range(60):
            bend = (low + high) / 2
            sizes = [int(least * (most / least) ** ((i / (count - 1)) ** bend)) for i in range(count)]
            low, high = (bend, high) if sum(sizes[1:-1]) + least + most > total else (low, bend)
        inner = [int(least * (most / least) ** ((i / (count - 1)) ** high)) for i in range(1, count - 1)]
        while (left := total - least - most - sum(inner)) > 0:  # what rounding left, to those that have room
            for i in [i for i, size in enumerate(inner) if size < most][:left]:
                inner[i] += 1
        ordered = [least, *inner, most]
        step = next(n for n in range(count * 5 // 8, count) if math.gcd(n, count) == 1)
        return [ordered[(i * step + count // 2) % count] for i in range(count)]

    def _shape(self, dims: Sequence[str | int]) -> list[int]:
        return [d if isinstance(d, int) else self.dim(d) for d in dims]

    def _index(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self._choose))
