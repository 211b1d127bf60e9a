"""The picture of the demonstration: the loss of every run, and how far each is from the first."""

from __future__ import annotations

from pathlib import Path

from matplotlib.figure import Figure

from .train import EARLY, Apart, Run, smooth

COLOURS = ("#4c566a", "#1f77b4", "#d9822b")


def draw(runs: list[Run], limits: list[Apart], title: str, path: Path) -> None:
    """Write the curves of `runs`, and below them the distance of each from the first beside its limit, to `path`."""
    figure = Figure(figsize=(8, 6), layout="constrained")  # no pyplot: it would look for a screen
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    steps = range(1, len(runs[0].losses) + 1)
    first = smooth(runs[0].losses)
    for at, (run, colour) in enumerate(zip(runs, COLOURS)):
        curve = smooth(run.losses)
        top.plot(steps, run.losses, color=colour, alpha=0.2, linewidth=0.8)
        style = dict(color=colour, linewidth=3.0 if at == 0 else 1.5, linestyle="-" if at == 0 else (0, (4, 2 * at)))
        top.plot(steps, curve, label=f"{run.name}: {curve[-1]:.3f}, {run.step_ms:.1f} ms a step", **style)
        if at:
            apart = [max(abs(a - b), 1e-8) for a, b in zip(curve, first)]  # 0 has no place on a logarithmic axis
            bottom.plot(steps, apart, color=colour, label=f"{run.name}, at most {max(apart):.2g}")
            limit = [limits[at - 1].early if step <= EARLY else limits[at - 1].whole for step in steps]
            bottom.plot(steps, limit, color=colour, linestyle=":", linewidth=1)
    top.set(title=title, ylabel="loss, nats a byte")
    bottom.set(xlabel="step", ylabel=f"distance from\n{runs[0].name}", yscale="log")
    for axes in (top, bottom):
        axes.grid(alpha=0.2)
        axes.legend(frameon=False, fontsize="small")
    bottom.xaxis.get_major_locator().set_params(integer=True)
    figure.savefig(path, dpi=130)
