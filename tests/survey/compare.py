"""One model: its logits, loss and gradients by its own code, patched, and unpatched again."""

from __future__ import annotations

import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tilewright.integrations.huggingface.patching import patch, unpatch
from tilewright.integrations.huggingface.report import changed

from .small import build, types

BAR = 2e-4  # of the largest value: the rounding of a few layers in fp32, which gradients through random layers enlarge
LEAST = 1e-3  # of the largest gradient of all: below it a gradient is mostly what was left of a sum
IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))
LABELS = IDS.masked_fill(torch.arange(12) < 3, -100)


def tensors(output: Any) -> Iterator[Tensor]:
    """All floating-point tensors of a nested result."""
    if isinstance(output, Tensor):
        if output.is_floating_point():
            yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from tensors(part)
    elif isinstance(output, list | tuple):
        for part in output:
            yield from tensors(part)


def looking(model: nn.Module) -> Callable[[], Any] | None:
    """A call that shows the model an image, if one of the usual ways does."""
    if not hasattr(model, "get_image_features"):
        return None
    draw = torch.Generator().manual_seed(2)
    image, patches = torch.rand(1, 3, 32, 32, generator=draw), torch.rand(16, 3 * 2 * 8 * 8, generator=draw)
    for given in (
        {"pixel_values": image},
        {"pixel_values": image, "image_sizes": torch.tensor([[32, 32]])},
        {"pixel_values": patches, "image_grid_thw": torch.tensor([[1, 4, 4]])},
    ):

        def look(given: dict[str, Tensor] = given) -> Any:
            return model.get_image_features(**given)

        try:
            if [*tensors(look())]:
                return look
        except Exception:  # each model has its own way: that this is not it says nothing
            continue
    return None


def inputs(model: nn.Module) -> dict[str, Tensor]:
    """What a call needs beside the text: most nothing, some an image for each sequence."""
    text, image = {"use_cache": False}, torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(3))
    try:
        model(input_ids=IDS, labels=LABELS, **text)
    except Exception:
        model(input_ids=IDS, labels=LABELS, pixel_values=image, **text)
        return {"pixel_values": image, **text}
    return text


def measured(model: nn.Module, given: dict[str, Tensor], look: Callable[[], Any] | None) -> dict[str, Tensor]:
    """Logits and images in evaluation, loss and gradients in training, dropout and all."""
    found = {}
    with torch.no_grad():
        found["logits"] = model.eval()(input_ids=IDS, **given).logits
        if look is not None:
            found |= {f"image {i}": t for i, t in enumerate(tensors(look()))}
    model.train().zero_grad()
    torch.manual_seed(0)
    loss = model(input_ids=IDS, labels=LABELS, **given).loss
    loss.backward()
    found["loss"] = loss.detach()
    found |= {f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return found


def farthest(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> tuple[str, float]:
    """What differs most, of its largest value."""
    if ours.keys() != theirs.keys():
        return "other gradients: " + ", ".join(sorted(ours.keys() ^ theirs.keys())[:3]), float("inf")
    most = max((t.abs().max().item() for n, t in theirs.items() if n.startswith("gradient")), default=0.0)
    worst = ("", 0.0)
    for name, truth in theirs.items():
        scale = max(truth.abs().max().item(), LEAST * most if name.startswith("gradient") else 0.0, 1e-30)
        error = ((ours[name] - truth).abs().max() / scale).item()
        if error != error:
            return f"{name} is not a number", float("inf")
        worst = max(worst, (name, error), key=lambda found: found[1])
    return worst


def words(error: Exception) -> str:
    """In one line, not too long."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 200, placeholder=" ...")


def row(kind: str) -> dict[str, Any]:
    """What became of one type, in words and numbers that JSON has."""
    made: dict[str, Any] = {"type": kind, "model": types()[kind]}
    try:
        model = build(kind)
        given, look = inputs(model.eval()), looking(model)
        plain = measured(model, given, look)
        if not torch.isfinite(plain["loss"]):
            raise ValueError("its loss is not finite")
    except Exception as error:
        return {**made, "state": "not built", "why": words(error)}
    made["image"] = look is not None or "pixel_values" in given
    steady = all(torch.equal(a, b) for a, b in zip(measured(model, given, look).values(), plain.values()))
    report = patch(model, strict=False)
    replaced, skipped = defaultdict(Counter), defaultdict(Counter)
    for role, _, op in report.replaced:
        replaced[role][op] += 1
    for role, _, reason in report.skipped:
        skipped[role][reason] += 1
    made |= {"replaced": replaced, "skipped": skipped}
    made["worst"], made["error"] = farthest(measured(model, given, look), plain)
    unpatch(model)
    again = measured(model, given, look)
    left = [n for n, m in model.named_modules() if changed(m)]
    try:
        patch(model).undo()
    except ValueError as error:
        made["refused"] = str(error).splitlines()[0].partition(": ")[2]
    if left or (steady and not all(torch.equal(again[n], plain[n]) for n in plain)):
        return {**made, "state": "wrong", "why": f"not what it was after unpatch: {left}"}
    return {**made, "state": "right" if made["error"] < BAR else "wrong"}
