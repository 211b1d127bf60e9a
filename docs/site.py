"""What the site adds to docs/: the root's pages and the examples, under the links by which the other pages know them."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")


def on_config(config):
    """A folder in the navigation stands for its pages."""
    config.nav = [_expanded(entry) for entry in config.nav]
    return config


def _expanded(entry: dict) -> dict:
    ((title, path),) = entry.items()
    if not isinstance(path, str) or not path.endswith("/"):
        return entry
    folder = ROOT / "docs" / path
    pages = sorted(folder.glob("*.md"), key=lambda page: (page.stem != "index", page.stem))
    return {title: [{_name(page): page.relative_to(ROOT / "docs").as_posix()} for page in pages]}


def _name(page: Path) -> str:
    return "all" if page.stem == "index" else page.stem


def on_files(files: Files, config) -> Files:
    examples = [path.relative_to(ROOT).as_posix() for path in sorted((ROOT / "examples").glob("*.*"))]
    for name in (*PAGES, *examples):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page, config, files) -> str:
    """Links out of docs/ lead to the copies above, and links of the root's pages into docs/ to its pages."""
    if page.file.src_uri in PAGES:
        return re.sub(r"\]\(docs/", "](", markdown)
    return re.sub(rf"\]\(((?:\.\./)+)({'|'.join(map(re.escape, PAGES))}|examples/)", _inward, markdown)


def _inward(match: re.Match) -> str:
    return f"]({match[1].removesuffix('../')}{match[2]}"
