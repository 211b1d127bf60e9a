"""The generated pages: docs/ops/, docs/coverage.md, docs/rates.md, the results in docs/results.md and, some of them, README.md;
what was tried in docs/aten.md; the picture of results; the table of names; the stub of the package; the tables by which
`backend="auto"` chooses.

Each is a pure function of the catalogue, the coverage lists and the evidence; `tilewright docs` writes them, and a test
fails when one is out of date.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from torch import Tensor

from ..check import coverage
from ..check.families import of_module
from ..core.argument import Parameter, kind_name
from ..core.rule import Range, Row
from ..core.target import TARGETS, Target
from ..core.triton_versions import age
from ..op import Op
from .cases import CASES, GOALS, Case, Goal, rival_of, variants_of
from .markdown import COMMAND, GENERATED, code, listed, table, wrapped
from .result_rows import row_words
from .results import Goals, Key, Result, Standing, key_of, standings, tally, understand
from .tallies import tallies

ROOT = Path(__file__).parents[2]
OPS, COVERAGE, RATES, README = Path("docs/ops"), Path("docs/coverage.md"), Path("docs/rates.md"), Path("README.md")
INDEX, RESULTS, NAMES = OPS / "index.md", Path("docs/results.md"), Path("tilewright/names.py")
TABLES = Path("tilewright/data")
BEGIN, END = "<!-- results -->", "<!-- /results -->"
MODELS_BEGIN, MODELS_END = "<!-- models -->", "<!-- /models -->"
# Of a training step, by their names in evidence: what the columns are called, and which are ours
VARIANTS = {
    "plain": "transformers", "compile": "torch.compile", "liger": "liger-kernel", "bf16": "tilewright, bf16",
    "fp8": "tilewright, FP8",
}  # fmt: skip
OURS = ("bf16", "fp8")
# What is said of goals that have no value, by their verdicts
UNMEASURED = {
    "Goals that wait for a newer Triton": lambda verdict: verdict.startswith("waits"),
    "Goals whose rival was absent": lambda verdict: verdict == "rival absent",
    "Goals without a measurement": lambda verdict: verdict in ("not measured", "no case yet"),
}
# The goals that the README shows, and what it calls them
SHOWN = {
    "rms_norm_fwd": "`rms_norm`", "silu_bwd": "`glu`, backward", "cross_entropy_fwd": "`cross_entropy`",
    "fused_linear_ce": "`linear_cross_entropy`", "moe_layer_fp8": "`moe_feed_forward` in FP8",
}  # fmt: skip


# ---- docs/ops -----------------------------------------------------------------------------------------------------


def ops_pages(ops: Mapping[str, Op], results: Sequence[Result], targets: Iterable[Target]) -> dict[Path, str]:
    """A page for each family, and the index: one entry an op, those of a file together under its formula."""
    families: dict[str, list[Op]] = {}
    for _, op in sorted(ops.items()):
        families.setdefault(of_module(op.reference.__module__), []).append(op)
    pages = {OPS / f"{family}.md": _family(family, members, results) for family, members in sorted(families.items())}
    return {INDEX: _index(ops, families, list(targets)), **pages}


def _index(ops: Mapping[str, Op], families: Mapping[str, list[Op]], targets: Sequence[Target]) -> str:
    ran, compiled = ([t.arch for t in targets if t.ran is flag] for flag in (True, False))
    parts = [(family, op) for family, members in sorted(families.items()) for op in members if op.internal]
    lines = [
        "# Operations", "", GENERATED, "",
        f"{len(ops) - len(parts)} operations, each `tilewright.<name>` and `torch.ops.tilewright.<name>`. On CPU tensors each is",
        "its PyTorch reference; on a GPU the first of its implementations that takes the arguments. The row of a tensor reads",
        "`dtype[dimensions]`: `...` is any leading dimensions, equal names are equal sizes, what ends in `?` broadcasts, `float`",
        "is bfloat16, float16 or float32 (float64 on a CPU), an argument's name stands for its dtype, `wide(x)` is float32, or",
        "float64 where `x` is.", "",
        "Every operation takes `out=`, memory for its results: a tensor or, for several results, a tuple that has None where the",
        "call allocates. With `out_format`, memory for the first result is a `Quantized` of that format. The tables of results say",
        "which memory must be contiguous, and on which arguments it may lie. Numbers, determinism, `out=`, layouts of formats:",
        "[contracts.md](../contracts.md).", "",
        f"Chips: run on {listed(ran)}; compiled, never run, on {listed(compiled)}.", "",
    ]  # fmt: skip
    for family, members in sorted(families.items()):
        lines += [f"## [{family}]({family}.md)", "", _package_words(members[0]), ""]
        rows = [_index_line(family, op) for op in members if not op.internal]
        lines += [*table(("operation", "what it does"), rows), ""] if rows else []
    if parts:
        lines += ["## Parts of others", "", "These are internal: other functions of the library call them.", ""]
        lines += [*table(("operation", "what it does"), (_index_line(*part) for part in parts)), ""]
    return "\n".join(lines).rstrip() + "\n"


def _index_line(family: str, op: Op) -> tuple[str, str]:
    return f"[{op.name}]({family}.md#{op.name})", _first_sentence(op)


def _package_words(op: Op) -> str:
    """What the folder of a family says it is."""
    return inspect.cleandoc(sys.modules[op.reference.__module__.rpartition(".")[0]].__doc__ or "").splitlines()[0]


def _first_sentence(op: Op) -> str:
    words = " ".join(inspect.cleandoc(op.__doc__).partition("\n\n")[0].split())
    return words if len(words) < 160 else words.partition(". ")[0].rstrip(".") + "."


def _family(family: str, members: Sequence[Op], results: Sequence[Result]) -> str:
    files: dict[str, list[Op]] = {}
    for op in members:
        files.setdefault(op.reference.__module__, []).append(op)
    lines = [f"# Operations: {family}", "", GENERATED, "", "How to read this page: [the index](index.md).", ""]
    for module, declared in sorted(files.items()):
        lines += [f"## `{module.replace('.', '/')}.py`", "", "```text", *_formula(module), "```", ""]
        for op in declared:
            lines += [*_entry(op, [r for r in results if r.op == op.name]), ""]
    return "\n".join(lines).rstrip() + "\n"


def _formula(module: str) -> list[str]:
    return inspect.cleandoc(sys.modules[module].__doc__ or "").splitlines()


def _entry(op: Op, results: Sequence[Result]) -> list[str]:
    lines = [
        f"### {op.name}",
        "",
        "```python",
        *_signature(op),
        "```",
        "",
        *inspect.cleandoc(op.__doc__).splitlines(),
        "",
    ]
    lines += table(("argument", "takes", "default", "gradient"), (_argument(op, p) for p in op.signature.parameters))
    heads = ("result", "is", "gradient", "memory for it", "may lie on")
    lines += ["", *table(heads, (_result(op, name) for name in op.result_rows)), ""] if op.result_rows else [""]
    formats = op.formats()
    lines += ["- A part of other operations."] if op.internal else []
    lines += [f"- Writes: {listed(op.writes)}."] if op.writes else []
    lines += [f"- Formats: {listed(formats)}." if formats else "- Formats: none, plain tensors only."]
    lines += [f"- Implementations: {listed(dict.fromkeys([*(one.name for one in op.implementations), 'reference']))}."]
    if not results:
        return [*lines, "- Measured: no row yet."]
    return [*lines, "- Measured:", "", *_measured(results)]


def _signature(op: Op) -> list[str]:
    def words(p: inspect.Parameter) -> str:
        kind = p.annotation if isinstance(p.annotation, str) else inspect.formatannotation(p.annotation)
        return f"{p.name}: {kind}" + ("" if p.default is p.empty else f" = {p.default!r}")

    signature = inspect.signature(op.function)  # with `out`, without what the backward keeps
    parts = [words(p) for p in signature.parameters.values()]
    if op.signature.positional < len(parts):
        parts.insert(op.signature.positional, "*")
    result = signature.return_annotation
    result = result if isinstance(result, str) else inspect.formatannotation(result)
    return [f"{op.name}(", *(f"    {part}," for part in parts), f") -> {result}"]


def _argument(op: Op, p: Parameter) -> tuple[str, str, str, str]:
    if isinstance(p.rule, Row):
        takes = ("list of " if p.rule.many else "") + code(p.rule.words)
    elif p.choices is not None:
        takes = " or ".join(code(repr(one)) for one in p.choices)
    else:
        takes = code(kind_name(p.kind)) + (f" {p.rule.words}" if isinstance(p.rule, Range) else "")
    if p.optional:
        takes += " or `None`"
    default = "" if p.default is inspect.Parameter.empty else code(repr(p.default))
    has = "yes" if p.name in op.differentiable else ("no" if p.kind in (Tensor, list) else "")
    return code(p.name), takes, default, has


def _result(op: Op, name: str) -> tuple[str, ...]:
    graded = bool(op.differentiable) and op.results.index(name) in op.graded_results
    over = [p.name for p in op.signature.parameters if p.kind is list] if op.signature.listed else ()
    lies_on = op.out.lies_on.get(name, ()) or over[:1]  # a list may be written over the list that it is like
    memory = "contiguous" if name in op.out.contiguous else "of any strides"
    if name == op.results[0] and op.signature.defaults.get("out_format") is inspect.Parameter.empty:
        memory = "as the format has it"  # which is always given
    return code(name), row_words(op, name), "yes" if graded else "no", memory, listed(lies_on)


def _measured(results: Sequence[Result]) -> list[str]:
    rows = (
        (code(r.label), r.gpu, _us(r.us), _us(r.floor), _ratio(r), _goal(r), _rivals(r), _error(r.error))
        for r in sorted(results, key=lambda r: (r.gpu, r.case, age(r.triton)))
    )
    return table(("case", "GPU", "µs", "streaming µs", "reached", "goal", "rivals, µs", "error"), rows)


def _us(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _error(value: float | None) -> str:
    return "" if value is None else f"{value:.2e}"


def _ratio(r: Result) -> str:
    """What the goal is about, and what is wrong with it."""
    value = r.fraction if r.measured is None else r.measured
    return _marked("" if value is None else f"{value:.3f}", r)


def _marked(text: str, r: Result) -> str:
    marks = [mark for mark, is_so in (("short", r.verdict == "short"), ("stale", r.stale)) if is_so]
    return f"{text} ({', '.join(marks)})" if marks else text


def _goal(r: Result) -> str:
    if r.goal is None:
        return ""
    return f"{r.goal:.2f}" + ("" if r.metric == "fraction" else f" {r.metric}")


def _rivals(r: Result) -> str:
    return ", ".join(
        [*(f"{rival.name} {rival.us:.1f}" for rival in r.rivals), *(f"{name} absent" for name in r.absent)]
    )


# ---- docs/coverage.md ------------------------------------------------------------------------------------------------


def coverage_page(lists: Mapping[str, Sequence[coverage.Row]]) -> str:
    """The lists: how much of each is there, what provides it, what is missing."""
    lines = ["# Coverage", "", GENERATED, ""]
    lines += [
        "Lists of operations that the library is held to. The call behind every row that is there is run by the tests and"
    ]
    lines += [
        "held against torch's own operator or the formula in float64; `tilewright coverage --json` has the same rows.",
        "",
    ]
    lines += [f"- *{name}*: {words}" for name, words in coverage.STATUSES.items()] + [""]
    heads = ("list", "holds", *coverage.STATUSES)
    totals = (
        (f"[{n}](#{n})", coverage.LISTS.get(n, ""), *map(str, coverage.counts(rows).values()))
        for n, rows in lists.items()
    )
    lines += [*table(heads, totals), ""]
    for name, rows in lists.items():
        there = [row for row in rows if row["status"] != "missing"]
        lines += [f"## {name}", ""]
        if there:
            cells = ((code(row["name"]), row["status"], _calls(row["provided_by"]), row["note"]) for row in there)
            lines += [*table(("name", "status", "provided by", "note"), cells), ""]
        gone = [row for row in rows if row["status"] == "missing"]
        if gone:
            lines += [f"Missing, {len(gone)} of {len(rows)}:", ""]
            lines += [*_missing(gone), ""]
    return "\n".join(lines).rstrip() + "\n"


def _calls(text: str) -> str:
    return "; ".join(code(call) for call in text.split("; "))


def _missing(rows: Sequence[coverage.Row]) -> Iterator[str]:
    yield from (f"- {code(row['name'])}: {row['note']}" for row in rows if row["note"])
    bare = [row["name"] for row in rows if not row["note"]]
    if bare:
        yield from wrapped(f"- {listed(bare)}", "  ")


# ---- docs/results.md and README.md -----------------------------------------------------------------------------------


def shown_section(results: Sequence[Result], goals: Iterable[Goal], cases: Collection[Case]) -> str:
    """What stands between the README's markers: the rows of SHOWN, for each GPU, and how many goals are short."""
    goals, lines = list(goals), [BEGIN]
    for gpu in sorted({r.gpu for r in results}):
        measured = standings([r for r in results if r.gpu == gpu], goals, cases)
        rows = [_shown(one) for name in SHOWN for one in measured if one.goal.case == name and one.value is not None]
        lines += table((f"on one {gpu}", "shape", "µs", "of memory's speed", "others' time over ours"), rows)
        lines += ["", *wrapped(tally(measured))]
    return "\n".join([*lines, END])


