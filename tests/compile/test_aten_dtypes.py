"""What Triton's front end refuses, of every overload of torch's that is replaced: with operands of each kind of dtype, and numbers
in operands' places. The interpreter takes much of it, such as a loop that changes the shape of a value."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.compile.test_aten import BF16, BOOL, FP32, needed
from tilewright.aten import table
from tilewright.aten.row import Declined
from tilewright.check.provided.aten import call_of
from tilewright.check.variants import Variant

BYTE = torch.uint8
DTYPES = (FP32, BF16, torch.float64, BYTE, BOOL)
NUMBERS = {FP32: (2.5,), BYTE: (3, 2.5)}  # beside tensors of that dtype
READ: set[str] = set()  # variants that an overload before has had read


def calls(name: str) -> Iterator[tuple[list[Any], dict[str, Any]]]:
    """A plain call of an overload with each dtype in the place of fp32; and with a number for one of its tensors."""
    for dtype in DTYPES:

        def make(shape: tuple[int, ...], own: torch.dtype = FP32, dtype: torch.dtype = dtype) -> Tensor:
            return torch.empty(shape, dtype=dtype if own in (FP32, torch.int32) else own)

        args, kwargs = call_of(name, make)
        yield args, kwargs
        taken = getattr(table.FORMS[name], "numbers", ())
        arguments = table.overload_of(name)._schema.arguments
        for at, value in enumerate(args):
            if isinstance(value, Tensor) and arguments[at].name in taken and arguments[at].alias_info is None:
                for number in NUMBERS.get(dtype, ()):
                    yield [*args[:at], number, *args[at + 1 :]], kwargs


def variants(name: str) -> dict[str, Variant]:
    found: dict[str, Variant] = {}
    for args, kwargs in calls(name):
        try:
            found.update({one.name: one for one in needed(name, args, kwargs)})
        except (Declined, RuntimeError, TypeError):  # aten's, or its to refuse
            continue
    return found


@pytest.mark.parametrize("name", sorted(table.FORMS))
def test_every_dtype_and_number_is_read(name):
    found = variants(name)
    assert found
    for key in found.keys() - READ:
        assert found[key].fingerprint()
        READ.add(key)
