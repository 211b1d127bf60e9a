"""Whether a quantised result is right: code by code and scale by scale, against what quantising the true value gives."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from .oracle import Outcome, bits, lift, same_bits, specified


def near_codes(
    label: str,
    name: str,
    values: Mapping[str, Any],
    actual: Outcome,
    there: Tensor,
    noise: Tensor | None,
    twin: Callable[..., Tensor] | None = None,
) -> None:
    """A quantised result: what quantising the true value gives; a producer's last bit may move a scale or, in one element of
    a thousand, a code by one step. Without `noise` every bit must be right. `twin` gives the value of the column-wise operand
    from the arguments, where that is another."""
    fmt, offsets, exact = values["out_format"], values.get("offsets"), noise is None
    if twin is not None:
        ways = [n for n in fmt.tensor_names if n.startswith("data")]
        other, single = (
            twin(**{n: lift(v, d) for n, v in values.items() if n != "out"}) for d in (torch.float64, torch.float32)
        )
        rough = (single.double() - other).square().mean(tuple(range(other.dim() - 1)), keepdim=True).sqrt()
        for way, value, error in (("data", there, noise), ("data_t", other, rough)):
            if way in ways:
                one = {**values, "out_format": dataclasses.replace(fmt, ways="row" if way == "data" else "col")}
                near_codes(label, name, one, actual, value, error)
        return
    offsets = None if offsets is None else offsets.to(there.device)
    fmt = fmt if fmt.tensor is None else fmt.bare().with_scale(fmt.tensor.to(there.device))
    step = torch.zeros_like(there) if exact else there.sign() * (3e-7 * there.abs() + 8 * noise)
    # Towards zero, not past it: the scale of a value that is all noise may be as small as one likes
    smaller = torch.where(step.abs() < there.abs(), there - step, 2.0**-10 * there)
    moved = (there,) if exact else (there, smaller, there + step)
    options = [fmt.quantize(value, torch.float32, offsets) for value in moved]
    for i, part in enumerate(fmt.tensor_names):
        wanted = [q.tensors()[i] for q in options]
        found = actual[f"{name}.{part}"].to(there.device)
        assert found.shape == wanted[0].shape, (
            f"{label}.{part}: shape {tuple(found.shape)}, not {tuple(wanted[0].shape)}"
        )
        found, *wanted = (specified(values, f"{name}.{part}", t) for t in (found, *wanted))
        if part.startswith("data"):
            if exact:  # codes may be packed, so that they are fewer than elements
                _near_code(
                    f"{label}.{part}",
                    found,
                    wanted,
                    torch.ones(found.shape, dtype=torch.bool, device=found.device),
                    exact,
                )
                continue
            clear = 512 * step.abs() <= there.abs()
            clear = clear.reshape(math.prod(there.shape[:-1]), there.shape[-1]).t() if part == "data_t" else clear
            _near_code(f"{label}.{part}", found, wanted, specified(values, f"{name}.{part}", clear), exact)
        else:
            _near_scale(f"{label}.{part}", found, wanted, exact)


def _near_code(label: str, found: Tensor, wanted: list[Tensor], clear: Tensor, exact: bool) -> None:
    def order(t: Tensor) -> Tensor:
        code = t.contiguous().view(torch.uint8).to(torch.int16)
        return torch.where(code < 128, code, 127 - code)

    right = ~clear.expand(found.shape)
    for w in wanted:
        right |= (bits(found) == bits(w)) | (found.float().isnan() & w.float().isnan())
    wrong = int((~right).sum())
    far = int(((order(found) - order(wanted[0])).abs() > 1)[~right].sum())
    allowed = 0 if exact else 1 + right.numel() // 1000
    assert wrong <= allowed and far == 0, f"{label}: {wrong} of {right.numel()} codes differ, {far} by more than a step"


def _near_scale(label: str, found: Tensor, wanted: list[Tensor], exact: bool) -> None:
    if exact:
        return same_bits(label, found, wanted[0])
    found, wanted = found.float(), [w.float() for w in wanted]
    low, high = torch.stack(wanted).amin(0), torch.stack(wanted).amax(0)
    right = ((1 - 2e-7) * low <= found) & (found <= (1 + 2e-7) * high) | (found.isnan() & low.isnan())
    assert bool(right.all()), (
        f"{label}: {int((~right).sum())} of {right.numel()} scales differ, one is {found[~right][0]}"
    )
    return None