def _shown(one: Standing) -> tuple[str, ...]:
    r = one.own[0]
    share = "" if r.fraction is None else f"{100 * r.fraction:.0f} %"
    others = ", ".join(f"{rival.name} {rival.ratio:.2f}" for rival in r.rivals)
    return SHOWN[one.goal.case], one.goal.shape, f"{r.us:.0f}" + " (stale)" * r.stale, share, others


def results_section(
    results: Sequence[Result],
    goals: Iterable[Goal],
    cases: Iterable[Case],
    notes: Mapping[str, str | None] | None = None,
) -> str:
    """What stands between the markers: a line for each goal that was measured, at the goal's own shape, for each GPU, and what
    there is to note of that GPU."""
    goals, cases = list(goals), list(cases)
    lines, recorded = [BEGIN], set()
    verdicts = {one.goal.case: one.verdict for one in standings([], goals, cases)}
    for gpu in sorted({r.gpu for r in results}):
        here = [r for r in results if r.gpu == gpu]
        made = sorted({(f"torch {r.torch}", f"Triton {r.triton}") for r in here})
        days = sorted({r.date[:10] for r in here if r.date})
        versions = "; ".join(", ".join(pair) for pair in made)
        when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "no date"
        lines += [f"**{gpu}**, {versions}, {when}.", ""]
        found = standings(here, goals, cases)
        verdicts |= {one.goal.case: one.verdict for one in found}
        measured = [one for one in found if one.value is not None]
        heads = ("op", "case", "shape", "µs", "streaming µs", "reached", "goal", "rivals, µs", "other shapes")
        lines += table(heads, map(_goal_line, measured))
        stale = sum(r.stale for r in here)
        lines += ["", *wrapped(f"{tally(measured)} {stale} of {len(here)} rows are stale.")]
        lines += [line for one in tallies(here, cases) for line in wrapped(str(one))]
        lines += [line for note in ((notes or {}).get(gpu) or "").splitlines() for line in wrapped(note)]
        recorded |= {one.goal.case for one in measured}
    for words, verdict in UNMEASURED.items():
        without = [goal.case for goal in goals if goal.case not in recorded and verdict(verdicts[goal.case])]
        lines += wrapped(f"{words}: {listed(without)}.") if without else []
    return "\n".join([*lines, END])


