"""Codes that are not those of the true value are noticed, whatever their format; a last bit of the producer is not."""

from __future__ import annotations

import pytest
import torch

import tilewright as tw
from tilewright.check.codes import near_codes
from tilewright.check.oracle import Outcome

FORMATS = [
    tw.fp8("1x128"), tw.int8("row"), tw.int8("1x128", ways="both"), tw.int4("1x128", zero=True, ways="both"), tw.int4("row"),
    tw.mx("e4m3"), tw.mx("e2m1", ways="both"), tw.nvfp4(), tw.nvfp4(ways="both"),
]  # fmt: skip
every_format = pytest.mark.parametrize("fmt", FORMATS, ids=str)
NOISE = torch.full((8, 1), 1e-9, dtype=torch.float64)


def truth() -> torch.Tensor:
    return torch.randn(8, 256, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def hold(fmt, there: torch.Tensor, stored: dict[str, torch.Tensor], noise: torch.Tensor | None = NOISE) -> None:
    actual = Outcome({f"y.{part}": t for part, t in stored.items()})
    near_codes(tw.catalogue()["rms_norm"], "held", "y", {"out_format": fmt}, actual, there, noise)


def stored_by(fmt, there: torch.Tensor) -> dict[str, torch.Tensor]:
    return dict(zip(fmt.tensor_names, (t.clone() for t in fmt.quantize(there, torch.float32).tensors())))


def moved(codes: torch.Tensor, fmt, at: int, steps: int) -> torch.Tensor:
    """The codes with the magnitude of one of them, or its value if they are integers, so many steps nearer to zero."""
    packed = codes.view(torch.uint8).clone()
    bits, flat = (4 if fmt.name == "int4" or fmt.key.startswith(("mx:e2m1", "nvfp4")) else 8), packed.view(-1)
    shift = bits * (at % (8 // bits))
    place = at // (8 // bits)
    code, top = (int(flat[place]) >> shift) % (1 << bits), 1 << (bits - 1)
    up = fmt.name in ("int8", "int4") and code >= top
    flat[place] += ((steps if up else -steps) % (1 << bits)) * (1 << shift) if (code % top) >= steps or up else 0
    return packed.view(codes.dtype)


@every_format
@pytest.mark.parametrize("noise", [NOISE, None], ids=["near", "exact"])
def test_the_codes_of_the_true_value_are_right(fmt, noise):
    there = truth() if noise is not None else truth().float()
    hold(fmt, there, stored_by(fmt, there), noise)


@every_format
@pytest.mark.parametrize("steps", [1, 2, 3])
def test_codes_that_differ_are_counted(fmt, steps):
    """One by a step may; more of them may not, nor one by more."""
    there = truth()
    stored = stored_by(fmt, there)
    large = there.abs().flatten().argsort(descending=True)
    for count, at in enumerate(large[: 5 if steps == 1 else 1].tolist(), 1):
        stored["data"] = moved(stored["data"], fmt, at, steps)
        if count * steps == 1:
            hold(fmt, there, stored)
    with pytest.raises(AssertionError, match="data: . of 2048 codes differ, " + ("0 by" if steps == 1 else "1 by")):
        hold(fmt, there, stored)
    with pytest.raises(AssertionError, match="data: . of 2048 codes differ"):
        hold(fmt, there.float(), stored, None)


@every_format
def test_scales_and_zero_points_that_differ_are_noticed(fmt):
    for part in fmt.tensor_names:
        if not part.startswith("data"):
            there = truth()
            stored = stored_by(fmt, there)
            scale = stored[part].view(torch.uint8 if fmt.small and not part.startswith("shared") else torch.float32)
            scale[0] += 1 if scale.dtype == torch.uint8 else 2e-6 * scale[0].abs().max()
            with pytest.raises(AssertionError, match=f"{part}: .* scales differ"):
                hold(fmt, there, stored)


def test_a_block_that_is_all_noise_may_be_nothing_and_another_may_not():
    fmt = tw.int8("1x128")
    there = truth()
    there[2, :128] = 1e-40
    found = there.clone()
    found[2, :128] = 0.0
    hold(fmt, there, stored_by(fmt, found))
    found[3, :128] = 0.0
    with pytest.raises(AssertionError, match="scale: 1 of 16 scales differ, one is 1.0"):
        hold(fmt, there, {**stored_by(fmt, found), "data": stored_by(fmt, there)["data"]})


@pytest.mark.parametrize("fmt", [tw.int4("1x128", zero=True), tw.nvfp4()], ids=str)
def test_numbers_of_few_digits_may_fall_to_either_side_of_a_tie(fmt):
    """A zero point follows from two numbers of a block, NVFP4's scale of a block from one of it and one of the whole: values that
    move together leave both where they are, and the last bit of one of them decides."""
    there = truth()
    if fmt.name == "int4":
        block, at = slice(0, 128), 1  # from -6.5 to 8.5 in steps of 1: -8 + 6.5 is no integer
        there[0, block] = there[0, block].clamp(-1.0, 1.0)
        there[0, 0], there[0, at] = 8.5, -6.5
    else:
        there, block, at = there.clamp(-1.0, 1.0), slice(0, 16), 1  # 17 of the whole's 448: between the codes 16 and 18
        there[3, 40], there[0, at] = 448.0, 17.0
    lower, higher = there.clone(), there.clone()
    lower[0, at] *= 1 - 2e-7
    higher[0, at] *= 1 + 2e-7
    stored = [stored_by(fmt, t) for t in (there, lower, higher)]
    part = "zero" if fmt.name == "int4" else "scale"
    firsts = [float(one[part].float().flatten()[0]) for one in stored]
    assert len({*firsts}) == 2  # what is stored for the block depends on that bit
    for one in stored:
        hold(fmt, there, one)
    far = there.clone()
    far[0, at] *= 1.2 if fmt.name == "int4" else 0.8
    with pytest.raises(AssertionError, match="differ"):
        hold(fmt, there, stored_by(fmt, far))
