"""What Triton's front end refuses, of every overload of torch's that is replaced: with operands of each kind of dtype, and numbers
in operands' places. The interpreter takes much of it, such as a loop that changes the shape of a value."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.aten.declined import declined
from tests.compile.test_aten import BF16, BOOL, FP32, needed
from tilewright.aten import table
from tilewright.aten.row import Declined
from tilewright.check.provided.aten import call_as
from tilewright.check.variants import Variant

BYTE = torch.uint8
DTYPES = (FP32, BF16, torch.float64, BYTE, BOOL)
NUMBERS = {FP32: (2.5,), BYTE: (3, 2.5)}  # beside tensors of that dtype
READ: set[str] = set()  # variants that an overload before has had read


def plain(name: str, dtype: torch.dtype) -> tuple[list[Any], dict[str, Any]]:
    return call_as(name, dtype, lambda shape, own: torch.empty(shape, dtype=own))


def with_numbers(name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """Plain calls with a number for one of their tensors."""
    taken = getattr(table.FORMS[name], "numbers", ())
    arguments = table.overload_of(name)._schema.arguments
    for dtype, numbers in NUMBERS.items():
        args, kwargs = plain(name, dtype)
        for at, value in enumerate(args):
            if isinstance(value, Tensor) and arguments[at].name in taken and arguments[at].alias_info is None:
                for number in numbers:
                    yield [*args[:at], number, *args[at + 1 :]], kwargs


def variants(name: str) -> dict[str, Variant]:
    """Of a plain call with each dtype that is ours in the place of fp32, of int64 where none of them is, and of those with
    numbers."""
    dtypes = [dtype for dtype in DTYPES if dtype not in declined(name)] or [torch.int64]
    wanted = [one for dtype in dtypes for one in needed(name, *plain(name, dtype))]
    for args, kwargs in with_numbers(name):
        with contextlib.suppress(Declined, RuntimeError, TypeError):  # aten's, or its to refuse
            wanted += needed(name, args, kwargs)
    return {one.name: one for one in wanted}


@pytest.mark.parametrize("name", sorted(table.FORMS))
def test_every_dtype_and_number_is_read(name):
    found = variants(name)
    assert found
    for key in found.keys() - READ:
        assert found[key].fingerprint()
        READ.add(key)
