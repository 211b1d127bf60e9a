"""Which GPU tests have passed, and over which code: `evidence/tests/nvidia-h200.jsonl`, and what adds the outcomes of a run (the
runner's `gpu_tests.jsonl`) to it: `python3 -m tests.gpu.passed STATE ...`.

The whole net takes longer than a GPU is at hand, so that what has passed over today's code is not run again
(`python3 -m tests.gpu --stale`). Today's code is the text of the test and of all definitions of tests and of the library that it
can reach (`reached.py`). Who asks the catalogue reaches the op that a parameter of the test names, or all. Of a table of calls, a
test of which a parameter names an entry reaches that one. Modules that launch nothing themselves (`core/`, `runtime/` ...) do not
count: other nets are about them, and a GPU sees them at work in every test that does run. Those that choose between implementations
by what was measured (`preference.py`) count for the tests that name them, and for no other. Nor do the bars that an op is held to,
which are numbers of `check/` by another name.

Which machinery a test ran with is kept beside it for all that, a digest of the code that every op shares. It makes nothing stale by
itself. `python3 -m tests.gpu --stale --machinery` also runs what stands for all ops: properties of the machinery, on the ops that
`check/families.py` names, if they passed with another machinery or one that nobody wrote down.

What a Triton compiles another may compile otherwise: a row counts for the release of Triton that its tests ran under, which is
USUAL where it names none.

How long a test took is kept too, whole seconds of those that took SLOW or more, so that the runner begins those first.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import json
import sys
from collections.abc import Container, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .reached import ALL, Place, Reach, without_words

ROOT = Path(__file__).resolve().parents[2]
ROOMS = ("aten", "attention", "device", "formats", "gemm", "nn", "ops")  # where kernels stand, and what launches them
CALLS = ["check", "provided"]  # where calls stand that tests make by name
MACHINERY = ("check", "core", "device", "runtime")  # what all ops share, and what is asked of them
CHOOSING = "preference"  # what such a module is called, in any room
BELOW = ("bench", "commands", "data", "names", "op", "toolchain")  # and what no call goes through
BY_EVIDENCE = "over this code, by the evidence"  # why a test that was left out counts as passed
KEPT = Path("evidence/tests/nvidia-h200.jsonl")
SLOW = 3  # seconds from which on they are kept
FAST = 0.5  # what the others take, on average and rounded up
USUAL = "3.6"  # the release of Triton that most tests ran under
PLACE = ("file", "test", "op", "triton", "source", "machinery")  # what a row is found by

Row = dict[str, Any]


def function_of(test: str) -> str:
    """The name of the function that a test is a case of."""
    return test.partition("::")[2].partition("[")[0]


def case_of(test: str) -> str:
    """What the test is called among the cases of its function; nothing where it is the only one."""
    return test.partition("::")[2].partition("[")[2].removesuffix("]")


def op_among(ops: Container[str], test: str) -> str | None:
    """The op that a parameter of a test names."""
    return next((word for word in reversed(case_of(test).split("-")) if word in ops), None)


def chooses(path: Path) -> bool:
    """Whether a module is one that chooses between implementations."""
    return path.stem == CHOOSING


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
        public = {
            name: [table[name] for table in tables.values() if name in table]
            for table in tables.values()
            for name in table
        }
        self.reach = Reach(root, self.file_of, self.above, chooses, public)
        self.text = functools.cache(Path.read_text)
        self.digest = functools.cache(self._digest)

    def op_of(self, test: str) -> str | None:
        return op_among(self.modules, test)

    def source(self, test: str) -> str:
        """Sixteen hexadecimal digits that stand for the code of a test."""
        file = self.root / test.partition("::")[0]
        (place,) = self.reach.settled(Place(file, function_of(test)))
        entries = [self.reach.entry(one, case_of(test)) for one in self.named(place)]
        return self.digest(file, place, self.op_of(test), case_of(test) if any(entries) else None)

    def _digest(self, file: Path, place: Place, op: str | None, entry: str | None) -> str:
        """Of a test that a file has, maybe from another one, with the entry alone of the tables that it names, if there is one."""
        ops = self.reach.op(self.file_of(f"tilewright.{self.modules[op]}"), op) if op else self.everything
        beside = self.reach.module(file).loose  # fixtures that no test names, and what runs by itself
        texts = [self.reach.text(node) for node in (*self.nodes(place), *beside)]
        first = {one for node in beside for other in self.reach.named(file, node) for one in self.reach.settled(other)}
        for one in self.named(place):
            found = None if entry is None else self.reach.entry(one, entry)
            texts += [found[0]] if found else []
            first |= {way for other in found[1] for way in self.reach.settled(other)} if found else {one}
        return self.reach.digest(first, ops, "\n".join(texts))

    def nodes(self, place: Place) -> list[ast.stmt]:
        return self.reach.module(place.path).nodes(place.name)

    def named(self, place: Place) -> set[Place]:
        """What a test names, fixtures among them."""
        module, found = self.reach.module(place.path), set()
        for node in self.nodes(place):
            found |= self.reach.named(place.path, node)
            for argument in getattr(getattr(node, "args", None), "args", ()):
                found |= self.reach.resolved(module, module.imports, argument.arg, None)
        return {one for other in found for one in self.reach.settled(other)}

    @functools.cached_property
    def everything(self) -> frozenset[Place]:
        files = (path for room in ROOMS for path in (self.library / room).rglob("*.py"))
        return frozenset(Place(path, ALL) for path in files if not chooses(path))

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
        """The file of a module by its full name, or None if it is none of tests or examples, nor of the rooms or of calls."""
        parts = module.split(".")
        if parts[0] == "tilewright" and parts[1:2] not in [[room] for room in ROOMS] and parts[1:3] != CALLS:
            return None
        path = self.root.joinpath(*parts)
        return next((p for p in (path.with_suffix(".py"), path / "__init__.py") if p.is_file()), None)

    def above(self, module: str) -> bool:
        """Whether a module stands above the ops, so that it may call any."""
        parts = module.split(".")
        return parts[0] == "tilewright" and len(parts) > 1 and parts[1] not in (*ROOMS, *MACHINERY, *BELOW)


def read(path: Path) -> list[Row]:
    """The rows of the file: a test's file, function and op or None, the code's digest, that of the machinery or None, the release
    of Triton if it is not USUAL, which cases passed over and under these, and the seconds of those that took SLOW or more. Where
    `seconds` is absent nobody timed them."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines() if line]


