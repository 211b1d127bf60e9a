"""`python -m tests.survey [TYPE ...]`: compare every type, or these, and write the table of docs/huggingface.md.

Each type has a process of its own, with a limit of time and memory, two at a time. Rows are kept in out/models.jsonl as they come;
a run goes on where the last one stopped. Rows of other code, of the library or of the survey, are made again, unless `--keep` says
that the change does not touch them.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import resource
import sys
import time
import warnings
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.survey import compare, table
from tests.survey.small import types

ROOT = Path(__file__).parents[2]
KEPT = ROOT / "out" / "models.jsonl"
SECONDS, BYTES, PLACES = 240, 16 << 30, 2


def fingerprint() -> str:
    """Of everything that a row depends on."""
    paths = sorted([*(ROOT / "tilewright").rglob("*.py"), *Path(__file__).parent.glob("*.py")])
    made = hashlib.sha256(f"{torch.__version__} {transformers.__version__}".encode())
    for path in paths:
        if path.name not in ("__main__.py", "table.py"):
            made.update(path.read_bytes())
    return made.hexdigest()[:16]


def work(kind: str, out: Connection) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    torch.set_num_threads(1)
    try:
        out.send(compare.row(kind))
    except Exception as error:
        out.send({"type": kind, "model": types()[kind], "state": "raised", "why": compare.words(error)})


def rows(kinds: list[str]) -> Any:
    """Rows as they come. Processes are forked: imports take longer than most types."""
    context, waiting, running = multiprocessing.get_context("fork"), [*reversed(kinds)], {}
    while waiting or running:
        while waiting and len(running) < PLACES:
            kind, (inner, outer) = waiting.pop(), context.Pipe(duplex=False)
            process = context.Process(target=work, args=(kind, outer), daemon=True)
            process.start()
            outer.close()
            running[inner] = kind, process, time.monotonic() + SECONDS
        ready = wait([*running], timeout=1)
        for inner in [i for i in running if i in ready or time.monotonic() > running[i][2]]:
            kind, process, _ = running.pop(inner)
            made = {"type": kind, "model": types()[kind], "state": "raised", "why": f"took more than {SECONDS} s"}
            if inner in ready:
                try:
                    made = inner.recv()
                except EOFError:
                    process.join()
                    made["why"] = f"its process ended with {process.exitcode}"
            process.kill()
            process.join()
            yield made


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.survey", description=__doc__.splitlines()[0])
    parser.add_argument("types", nargs="*", metavar="TYPE", help="types of transformers' models; all, if none is named")
    parser.add_argument("--again", action="store_true", help="compare types that are done, too")
    parser.add_argument("--keep", action="store_true", help="keep rows that were made by other code")
    parser.add_argument(
        "--table", action="store_true", help="compare nothing: write the table of the rows that are kept"
    )
    given = parser.parse_args()
    unknown = sorted({*given.types} - {*types()})
    if unknown:
        parser.error(f"transformers {transformers.__version__} has no such language model: {', '.join(unknown)}")
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    chosen, code = given.types or [*types()], fingerprint()
    KEPT.parent.mkdir(exist_ok=True)
    before = [json.loads(line) for line in KEPT.read_text().splitlines()] if KEPT.exists() else []
    known = {r["type"]: r for r in before if given.keep or given.table or r["code"] == code}
    todo = [] if given.table else [kind for kind in chosen if given.again or kind not in known]
    with KEPT.open("a") as file:
        for at, made in enumerate(rows(todo), 1):
            known[made["type"]] = made | {"code": code}
            print(json.dumps(known[made["type"]]), file=file, flush=True)
            print(f"{at}/{len(todo)} {made['type']}: {made['state']} {made.get('why', '')}", flush=True)
    found = [known[kind] for kind in types() if kind in known]
    if given.table or len(found) == len(types()):
        table.write(ROOT / "docs" / "huggingface.md", found, len(types()))
    bad = [r["type"] for r in found if r["state"] in ("wrong", "raised")]
    print(f"{len(found)} of {len(types())} types; wrong or raised: {', '.join(bad) or 'none'}")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
