"""The command line. Every table can be had as JSON; an error is one line."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Annotated

NEEDS = ("typer", "rich", "jinja2", "matplotlib", "numpy")  # what tilewright[cli] brings
missing = [name for name in NEEDS if importlib.util.find_spec(name) is None]
if missing:  # one line, and exit status 1
    raise SystemExit(f'tilewright: the commands need {", ".join(missing)}: pip install "tilewright[cli]"')

import typer  # noqa: E402

from . import __version__  # noqa: E402

HELP = {"help_option_names": ["-h", "--help"]}
app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, help=__doc__, context_settings=HELP
)
COMMANDS = Path(__file__).parent / "commands"
for path in sorted(COMMANDS.glob("*.py")):
    if path.stem not in ("__init__", "console"):  # every other file is a command: the function of its own name
        module = importlib.import_module(f"{__package__}.commands.{path.stem}")
        app.command(path.stem, context_settings=HELP)(getattr(module, path.stem))


def say_version(wanted: bool) -> None:
    if wanted:
        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[bool, typer.Option("--version", callback=say_version, is_eager=True, help="Print it.")] = False,
) -> None:
    pass


def main() -> None:
    app(prog_name="tilewright")


if __name__ == "__main__":
    main()
