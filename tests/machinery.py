"""Deliberately broken machinery: `python -m tests.machinery [NAME ...]` breaks the library's core, one edit at a time, and says
which property noticed.

A mutant is an edit of one of the core's files, whichever holds the text; the property named must fail for the op named. The
edited library is a copy in a folder of its own, and each is tried in a fork of a process that has imported torch and Triton and
nothing of the library's.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import sys
import tempfile
import traceback
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("core", "runtime")  # where the machinery is
TOY = "toy_norm"  # of tests/subject.py
FAULTS = "tests/host/test_faults.py"


class Broken(NamedTuple):
    """`old`, which one file of the machinery holds once, becomes `new`; `prop` must fail for `op` and say what `says` matches. What
    no op can tell, a function of a file of tests must, `FILE::NAME`, which takes nothing."""

    name: str
    old: str
    new: str
    prop: str
    says: str
    op: str = TOY


MUTANTS = [
    Broken("strides left out of the key", "value.is_contiguous() or value.stride()", "True", "strides", "differ|outside"),
    Broken("numbers left out of the key", "parts += kind, value", "parts += kind, value if kind is frozenset else 0", "unlike",
           "after others.*: y"),
    Broken("dtypes left out of the key", "parts += value.shape, value.dtype, ", "parts += value.shape, ", "unlike",
           "after others.*: y"),
    Broken("formats left out of the key", "parts.append(value.key)", "pass", "unlike", "after others", "rms_norm"),
    Broken("wanted gradients left out of the key", "(*key.parts, *graded) if True in graded else", "", "unlike",
           "no gradient of x"),
    Broken("wanted gradients left out of the backward's key", "*grads, needs, name, *extra", "*grads, name, *extra", "unlike",
           "no gradient of weight"),
    Broken("an argument given twice taken for two", "< len(inputs):", "< 0:", "repeated_argument", "after", "add_rms_norm"),
    Broken("a copy taken for the view that torch calls it", "and same_storage(out, args[0])", "", "modes", "differ|storage offset",
           "smooth_quantize"),
    Broken("a replayed write that does not show", "count_write(known.writes(slots))", "pass", "outs", "version"),
    Broken("a view taken from the start of its memory", "start = base.storage_offset() * base.element_size() + self.offset",
           "start = self.offset", "guarded_memory", "were written|differ"),
    Broken("results let go of with what is temporary", "and slot not in kept", "", "replayed", "no gradient of x|NoneType"),
    Broken("uninitialised memory where zeros were", "lambda: torch.zeros(", "lambda: torch.empty(", "guarded_memory", "filled",
           "embedding"),
    Broken("results one place off behind a quantised one", "*flat[1 + PIECES :]", "*flat[PIECES:]", "paths",
           ": h: ", "add_rms_norm"),
    Broken("out that overlaps itself accepted", "if self_overlapping(piece):", "if False:", "refusals",
           "overlapping itself: accepted", "rms_norm"),
    Broken("out over an argument accepted", "if overlapping(piece, t) and not (", "if False and not (", "refusals",
           "the memory of x: accepted", "layer_norm"),
    Broken("out of another dtype accepted", "if out.dtype != dtype:", "if False:", "refusals",
           "another dtype: (accepted|RuntimeError)", "rms_norm"),
    Broken("results that are not copied to the caller's memory",
           "if not recorder.compile_only:\n                there.copy_(here)",
           "if not recorder.compile_only:\n                pass", "outs", "differ"),
    Broken("an out that replays ignore", "                self._know(tensor, slot)\n                if fill",
           "                self.slots.append(tensor)\n                self._know(tensor, len(self.slots) - 1)\n"
           "                self.allocations.append((self.place(tensor), None))\n                if fill", "outs", "differ"),
    Broken("wrong code that is run", "                    faults.refuse(self.name, compiled)\n", "", f"{FAULTS}::refused_variant",
           "wrong code was taken"),
    Broken("a size that differs accepted", "if size != known:", "if False:", "refusals", "one hidden more: ", "rms_norm"),
]  # fmt: skip


def edited(mutant: Broken, folder: Path) -> None:
    """Copy the library to `folder` with the edit."""
    shutil.copytree(ROOT / "tilewright", folder / "tilewright", ignore=shutil.ignore_patterns("__pycache__"))
    files = [path for name in FOLDERS for path in sorted((folder / "tilewright" / name).rglob("*.py"))]
    holding = [path for path in files if mutant.old in path.read_text()]
    counts = [path.read_text().count(mutant.old) for path in holding]
    if counts != [1]:
        raise ValueError(
            f"{mutant.name}: {mutant.old!r} stands {sum(counts)} times in the machinery: bring it up to date"
        )
    holding[0].write_text(holding[0].read_text().replace(mutant.old, mutant.new))


def attempt(prop: str, op: str) -> None:
    """The property on the op, of the library that is found first."""
    import tilewright as tw
    from tilewright.check import far_apart, properties, registration
    from tilewright.check.cases import Net
    from tilewright.op import OPS

    if "::" in prop:
        file, name = prop.split("::")
        return getattr(far_apart.load(str(ROOT / file), Path(file).stem), name)()
    if op == TOY:
        far_apart.load(str(ROOT / "tests" / "subject.py"), "subject")
    else:
        getattr(tw, op)
    found = {p.__name__: p for p in (*properties.VALUES, *registration.FACES)}
    found[prop](OPS[op], Net(interpreter=True, cases=3))


def in_a_fork(folder: Path, prop: str, op: str) -> str:
    """What went wrong, with the library of `folder`; empty if nothing did."""
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        child = os.fork()
        if child == 0:
            try:
                sys.path.insert(0, str(folder))
                attempt(prop, op)
            except BaseException as error:
                said.writelines(traceback.format_exception_only(error))
                said.flush()
            finally:
                os._exit(0)
        _, status = os.waitpid(child, 0)
        said.seek(0)
        return said.read() or ("" if status == 0 else f"ended with status {status}")


def main(names: list[str]) -> None:
    """A line of JSON for the unbroken library on each property and op, and for each mutant: its name and what was said."""
    for name in ("torch._dynamo.testing", "triton.language"):  # once, before the forks
        importlib.import_module(name)

    chosen = [m for m in MUTANTS if not names or m.name in names]
    for prop, op in sorted({(m.prop, m.op) for m in chosen}):
        print(json.dumps({"prop": prop, "op": op, "said": in_a_fork(ROOT, prop, op)}), flush=True)
    for mutant in chosen:
        with tempfile.TemporaryDirectory() as folder:
            try:
                edited(mutant, Path(folder))
                said = in_a_fork(Path(folder), mutant.prop, mutant.op)
            except ValueError as error:
                said = str(error)
        print(json.dumps({"mutant": mutant.name, "said": said}), flush=True)


if __name__ == "__main__":
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != ROOT]  # the copy comes first
    main(sys.argv[1:])
