"""torch's own samples of its operators. The one module here that touches `torch.testing._internal`, which promises nothing."""

from __future__ import annotations

import itertools
import random
import sys
import types
import unittest
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from tilewright.core.target import INTERPRETING

try:
    import expecttest  # noqa: F401
except ModuleNotFoundError:  # op_db only wants a class of this name
    sys.modules["expecttest"] = types.ModuleType("expecttest")
    sys.modules["expecttest"].TestCase = unittest.TestCase

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from torch.testing._internal import common_utils
    from torch.testing._internal.common_methods_invocations import op_db
    from torch.testing._internal.opinfo import core

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETING else "cpu"  # whose operators are replaced
# The same as torch's own tests name it: for a plain "cuda", `_softmax_backward_data` has samples that aten refuses
NUMBERED = "cuda:0" if DEVICE == "cuda" else DEVICE
OTHERS = (
    torch.bfloat16, torch.int32, torch.float64, torch.bool, torch.float16, torch.int64, torch.uint8, torch.int8, torch.int16,
)  # fmt: skip
SORTS, SHORT = ("argsort", "msort", "sort", "topk", "unique"), 256  # elements that the interpreter sorts in little time
ENTRIES = {f"{op.name}.{op.variant_test_name}" if op.variant_test_name else op.name: op for op in op_db}


def seed(number: int = common_utils.SEED) -> None:
    """What op_db does before each sample, without what `torch.manual_seed` does where there is no GPU: it keeps a call for every
    kind of device, each with the stack that it came from, and that takes longer than a sample."""
    torch.default_generator.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


if not torch.cuda.is_available():
    common_utils.set_rng_seed = seed
# op_db looks through the stack of every call for a method of its own test classes, of which there is none here. It has two names
# for what does; a test's stack is deep, and to look through it takes longer than the samples do
common_utils.extract_test_fn = core.extract_test_fn = lambda: None


def dtypes_of(name: str) -> list[torch.dtype]:
    """fp32, and one other in turn, of those that an entry takes."""
    takes = ENTRIES[name].supported_dtypes(DEVICE)
    others = [d for d in OTHERS if d in takes]
    turn = sorted(ENTRIES).index(name)
    return [torch.float32] * (torch.float32 in takes) + others[turn % max(1, len(others)) :][:1]


def samples(name: str, dtype: torch.dtype, most: int) -> Iterator[Any]:
    """The first samples of an entry, spread over all that it has, each with its twin that is not contiguous."""
    seed(0) if DEVICE == "cpu" else torch.manual_seed(0)
    every = list(itertools.islice(ENTRIES[name].sample_inputs(NUMBERED, dtype), 40))
    if DEVICE == "cpu" and name in SORTS:
        every = [one for one in every if one.input.numel() <= SHORT]
    # From the first to the last: every so manieth alone may be of one kind, such as those of no elements
    chosen = sorted({at * (len(every) - 1) // max(1, most - 1) for at in range(most)} if every else ())
    for sample in [every[at] for at in chosen]:
        yield sample
        yield sample.noncontiguous()


def error_samples(name: str) -> Iterator[Any]:
    """Arguments that are refused, as `sample_input`, and the type of exception."""
    op = ENTRIES[name]
    if op.error_inputs_func is not None:
        yield from op.error_inputs(DEVICE)