def passed(tests: Iterable[str], code: Code, kept: Sequence[Row], triton: str = USUAL) -> set[str]:
    """Which of the tests have passed over today's code, under a release of Triton."""
    return {test for test, _ in _passed(tests, code, kept, triton)}


def passed_otherwise(
    tests: Iterable[str], code: Code, kept: Sequence[Row], words: Iterable[str], triton: str = USUAL
) -> set[str]:
    """Of these tests those with other machinery, if their parameters are one of these `words`."""
    found = {*words}
    return {
        test for test, over in _passed(tests, code, kept, triton) if over != code.machinery and case_of(test) in found
    }


def _passed(tests: Iterable[str], code: Code, kept: Sequence[Row], triton: str) -> Iterator[tuple[str, str | None]]:
    """The tests that have passed over today's code under a Triton, each with the machinery of that time."""
    known: dict[tuple, dict[str, str | None]] = {}
    for row in kept:
        known.setdefault(key_of(row), {}).update(dict.fromkeys(row["passed"], row.get("machinery")))
    for test in tests:
        own = known.get(key(test, code, triton), {})
        if case_of(test) in own:
            yield test, own[case_of(test)]


def took(kept: Sequence[Row]) -> dict[str, float]:
    """The seconds of each test that is known to take some, whatever the code: it seldom changes them much."""
    found: dict[str, float] = {}
    for row in kept:
        for case in row["passed"] if "seconds" in row else ():
            test = f"{row['file']}::{row['test']}" + (f"[{case}]" if case else "")
            found[test] = max(found.get(test, FAST), row["seconds"].get(case, FAST))
    return found


def triton_of(row: Row) -> str:
    """The release of Triton that a row is about."""
    return row.get("triton", USUAL)


def naming(triton: str) -> Row:
    """The field by which a row names a release of Triton."""
    return {} if triton == USUAL else {"triton": triton}


def key_of(row: Row) -> tuple:
    return row["file"], row["test"], row["op"], triton_of(row), row["source"]


def key(test: str, code: Code, triton: str) -> tuple:
    return test.partition("::")[0], function_of(test), code.op_of(test), triton, code.source(test)


def add(outcomes: Sequence[Row], code: Code, kept: Sequence[Row], gpu: str) -> list[Row]:
    """The rows with the outcomes of a run over this code: what failed is taken out, what passed is put in, and a case that has run
    is taken out of the rows of other code under the same Triton. What was left out by the evidence stays as it is there."""
    rows = {
        (*key_of(row), row.get("machinery")): {
            case: row["seconds"].get(case, 0) if "seconds" in row else None for case in row["passed"]
        }
        for row in kept
    }  # the seconds of each case, 0 if it is fast, None if nobody wrote them down
    for outcome in outcomes:
        mine, case = key(outcome["id"], code, triton_of(outcome)), case_of(outcome["id"])
        for other in rows:
            if other[:4] == mine[:4] and other[:5] != mine:
                rows[other].pop(case, None)
        same = [rows[other] for other in rows if other[:5] == mine]
        if outcome.get("why") == BY_EVIDENCE and any(case in own for own in same):
            continue
        for own in same:
            own.pop(case, None)
        if outcome["outcome"] == "passed":
            rows.setdefault((*mine, code.machinery), {})[case] = outcome.get("seconds")
    ordered = sorted(rows.items(), key=lambda item: tuple(map(str, item[0])))
    found = [((at := dict(zip(PLACE, place))).pop("triton"), at, own) for place, own in ordered if own]
    return [{**at, "gpu": gpu, **naming(triton), "passed": sorted(own), **slow(own)} for triton, at, own in found]


def slow(own: dict[str, float | None]) -> Row:
    """The field of the seconds of a row, where those of some case are known; another case counts as fast then."""
    if all(seconds is None for seconds in own.values()):
        return {}
    return {"seconds": {case: round(own[case]) for case in sorted(own) if (own[case] or 0) >= SLOW}}


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
