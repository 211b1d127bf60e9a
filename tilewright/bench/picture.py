"""The README's picture: a training step of each model, by each of the ways it was measured, in time and memory.

The file holds the numbers that it was drawn from. `tilewright docs` draws it anew when these change, and not because another
version of matplotlib would put a line elsewhere.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from .results import Key, key_of, understand

PICTURE = Path("docs/results.svg")
TITLES = {  # what a model is called in the picture
    "hf_llama_train/8x2048": "Llama, 1.2 billion parameters, 16384 tokens",
    "hf_qwen3_moe_train/4x2048": "Qwen3-MoE, 8 layers of 64 experts, 8192 tokens",
}
OURS, THEIRS, GREY = "#2a78c2", "#a9b4c0", "#808a94"  # GREY is read on white and on black
MARK = re.compile(r"drawn from (\[.*\])")


def numbers(
    rows: Iterable[Mapping[str, Any]], stale: Collection[Key], variants: Mapping[str, str]
) -> list[dict[str, Any]]:
    """What is drawn: for each model and GPU the milliseconds and gigabytes of every variant that ran."""
    found = []
    for row in rows:
        if row["case"] in TITLES:
            steps = [(name, row["steps"].get(variant, {})) for variant, name in variants.items()]
            bars = [
                [name, round(step["us"] / 1e3, 1), round(step["bytes"] / 1e9, 1)]
                for name, step in steps
                if "us" in step
            ]
            mark = " (stale)" if key_of(row) in stale else ""
            triton = understand(row, {}, ()).label.removeprefix(row["case"])
            found.append({"title": TITLES[row["case"]] + triton, "gpu": row["gpu"] + mark, "bars": bars})
    return sorted(found, key=lambda one: (one["gpu"], one["title"]))


def current(there: str, wanted: Sequence[Mapping[str, Any]]) -> str:
    """The picture that is `there` if it was drawn from these numbers, else a new one."""
    found = MARK.search(there)
    return there if found and found[1] == _text(wanted) else draw(wanted)


def _text(wanted: Sequence[Mapping[str, Any]]) -> str:
    return json.dumps(list(wanted), ensure_ascii=True)


def draw(wanted: Sequence[Mapping[str, Any]]) -> str:
    """The picture as SVG, on no ground of its own."""
    import matplotlib
    from matplotlib.figure import Figure

    style = {"svg.hashsalt": "tilewright", "svg.fonttype": "none", "font.family": "sans-serif", "text.color": GREY}
    with matplotlib.rc_context(style):
        figure = Figure(figsize=(8.6, 0.42 * sum(len(one["bars"]) + 2 for one in wanted)), layout="constrained")
        plots = figure.subplots(len(wanted), 1, squeeze=False)[:, 0] if wanted else []
        for axes, one in zip(plots, wanted):
            names, times, _ = zip(*one["bars"])
            ours = [name.startswith("tilewright") for name in names]
            axes.barh(range(len(names)), times, color=[OURS if own else THEIRS for own in ours], height=0.72)
            for at, (_, ms, gb) in enumerate(one["bars"]):
                beside = {"xytext": (6, 0), "textcoords": "offset points", "va": "center"}
                axes.annotate(f"{ms:.0f} ms, {gb:.1f} GB", (ms, at), color=GREY, fontsize=10, **beside)
            axes.set_yticks(range(len(names)), names, color=GREY, fontsize=10)
            axes.set_title(f"{one['title']}, {one['gpu']}", loc="left", fontsize=11, color=GREY)
            axes.set(xticks=[], xlim=(0, 1.2 * max(times)))
            axes.invert_yaxis()
            axes.spines[:].set_visible(False)
            axes.tick_params(length=0)
        file = io.StringIO()
        about = {"Date": None, "Creator": None, "Description": f"drawn from {_text(wanted)}"}
        figure.savefig(file, format="svg", transparent=True, metadata=about)
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"