def _goal_line(one: Standing) -> tuple[str, ...]:
    """A goal that was measured; one for the geometric mean over several shapes has these beside it instead of a time, and before
    the shapes that are not in the mean."""
    marks = [mark for mark, so in (("short", one.verdict == "short"), ("stale", any(r.stale for r in one.own))) if so]
    reached = f"{one.value:.3f}" + (f" ({', '.join(marks)})" if marks else "")
    wanted = f"{one.goal.goal:.2f}" + ("" if one.goal.metric == "fraction" else f" {one.goal.metric}")
    alone = one.own[0] if len(one.own) == 1 else None
    times = ("", "", "") if alone is None else (_us(alone.us), _us(alone.floor), _rivals(alone))
    parts = _shapes((r, _of_mean(r, one.goal)) for r in one.own) if alone is None else ""
    others = _shapes((r, _ratio(r)) for r in one.others)
    beside = f"{parts}; not in the mean: {others}" if parts and others else parts or others
    return code(one.own[0].op), one.goal.case, one.goal.shape, *times[:2], reached, wanted, times[2], beside


def _shapes(pairs: Iterable[tuple[Result, str]]) -> str:
    return ", ".join(f"{r.case.partition('/')[2]}: {words}" for r, words in pairs)


def _of_mean(r: Result, goal: Goal) -> str:
    """What a mean has of one of its rows: by the goal's metric, though the row may be held to nothing by itself."""
    value = r.by(goal.metric)
    if value is None:
        return f"{rival_of(goal.metric)} absent"
    return _marked(f"{value:.3f}", r)


