"""The survey's table, between two markers of a page."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

BEGIN, END = "<!-- models: written by make models -->", "<!-- end of models -->"


def counted(found: dict[str, dict[str, int]]) -> str:
    """Roles and what they became, with how often."""
    return "; ".join(
        f"{role}: " + ", ".join(f"{count} {what}" for what, count in parts.items()) for role, parts in found.items()
    )


def line(row: dict[str, Any]) -> str:
    words = [row["type"], row["model"], "", "", row.get("why", row["state"])]
    if "replaced" in row:
        skipped = counted(row["skipped"])
        refused = f"refused under strict: {row['refused']}" if "refused" in row else ""
        words[2:] = [counted(row["replaced"]), skipped, refused]
        if row["state"] != "right":
            words[4] = f"{row['state'].upper()}: {row.get('why') or row['worst']}"
    return "| " + " | ".join(str(w).replace("|", "\\|").replace("\n", " ") for w in words) + " |"


def page(rows: list[dict[str, Any]], types: int) -> str:
    states = Counter(r["state"] for r in rows)
    compared = [r for r in rows if "replaced" in r]
    losses = sum("linear_cross_entropy" in r["replaced"].get("loss", {}) for r in compared)
    strict = sum("refused" not in r for r in compared)
    images = sum(r["image"] for r in compared)
    intro = (
        f"Of {types} types of transformers {transformers.__version__} with torch {torch.__version__.partition('+')[0]}, "
        f"{len(compared)} were built and compared on a CPU: {states['right']} right, {states['wrong']} wrong, "
        f"{states['raised']} raised an error. {strict} patch under `strict`, {losses} have the fused loss, {images} were shown an "
        f"image too; {states['not built']} were not built, for the reason in the last column"
        + (f", and {types - len(rows)} not tried.\n" if len(rows) < types else ".\n")
    )
    head = "| type | model | replaced | skipped, and why | errors |\n|---|---|---|---|---|"
    return "\n".join([BEGIN, intro, head, *map(line, rows), END])


def write(path: Path, rows: list[dict[str, Any]], types: int) -> None:
    text = path.read_text()
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    made = path.with_name(f"{path.name}.new")
    made.write_text(before + page(rows, types) + after)
    os.replace(made, path)
