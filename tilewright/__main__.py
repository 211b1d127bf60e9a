"""The command line. Every table can be had as JSON; an error is one line."""

from __future__ import annotations

import importlib
from pathlib import Path

import typer

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__)
COMMANDS = Path(__file__).parent / "commands"
for path in sorted(COMMANDS.glob("*.py")):
    if path.stem not in ("__init__", "console"):  # every other file is a command: the function of its own name
        module = importlib.import_module(f"{__package__ or 'tilewright'}.commands.{path.stem}")
        app.command(path.stem)(getattr(module, path.stem))


def main() -> None:
    app(prog_name="tilewright")


if __name__ == "__main__":
    main()
