"""`out`: memory of the caller's for the results of a call, one for each result or None where the call allocates.

What may be given follows from the declared results: the shape, the dtype and the format that the result would have, on the device
of the arguments, without elements that share memory, apart from all arguments but those that the result may lie on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from .flat import as_tuple, flattened, given_tensors
from .format import Format, Quantized
from .memory import clashing, interleaved, layout, overlapping, same_memory, self_overlapping
from .signature import shape_words
from .tensor import name_of


class Declared(Protocol):
    """What is asked of a declaration here."""

    name: str
    signature: Any
    results: tuple[str, ...]
    result_rows: Mapping[str, Any]
    writes: tuple[str, ...]
    groups: str | None
    out: Any

    def expected(self, values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]: ...


def outs_of(op: Declared, values: Mapping[str, Any]) -> tuple:
    """What was given for each public result; nothing at all is an empty tuple."""
    out = values.get("out")
    if out is None:
        return ()
    return (out,) if len(op.result_rows) == 1 else tuple(out)


def with_outs(results: Any, outs: Sequence[Any]) -> Any:
    """The results with the caller's memory in the place of those that were stored there."""
    if not outs:
        return results
    made = as_tuple(results)
    for result, out in zip(made, outs):
        if isinstance(out, Quantized) and isinstance(result, Quantized) and result is not out:
            out.in_groups(result.offsets)
    made = (*(r if o is None else o for r, o in zip(made, outs)), *made[len(outs) :])
    return made if isinstance(results, tuple) else made[0]


def apart(results: Any, outs: Sequence[Any], direct: Collection[int] = ()) -> Iterator[tuple[Tensor, Tensor]]:
    """(memory of the caller's, what belongs there), but for memory at the addresses `direct`, which is filled."""
    for result, out in zip(as_tuple(results), outs):
        if out is not None:
            for there, here in zip(flattened(out), flattened(result)):
                if here is not None and there.numel() and there.data_ptr() not in direct:
                    yield there, here


def stored(results: Any, outs: Sequence[Any]) -> Any:
    """The results, copied to where the caller wants them."""
    for there, here in apart(results, outs):
        there.copy_(here)
    return with_outs(results, outs)


def words_of(op: Declared, at: int) -> str:
    """How an error names what was given for a result."""
    return "out" if len(op.result_rows) == 1 else f"out[{at}], for {op.results[at]},"


def check_number(op: Declared, out: Any) -> None:
    """Raise TypeError unless there is one for each of several results."""
    count = len(op.result_rows)
    if not (isinstance(out, (tuple, list)) and len(out) == count):
        got = f"{len(out)}" if isinstance(out, (tuple, list)) else type(out).__name__
        raise TypeError(f"{op.name}: out must be a tuple of {count}, for {', '.join(op.result_rows)}, got {got}")


def groups_of(op: Declared, values: Mapping[str, Any], expected: Mapping[str, tuple[Any, Any]]) -> int:
    """How many groups the rows of the first result are in: by an argument or by another result; 0 of rows that are not grouped."""
    if op.groups in expected:
        return expected[op.groups][0][0]
    ends = values.get(op.groups)
    return 0 if ends is None else ends.shape[0]


def check_outs(op: Declared, values: Mapping[str, Any], addresses: bool = True) -> None:
    """Raise TypeError or ValueError for an `out` that cannot be stored into. Without `addresses`, as while a call is traced,
    nothing is said of memory that is shared."""
    if not op.result_rows:
        raise TypeError(f"{op.name}: out is memory for results, and it gives none")
    if len(op.result_rows) > 1:
        check_number(op, values["out"])
    arguments = {n: values[n] for n in op.signature.tensors if values[n] is not None}
    tensors = given_tensors(arguments)
    device = tensors[0].device if tensors else None
    outs, written, expected = outs_of(op, values), [], op.expected(values)
    groups = groups_of(op, values, expected)
    for at, ((name, (shape, dtype)), out) in enumerate(zip(expected.items(), outs)):
        if out is None:
            continue
        if isinstance(shape, list):
            check_list(op, out, shape, dtype, device, values, addresses)
            continue
        label = f"{op.name}: {words_of(op, at)}"
        check_kind(label, out, shape, dtype, device, values.get("out_format") if at == 0 else None, groups)
        if name in op.out.contiguous and not isinstance(out, Quantized) and not out.is_contiguous():
            raise ValueError(f"{label} must be contiguous, its strides are {list(out.stride())}")
        for piece in flattened(out) if addresses else ():
            if piece is None:
                continue
            if self_overlapping(piece):
                raise ValueError(f"{label} has elements that share memory")
            for n, value in arguments.items():
                for t in flattened(value):
                    if overlapping(piece, t) and not (n in op.out.lies_on.get(name, ()) and same_memory(piece, t)):
                        raise ValueError(f"{label} shares memory with {n}")
            if any(overlapping(piece, other) for other in written):
                raise ValueError(f"{label} shares memory with that of another result")
        written += [piece for piece in flattened(out) if piece is not None]