def models_section(
    rows: Iterable[Mapping[str, Any]],
    stale: Collection[Key],
    cases: Iterable[Case],
    variants: Mapping[str, str],
) -> str:
    """Step time and peak memory of whole models, a line for each and each GPU, a column for each of `variants`."""
    rows, cases = list(rows), [case for case in cases if case.direction == "train"]
    made, notes = [], []
    for case in cases:
        here = [row for row in rows if row["case"] == case.name]
        made += [(_labelled(row), row["gpu"], *(_step(row, case, v, stale) for v in variants)) for row in here]
        made += [] if here else [(case.name, "", *["not recorded yet"] * len(variants))]
        for row in here:
            said = {v: step.get("failed") or step.get("note") for v, step in row["steps"].items()}
            notes += [f"- {code(case.name)}, {variants.get(v, v)}: {words}" for v, words in said.items() if words]
    lines = [MODELS_BEGIN, *table(("model", "GPU", *variants.values()), made)]
    lines += ["", *(line for note in notes for line in wrapped(note, "  "))] if notes else []
    return "\n".join([*lines, MODELS_END])


def _labelled(row: Mapping[str, Any]) -> str:
    return understand(row, {}, ()).label


def _step(row: Mapping[str, Any], case: Case, variant: str, stale: Collection[Key]) -> str:
    step = row["steps"].get(variant)
    if step is None:
        return "not recorded yet" if variant in variants_of(case) else "not asked for"
    if "failed" in step:
        return "none"
    mark = " (stale)" if key_of(row) in stale and variant in OURS else ""
    return f"{step['us'] / 1e3:.1f} ms, {step['bytes'] / 1e9:.1f} GB{mark}"


