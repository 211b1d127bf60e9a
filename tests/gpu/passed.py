"""Which GPU tests have passed, and over which code: `evidence/tests/nvidia-h200.jsonl`, and what adds the outcomes of a run (the
runner's `gpu_tests.jsonl`) to it: `python3 -m tests.gpu.passed STATE ...`.

The whole net takes longer than a GPU is at hand, so that what has passed over today's code is not run again
(`python3 -m tests.gpu --stale`). Today's code is the text of the test, of what its file has beside tests, and of the definitions
that it can reach (`reached.py`): from its op where it is a test of one, from what the file names elsewhere, and all where it names
none or goes over the catalogue. Modules that launch nothing themselves (`core/`, `runtime/` ...) do not count: other nets are about
them, and a GPU sees them at work in every test that does run.

Which machinery a test ran with is kept beside it for all that, a digest of the code that every op shares. It makes nothing stale by
itself. `python3 -m tests.gpu --stale --machinery` also runs what stands for all ops: properties of the machinery, on the ops that
`check/families.py` names, if they passed with another machinery or one that nobody wrote down.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .reached import ALL, Place, Reach, without_words

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("aten", "attention", "device", "formats", "gemm", "nn", "ops")  # where kernels stand, and what launches them
MACHINERY = ("check", "core", "device", "runtime")  # what all ops share, and what is asked of them
BY_EVIDENCE = "over this code, by the evidence"  # why a test that was left out counts as passed
KEPT = Path("evidence/tests/nvidia-h200.jsonl")

Row = dict[str, Any]


def function_of(test: str) -> str:
    """The name of the function that a test is a case of."""
    return test.partition("::")[2].partition("[")[0]


def case_of(test: str) -> str:
    """What the test is called among the cases of its function; nothing where it is the only one."""
    return test.partition("::")[2].partition("[")[2].removesuffix("]")


class Code:
    """The texts of a working tree."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        self.library = root / "tilewright"
        tables = {
            node.targets[0].id: ast.literal_eval(node.value)
            for node in ast.parse((self.library / "names.py").read_text()).body
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict)
        }
        self.modules: dict[str, str] = tables["OPS"]
        self.public: dict[str, str] = tables["NAMES"] | tables["OPS"]
        self.reach = Reach(root, self.file_of, self.public)
        self.text = functools.cache(Path.read_text)
        self.alone = functools.cache(self._alone)
        self.digest = functools.cache(self._digest)

    def op_of(self, test: str) -> str | None:
        """The op that a test of `test_properties.py` is of, by its parameters."""
        found = re.search(r"\[(.*)\]$", test)
        words = found[1].split("-") if found and "test_properties.py" in test else []
        return next((word for word in reversed(words) if word in self.modules), None)

    def source(self, test: str) -> str:
        """Sixteen hexadecimal digits that stand for the code of a test."""
        return self.digest(self.root / test.split("::")[0], function_of(test), self.op_of(test))

    def _digest(self, file: Path, function: str, op: str | None) -> str:
        first = self.reach.op(self.file_of(self.modules[op]), op) if op else self.named(file)
        return self.reach.digest(first, self.alone(file, function))

    def _alone(self, file: Path, function: str) -> str:
        """The text of a file of tests without the tests that are not `function`."""
        lines: list[str | None] = list(self.text(file).splitlines(keepends=True))
        for node in ast.parse(self.text(file)).body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_") and node.name != function:
                first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
                lines[first - 1 : node.end_lineno] = [None] * (node.end_lineno - first + 1)
        return "".join(line for line in lines if line is not None)

    def named(self, file: Path) -> set[Place]:
        """What a file of tests imports and what it calls by public names; everything where that is nothing, or the catalogue."""
        text = self.text(file)
        imports = (self.reach.bindings(node, file) for node in ast.walk(ast.parse(text)))
        found = {place for bound in imports for _, place in bound}
        for name in set(re.findall(r"\btw\.(\w+)", text)):
            found |= self.reach.of_public(name)
        if not found or "catalogue()" in text:
            return {Place(path, ALL) for room in ROOMS for path in (self.library / room).rglob("*.py")}
        return found

    @functools.cached_property
    def machinery(self) -> str:
        """Sixteen hexadecimal digits that stand for the machinery, whatever its comments and docstrings say."""
        made = hashlib.sha256()
        for path in sorted(path for room in MACHINERY for path in (self.library / room).rglob("*.py")):
            made.update(
                f"\n{path.relative_to(self.root)}\n{ast.unparse(without_words(ast.parse(self.text(path))))}".encode()
            )
        return made.hexdigest()[:16]

    def file_of(self, module: str) -> Path | None:
        """The file of a module by its full name, or None if it is in none of the rooms."""
        parts = module.split(".")
        if parts[0] != "tilewright":
            parts = ["tilewright", *parts]
        if len(parts) < 2 or parts[1] not in ROOMS:
            return None
        path = self.root.joinpath(*parts)
        return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)


