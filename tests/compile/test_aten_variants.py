"""How many variants torch's own samples have compiled per kernel and function, for an overload and dtypes: a GPU's net takes as
long as its compiler."""

from __future__ import annotations

import warnings
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from tests.aten.compare import flat
from tests.aten.samples import ENTRIES, dtypes_of, samples
from tests.aten.test_opinfo import NAMES
from tilewright.aten import table
from tilewright.aten.plans import Run
from tilewright.aten.row import Declined
from tilewright.aten.table import name_of
from tilewright.core.target import TARGETS, pretend
from tilewright.runtime.kernel import collect

# Samples of an entry and dtype, as many as a GPU makes; and variants per kernel and function, for an overload and the dtypes of its
# arguments (a function is what they ask for: a norm, a rounding)
MOST, AT_MOST = 2, 3


class Compiled(TorchDispatchMode):
    """What each call of a replaced overload would have compiled for sm_90, by overload, dtypes and function. The call itself is
    aten's."""

    def __init__(self) -> None:
        super().__init__()
        self.keys: dict[tuple, set[tuple]] = defaultdict(set)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = name_of(func)
        made = func(*args, **kwargs)  # first: it resizes, and refuses
        if name in table.FORMS:
            with Run(), pretend(TARGETS["sm_90"]), collect() as wanted:
                try:
                    table.FORMS[name](*args, **kwargs)
                except Declined:
                    return made
            values = flat([*args, *kwargs.values()])
            kinds = tuple(
                [v.dtype if isinstance(v, Tensor) else v if isinstance(v, torch.dtype) else type(v) for v in values]
            )
            for one in wanted:
                function = one.ordered[one.kernel.names.index("HOW")] if "HOW" in one.kernel.names else None
                key = one.kernel.name, one.kernel.key(one.ordered, one.options, 0)
                self.keys[name, kinds, function, one.kernel.name].add(key)
        return made


@pytest.mark.parametrize("name", NAMES)
def test_few_variants_serve_all_samples(name):
    with warnings.catch_warnings(), Compiled() as compiled:
        warnings.simplefilter("ignore")
        for dtype in dtypes_of(name):
            for sample in samples(name, dtype, MOST):
                ENTRIES[name](sample.input, *sample.args, **sample.kwargs)
    many = {call: keys for call, keys in compiled.keys.items() if len(keys) > AT_MOST}
    assert not many, "\n".join(f"{call}: {[name for name, _ in keys]}" for call, keys in many.items())