def with_results(page: str, section: str, name: Path = README, begin: str = BEGIN, end: str = END) -> str:
    """`page` with the part between the markers replaced."""
    if page.count(begin) != 1 or page.count(end) != 1 or page.index(begin) > page.index(end):
        raise ValueError(f"{name} must hold {begin} and {end}, once each and in this order")
    return page[: page.index(begin)] + section + page[page.index(end) + len(end) :]


# ---- tilewright/names.py ---------------------------------------------------------------------------------------------


def names_table(text: str, ops: Mapping[str, Op]) -> str:
    """The table of names with the part of the ops made anew: which module declares each."""
    begin = "OPS = {\n"
    if text.count(begin) != 1:
        raise ValueError(f"{NAMES} must hold {begin.strip()!r} once")
    package = __name__.partition(".")[0] + "."
    rows = (f'    "{name}": "{op.reference.__module__.removeprefix(package)}",\n' for name, op in sorted(ops.items()))
    return text[: text.index(begin)] + begin + "".join(rows) + "}\n"


# ---- all of them -----------------------------------------------------------------------------------------------------


def understood(rows: Iterable[Mapping[str, Any]], goals: Goals, stale: Collection[Key]) -> list[Result]:
    return [understand(row, goals, stale) for row in rows]


def generate(root: Path = ROOT) -> dict[Path, str]:
    """Path below `root` -> what should stand there."""
    from .. import catalogue
    from . import choices, evidence, picture, preference, rates, stubs, tried

    rows = evidence.everything(root / "evidence")
    stale = evidence.stale_keys(rows)
    goals = {name: (case.metric, case.goal) for name, case in CASES.items() if case.goal is not None}
    results = understood(rows, goals, stale)
    both = list(preference.measured(rows))
    attended = list(preference.attention_measured(rows))
    notes = {}
    for gpu in {r["gpu"] for r in rows}:
        said = (
            preference.auto_line(one for one in both if one.row["gpu"] == gpu),
            preference.attention_line(one for one in attended if one.row["gpu"] == gpu),
        )
        notes[gpu] = "\n".join(filter(None, said))
    section = results_section(results, GOALS.values(), CASES.values(), notes)
    models = models_section(rows, stale, CASES.values(), VARIANTS)
    page = with_results((root / RESULTS).read_text(), section, RESULTS)
    drawn = (root / picture.PICTURE).read_text() if (root / picture.PICTURE).exists() else ""
    return {
        **{TABLES / name: text for name, text in (preference.tables(rows) | choices.tables(rows, stale)).items()},
        **ops_pages(catalogue(), results, TARGETS.values()),
        NAMES: names_table((root / NAMES).read_text(), catalogue()),
        COVERAGE: coverage_page(coverage.everything()),
        RATES: rates.page(rows),
        tried.PAGE: with_results(
            (root / tried.PAGE).read_text(), tried.section(tried.read(root)), tried.PAGE, tried.BEGIN, tried.END
        ),
        stubs.STUB: stubs.stub(catalogue()),
        RESULTS: with_results(page, models, RESULTS, MODELS_BEGIN, MODELS_END),
        picture.PICTURE: picture.current(drawn, picture.numbers(rows, stale, VARIANTS)),
        README: with_results((root / README).read_text(), shown_section(results, GOALS.values(), CASES.values())),
    }


def check(root: Path = ROOT) -> list[str]:
    """A line for each page that is out of date: which, where it first differs, and the command that mends it."""
    wrong = []
    for path, text in generate(root).items():
        there = (root / path).read_text() if (root / path).exists() else ""
        if there != text:
            pairs = enumerate(zip_longest(there.splitlines(), text.splitlines()), 1)
            first = next((number for number, (old, new) in pairs if old != new), "its last")
            wrong.append(f"{path} is out of date from line {first} on: run `{COMMAND}`")
    return wrong


def write(root: Path = ROOT) -> list[Path]:
    """Bring the pages up to date; gives those that changed."""
    from . import choices, preference

    pages = generate(root)
    changed = _put(root, {path: text for path, text in pages.items() if path.parent == TABLES})
    if changed:  # pages say what is chosen by these
        preference.forget()
        choices.forget()
        pages = generate(root)
    return changed + _put(root, pages)


def _put(root: Path, pages: Mapping[Path, str]) -> list[Path]:
    changed = []
    for path, text in pages.items():
        if not (root / path).exists() or (root / path).read_text() != text:
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
            changed.append(path)
    return changed