def read(path: Path) -> list[Row]:
    """The rows of the file: a test's file, function and op or None, the code's digest, that of the machinery or None, and which
    cases of it passed over both."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def passed(tests: Iterable[str], code: Code, kept: Sequence[Row]) -> set[str]:
    """Which of the tests have passed over today's code."""
    return {test for test, _ in _passed(tests, code, kept)}


def passed_otherwise(tests: Iterable[str], code: Code, kept: Sequence[Row], words: Iterable[str]) -> set[str]:
    """Of the tests that have passed over today's code those with other machinery, if their parameters are one of these `words`."""
    found = {*words}
    return {test for test, over in _passed(tests, code, kept) if over != code.machinery and case_of(test) in found}


def _passed(tests: Iterable[str], code: Code, kept: Sequence[Row]) -> Iterator[tuple[str, str | None]]:
    """The tests that have passed over today's code, each with the machinery of that time."""
    known: dict[tuple, dict[str, str | None]] = {}
    for row in kept:
        known.setdefault(key_of(row), {}).update(dict.fromkeys(row["passed"], row.get("machinery")))
    for test in tests:
        own = known.get(key(test, code), {})
        if case_of(test) in own:
            yield test, own[case_of(test)]


def key_of(row: Row) -> tuple:
    return row["file"], row["test"], row["op"], row["source"]


def key(test: str, code: Code) -> tuple:
    return test.partition("::")[0], function_of(test), code.op_of(test), code.source(test)


def add(outcomes: Sequence[Row], code: Code, kept: Sequence[Row], gpu: str) -> list[Row]:
    """The rows with the outcomes of a run over this code: what failed is taken out, what passed is put in, and rows of other code
    are left out where a case of the same test and op has run. What was left out by the evidence stays as it is there."""
    rows = {(*key_of(row), row.get("machinery")): {*row["passed"]} for row in kept}
    for outcome in outcomes:
        mine, case = key(outcome["id"], code), case_of(outcome["id"])
        for other in [other for other in rows if other[:3] == mine[:3] and other[:4] != mine]:
            del rows[other]
        same = [rows[other] for other in rows if other[:4] == mine]
        if outcome.get("why") == BY_EVIDENCE and any(case in own for own in same):
            continue
        for own in same:
            own.discard(case)
        if outcome["outcome"] == "passed":
            rows.setdefault((*mine, code.machinery), set()).add(case)
    ordered = sorted(rows.items(), key=lambda item: tuple(map(str, item[0])))
    return [
        {"file": file, "test": test, "op": op, "source": source, "machinery": over, "gpu": gpu, "passed": sorted(own)}
        for (file, test, op, source, over), own in ordered
        if own
    ]


def write(path: Path, rows: Sequence[Row]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def main(files: Sequence[str], root: Path = ROOT, gpu: str = "NVIDIA H200") -> None:
    code, rows = Code(root), read(root / KEPT)
    for file in files:
        lines = (json.loads(line) for line in Path(file).read_text().splitlines() if line)
        rows = add([row for row in lines if row.get("outcome") in ("passed", "failed")], code, rows, gpu)
    write(root / KEPT, rows)
    print(f"{KEPT}: {sum(len(row['passed']) for row in rows)} tests have passed, over {len(rows)} pieces of code")


if __name__ == "__main__":
    main(sys.argv[1:])
