"""One plain call of every overload that is replaced: made from its schema, but for arguments whose names do not say what they are.

`calls()` gives (overload, arguments, keywords). Tensors are small and of fp32, or of int32 where an operator takes integers alone;
`make` may give others (without memory, to compile).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from tilewright.aten import table
from tilewright.aten.table import overload_of

Make = Callable[..., Tensor]
SHAPE = (6, 40)
INTEGERS = ("bitwise_and", "bitwise_or", "bitwise_not")
# Arguments of an overload that a schema does not tell, by the operator's name without the underscore
GIVEN: dict[str, Callable[[Make], dict[str, Any]]] = {
    "addr": lambda make: {"vec1": make(SHAPE[:1]), "vec2": make(SHAPE[1:])},
    "cat": lambda make: {"tensors": [make(SHAPE), make(SHAPE)], "dim": 1},
    "clamp": lambda make: {"max": 1.0},
    "constant_pad_nd": lambda make: {"pad": [1, 2, 0, 1]},
    "diagonal_backward": lambda make: {"grad_output": make((6,)), "input_sizes": [6, 7], "offset": 1, "dim1": 0, "dim2": 1},
    "div": lambda make: {"rounding_mode": "floor"},
    "dot": lambda make: {"self": make((40,)), "tensor": make((40,))},
    "elu_backward": lambda make: {"is_result": False},
    "flip": lambda make: {"dims": [0, 1]},
    "glu_backward": lambda make: {"grad_output": make((6, 20)), "dim": 1},
    "native_dropout_backward": lambda make: {"mask": make(SHAPE, torch.bool)},
    "repeat": lambda make: {"repeats": [2, 1, 3]},
    "select_scatter": lambda make: {"src": make((40,)), "dim": 0, "index": 2},
    "slice_scatter": lambda make: {"src": make((6, 10)), "dim": 1, "start": 1, "end": 40, "step": 4},
    "vdot": lambda make: {"self": make((40,)), "other": make((40,))},
}  # fmt: skip
RESULTS = {"sum.out": (), "sum.IntList_out": (6,), "cumsum.out": SHAPE, "where.self_out": SHAPE}  # shapes of `out`


def call_of(name: str, make: Make) -> tuple[list[Any], dict[str, Any]]:
    """Arguments and keywords of one call of an overload."""
    packet = name.partition(".")[0]
    given = GIVEN.get(packet.removesuffix("_"), lambda make: {})(make)
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    skipped = False
    for argument in overload_of(name)._schema.arguments:
        kind = str(argument.type)
        if argument.name == "out":
            value = make(RESULTS[name])
        elif argument.name in given and ("Tensor" not in kind or isinstance(given[argument.name], (Tensor, list))):
            value = given[argument.name]
        elif argument.name == "mask" or argument.name == "condition":
            value = make(SHAPE, torch.bool)
        elif kind == "Tensor" and argument.name == "value":
            value = make(())
        elif "Tensor" in kind:
            value = make(SHAPE, torch.int32 if packet.removesuffix("_") in INTEGERS else torch.float32)
        elif argument.name == "dim":
            value = 1 if kind == "int" else [1] if "List" in kind else None
        elif argument.has_default_value():
            skipped = True
            continue
        else:
            value = {"number": 0.5, "float": 0.5}[kind]
        if argument.kwarg_only or skipped:
            kwargs[argument.name] = value
        else:
            args.append(value)
    return args, kwargs


def calls(make: Make) -> Iterator[tuple[str, list[Any], dict[str, Any]]]:
    for name in sorted(table.FORMS):
        yield name, *call_of(name, make)