def check_written(op: Declared, values: Mapping[str, Any]) -> None:
    """Raise ValueError where an argument that the op writes shares memory with another, or within itself."""
    for name in op.writes:
        written = values[name]
        if written is None:
            continue
        if self_overlapping(written):
            raise ValueError(f"{op.name}: {name}, which is written, has elements that share memory")
        for other in op.signature.tensors:
            some = given_tensors({other: values[other]}) if other != name else ()
            if any(overlapping(written, t) and not interleaved(written, t) for t in some):
                raise ValueError(f"{op.name}: {name}, which is written, shares memory with {other}")


def check_kind(
    label: str,
    out: Any,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    wanted: Format | None,
    groups: int,
) -> None:
    """`out` is a tensor of this shape and dtype, in the format that is wanted and laid out as that lays out its memory: kernels
    write where the format says. `groups`: of rows, 0 where there are none."""
    if not isinstance(out, Tensor):
        raise TypeError(f"{label} must be a Tensor, got {type(out).__name__}")
    given = out.format if isinstance(out, Quantized) else None
    if (wanted and wanted.key) != (given and given.key):
        raise ValueError(f"{label} is {given or 'a plain tensor'}, but out_format is {wanted}")
    if out.layout is not torch.strided or out.is_neg() or out.is_conj():
        raise TypeError(f"{label} must be a plain strided tensor")
    if out.device != device:
        raise ValueError(f"{label} is on {out.device}, the arguments on {device}: move one of them")
    if tuple(out.shape) != tuple(shape):
        raise ValueError(f"{label} is {shape_words(out)}, but must be {name_of(dtype)}{list(shape)}")
    if out.dtype != dtype:
        raise TypeError(f"{label} must be {name_of(dtype)}, got {name_of(out.dtype)}")
    if wanted is None:
        return
    like = wanted.empty(out.shape, out.dtype, "meta", groups)
    for name, has, should in zip(wanted.tensor_names, out.tensors(), like.tensors()):
        if (has.dtype, layout(has)) != (should.dtype, layout(should)):
            raise ValueError(
                f"{label}.{name} is {shape_words(has)} of strides {list(has.stride())}, but out_format has"
                f" {shape_words(should)} of strides {list(should.stride())}"
            )


def check_list(
    op: Declared,
    outs: Any,
    shapes: Sequence[Any],
    dtypes: Sequence[Any],
    device: torch.device | None,
    values: Mapping[str, Any],
    addresses: bool,
) -> None:
    """A list of results is like the list of arguments that its row names, and may be written over that, tensor by tensor, and over
    nothing else."""
    if not isinstance(outs, (list, tuple)):
        raise TypeError(f"{op.name}: out must be a list of Tensors, got {type(outs).__name__}")
    if len(outs) != len(shapes):
        raise ValueError(f"{op.name}: out has {len(outs)} tensors, but must have {len(shapes)}")
    source = next(n for n in op.signature.tensors if isinstance(values[n], (list, tuple)))
    if outs is values[source]:
        return  # the arguments themselves, written over
    for i, (out, shape, dtype) in enumerate(zip(outs, shapes, dtypes)):
        check_kind(f"{op.name}: out[{i}]", out, shape, dtype, device, None, 0)
        if not out.is_contiguous() and self_overlapping(out):
            raise ValueError(f"{op.name}: out[{i}] has elements that share memory")
    if not addresses:
        return
    over = [same_memory(a, b) for a, b in zip(outs, values[source])]
    rest = [t for t, same in zip(values[source], over) if not same]
    rest += [t for n in op.signature.tensors if n != source for t in given_tensors({n: values[n]})]
    if clashing(outs, rest):
        raise ValueError(f"{op.name}: out shares memory within itself, or with other arguments than its own")
