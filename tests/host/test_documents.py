"""The written pages: the generated ones are up to date, and the code and commands in the others run."""

from __future__ import annotations

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import typer

import tilewright as tw
from tests import seconds
from tilewright.__main__ import app
from tilewright.bench import documents, picture, preference, tried
from tilewright.bench.cases import CASES, GOALS, Case, Goal
from tilewright.check import coverage
from tilewright.check.oracle import BARS
from tilewright.core.target import TARGETS
from tilewright.runtime import config

ROOT = Path(__file__).resolve().parents[2]
GOAL = Goal("toy_fwd", "toy", "8x16 bf16", "fraction", 0.9)
TOYS = {
    name: Case(name, "toy_fwd", "toys", "toy", "forward", {}, goal=0.9, own=own)
    for name, own in (("toy_fwd/4x4", False), ("toy_fwd/8x16", True))
}
ROW = {
    "op": "toy", "case": "toy_fwd/8x16", "us": 10.0, "floor_us": 9.5, "fraction": 0.95, "rivals": {"eager": 20.0},
    "error": 0.0016, "gpu": "Chip A", "torch": "2.11", "triton": "3.6.0", "date": "2026-01-02T03:04:05+00:00",
}  # fmt: skip


def results(*rows: dict, stale: bool = False) -> list:
    goals = dict.fromkeys(TOYS, ("fraction", 0.9))
    return documents.understood(rows, goals, {("Chip A", "toy_fwd/8x16", "3.6")} if stale else set())


def section(*rows: dict, stale: bool = False) -> str:
    return documents.results_section(results(*rows, stale=stale), [GOAL], TOYS.values())


def test_every_generated_page_is_up_to_date(tmp_path, monkeypatch):
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))  # rows tuned on this machine are not the project's
    config.table.cache_clear()
    assert not documents.check()


def test_what_is_out_of_date_is_named_and_mended(tmp_path):
    (tmp_path / "docs").mkdir()
    readme = (ROOT / "README.md").read_text()
    models = f"{documents.MODELS_BEGIN}\n{documents.MODELS_END}"
    page = f"before\n{documents.BEGIN}\nold\n{documents.END}\n"
    (tmp_path / "README.md").write_text(f"{page}after\n")
    (tmp_path / "docs/results.md").write_text(f"{page}{models}\nafter\n")
    (tmp_path / "docs/aten.md").write_text(f"before\n{tried.BEGIN}\nold\n{tried.END}\nafter\n")
    names = tmp_path / "tilewright" / "names.py"
    names.parent.mkdir()
    names.write_text((ROOT / "tilewright" / "names.py").read_text().replace('    "glu": "ops.activation.glu",\n', ""))
    wrong = {line.split()[0]: line for line in documents.check(tmp_path)}
    assert {
        "docs/ops/index.md",
        "docs/ops/norm.md",
        "tilewright/names.py",
        "docs/coverage.md",
        "docs/aten.md",
        "docs/rates.md",
        "docs/results.md",
        "docs/results.svg",
        "tilewright/__init__.pyi",
    } < wrong.keys()
    assert all("`tilewright docs`" in line for line in wrong.values()) and "line 3" in wrong["README.md"]
    assert len(documents.write(tmp_path)) == len(wrong) and documents.check(tmp_path) == [] == documents.write(tmp_path)
    assert names.read_text() == (ROOT / "tilewright" / "names.py").read_text()
    for name in ("README.md", "docs/results.md", "docs/aten.md"):
        made = (tmp_path / name).read_text()
        assert made.startswith("before\n") and made.endswith("\nafter\n") and "old" not in made
    assert (ROOT / "README.md").read_text() == readme


def test_the_readme_shows_goals_of_the_results():
    made = documents.shown_section(results(ROW, stale=True), [GOAL], TOYS.values())
    assert "toy" not in made and "0 of 1 measured goals are short" in made
    goal = GOAL._replace(case="rms_norm_fwd")
    case = dataclasses.replace(TOYS["toy_fwd/8x16"], family="rms_norm_fwd")
    [line] = [
        line for line in documents.shown_section(results(ROW, stale=True), [goal], [case]).splitlines() if "rms" in line
    ]
    assert line == "| `rms_norm` | 8x16 bf16 | 10 (stale) | 95 % | eager 2.00 |"
    assert {*documents.SHOWN} <= {*GOALS}


def test_the_picture_is_drawn_anew_when_its_numbers_change():
    step = {"us": 1e5, "bytes": 2e9}
    row = {"case": next(iter(picture.TITLES)), "gpu": "Chip A", "steps": {"plain": step, "bf16": {"failed": "no"}}}
    wanted = picture.numbers([row], set(), documents.VARIANTS)
    assert wanted[0]["bars"] == [["transformers", 100.0, 2.0]]
    there = picture.draw(wanted)
    assert "100 ms, 2.0 GB" in there and picture.current(there + " ", wanted) == there + " "
    for changed in ([{**row, "steps": {"plain": {**step, "us": 2e5}}}], [row]):
        stale = {("Chip A", row["case"], "")} if changed == [row] else set()
        again = picture.current(there, picture.numbers(changed, stale, documents.VARIANTS))
        assert again != there and ("200 ms" in again or "(stale)" in again)
    assert set(picture.TITLES) <= set(CASES)
    both = picture.numbers([{**row, "triton": one} for one in ("3.6.0", "3.9.0")], set(), documents.VARIANTS)
    assert [one["title"].endswith(" (Triton 3.9)") for one in both] == [False, True]


@pytest.mark.parametrize(
    "text", ["no markers", f"{documents.END}{documents.BEGIN}", documents.BEGIN * 2 + documents.END]
)
def test_a_readme_without_its_markers_is_refused(text):
    with pytest.raises(ValueError, match="README.md must hold"):
        documents.with_results(text, "")


def test_results_have_a_line_for_each_goal():
    made = section(ROW, {**ROW, "case": "toy_fwd/4x4", "fraction": 0.5})
    [line] = [line for line in made.splitlines() if "toy_fwd" in line]
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells == [
        "`toy`",
        "toy_fwd",
        "8x16 bf16",
        "10.0",
        "9.5",
        "0.950",
        "0.90",
        "eager 20.0",
        "4x4: 0.500 (short)",
    ]
    assert "Chip A" in made and "torch 2.11, Triton 3.6.0" in made and "2026-01-02" in made


def test_a_mean_shows_its_parts_and_then_the_other_shapes():
    shapes = {"8x16": {"own": True}, "4x16": {"own": True}, "7x33": {"goal": 0.83}, "64x16": {"goal": 0.83}}
    cases = [
        dataclasses.replace(TOYS["toy_fwd/8x16"], **{"name": f"toy_fwd/{n}", "own": False, **said})
        for n, said in shapes.items()
    ]
    wanted = {case.name: ("fraction", case.goal) for case in cases}

    def beside(**fractions: float) -> str:
        rows = [{**ROW, "case": f"toy_fwd/{n.strip('_')}", "fraction": f} for n, f in fractions.items()]
        made = documents.results_section(documents.understood(rows, wanted, set()), [GOAL], cases)
        return next(line for line in made.splitlines() if "toy_fwd" in line).rpartition(" | ")[2].strip(" |")

    parts = {"_8x16": 0.95, "_4x16": 0.9}
    assert beside(**parts) == "8x16: 0.950, 4x16: 0.900"
    everything = beside(**parts, _7x33=0.7, _64x16=0.84)
    assert everything == "8x16: 0.950, 4x16: 0.900; not in the mean: 7x33: 0.700 (short), 64x16: 0.840"


def test_results_hide_nothing():
    assert "0.700 (short)" in section({**ROW, "fraction": 0.7})
    assert "0.950 (stale)" in section(ROW, stale=True) and "1 of 1 rows are stale" in section(ROW, stale=True)
    assert "Goals without a measurement: `toy_fwd`" in section()
    assert "Goals without a measurement: `toy_fwd`" in section({**ROW, "case": "toy_fwd/4x4"})
    two = section(ROW, {**ROW, "gpu": "Chip B"})
    assert two.index("Chip A") < two.index("Chip B") and two.count("toy_fwd") == 2


def test_a_goal_stands_by_the_row_of_its_triton():
    """That of 3.6, or of the newest where there is none; one for a newer Triton by no row of 3.6. All rows are shown."""
    newer = {**ROW, "triton": "3.9.0", "fraction": 0.91}
    for rows in ((ROW, newer), (newer, ROW)):
        [line] = [line for line in section(*rows).splitlines() if "toy_fwd" in line]
        assert " 0.950 " in line and "Triton 3.9.0" in section(*rows)
    assert " 0.910 " in section({**newer, "triton": "3.7.0", "fraction": 0.8}, newer)
    waiting = [dataclasses.replace(case, triton="newest") for case in TOYS.values()]
    made = documents.results_section(results(ROW), [GOAL], waiting)
    assert "Goals that wait for a newer Triton: `toy_fwd`" in made and "without a measurement" not in made
    made = documents.results_section(results(ROW, newer), [GOAL], waiting)
    assert " 0.910 " in made and "wait" not in made
    entry = "\n".join(
        documents.ops_pages({"glu": tw.glu.op}, results({**newer, "op": "glu"}), TARGETS.values()).values()
    )
    assert "| `toy_fwd/8x16 (Triton 3.9)` |" in entry


def test_a_goal_whose_rival_is_absent_is_neither_reached_nor_short():
    goal = GOAL._replace(metric="vs:quack")
    row = {**ROW, "absent": {"quack": "quack: quack is not installed"}}
    made = documents.results_section(results(row), [goal], TOYS.values())
    assert "Goals whose rival was absent: `toy_fwd`" in made and "short" not in made.partition("0 of 0")[0]
    measured = documents.understood([{**row, "op": "glu"}], {"toy_fwd/8x16": ("vs:quack", 1.0)}, set())
    entry = "\n".join(documents.ops_pages({"glu": tw.glu.op}, measured, TARGETS.values()).values())
    assert "eager 20.0, quack absent" in entry and "(short)" not in entry


def test_the_tables_of_choices_are_generated(tmp_path, monkeypatch):
    """A row that no evidence made is noticed and mended, before the pages that say what is chosen."""
    made = documents.generate()
    tables = {path: text for path, text in made.items() if path.parent == documents.TABLES}
    assert {path.name for path in tables} - {"attention_sm_90.jsonl", "aten_sm_90.jsonl"} == {"preference_sm_90.jsonl"}
    for path, text in tables.items():
        assert (ROOT / path).read_text() == text
    path = next(path for path in tables if path.name == "preference_sm_90.jsonl")
    order: list[str] = []
    monkeypatch.setattr(documents, "generate", lambda root: order.append("generate") or {path: "a", Path("page"): "b"})
    monkeypatch.setattr(preference, "forget", lambda: order.append("forget"))
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text("by hand")
    assert str(path) in documents.check(tmp_path)[0]
    order.clear()
    assert documents.write(tmp_path) == [path, Path("page")] and order == ["generate", "forget", "generate"]
    assert (tmp_path / path).read_text() == "a" and documents.write(tmp_path) == []


def test_a_cell_cannot_break_its_table():
    [_, _, line] = documents.table(("a", "b"), [("x | y\nz", "w")])
    assert line == "| x \\| y z | w |"


def test_every_op_has_its_entry():
    pages = documents.ops_pages(tw.catalogue(), results(), TARGETS.values())
    assert pages == documents.ops_pages(tw.catalogue(), results(), TARGETS.values())
    made = "\n".join(pages.values())
    entries = re.findall(r"^### (\w+)$", made, re.MULTILINE)
    assert sorted(entries) == sorted(tw.catalogue())
    for name, op in tw.catalogue().items():
        entry = made.split(f"\n### {name}\n")[1].split("\n### ")[0]
        assert (op.__doc__ or "").split("\n")[0] in entry
        assert all(f"| `{p}` |" in entry for p in op.signature.names), name
        assert all(f"`{one.name}`" in entry for one in op.implementations)


def test_an_entry_says_what_the_declaration_says():
    measured = documents.understood([{**ROW, "op": "glu"}], {}, set())
    entry = "\n".join(documents.ops_pages({"glu": tw.glu.op}, measured, TARGETS.values()).values())
    assert "| `x` | `float[..., width]` |  | yes |" in entry
    assert "| `limit` | `float` > 0 or `None` | `None` |  |" in entry
    assert "| `offsets` | `int[experts]` or `None` | `None` | no |" in entry
    assert (
        "- Formats: `fp8`, `int4`, `int8`, `mx`, `nvfp4`." in entry
        and "- Implementations: `gluon`, `triton`, `reference`." in entry
    )
    assert "y = act(gate) * up * scale" in entry and "| `toy_fwd/8x16` | Chip A | 10.0 | 9.5 | 0.950 |" in entry
    loss = "\n".join(documents.ops_pages({"cross_entropy": tw.cross_entropy.op}, [], TARGETS.values()).values())
    assert ") -> Tensor\n" in loss and "    out: Tensor | None = None,\n" in loss and "no row yet" in loss
    by_default = "`wide(logits)[]` by default; `wide(logits)[...]` with `reduction='none'`"
    assert f"| `loss` | {by_default} | yes | contiguous |  |" in loss


def result_lines(name: str) -> list[str]:
    op = tw.declaration(name)
    page = "\n".join(documents.ops_pages({name: op}, [], TARGETS.values()).values())
    return [line for line in page.splitlines() if line.startswith(tuple(f"| `{n}` |" for n in op.result_rows))]


def test_a_result_reads_as_its_row_says():
    assert "| `rstd` | `wide(x)[...]` | no | contiguous |  |" in result_lines("rms_norm_rstd")
    assert result_lines("glu") == ["| `out` | `x[..., hidden]` | yes | of any strides |  |"]
    assert result_lines("multi_tensor_scale") == [
        "| `out` | list of `tensors[...]` | no | of any strides | `tensors` |"
    ]
    assert result_lines("quantize") == ["| `out` | `x[..., hidden]` | yes | as the format has it |  |"]


@pytest.mark.parametrize(
    "name, words",
    [
        ("scaled_mm", "`bfloat16[tokens, columns]` by default; of the dtype that `out_dtype` names"),
        ("grouped_mm_inner", "`a[experts, rows, columns]` by default; of the dtype that `out_dtype` names, if any"),
        ("multi_tensor_norm", "`float32[]` by default; `float64[]` for float64"),
        (
            "matmul",
            "`a[..., columns]` by default; `int32[..., columns]` for int8; `bfloat16[..., columns]` for float8_e4m3fn;"
            " of the dtype that `out_dtype` names, if any",
        ),
    ],
)
def test_a_row_that_is_a_function_says_what_it_depends_on(name, words):
    [line] = result_lines(name)
    assert line.split(" | ")[1] == words


def test_parts_of_others_stand_apart():
    ops = {name: tw.declaration(name) for name in ("quantize", "dequantize_codes")}
    pages = documents.ops_pages(ops, [], TARGETS.values())
    whole, parts = pages[documents.INDEX].split("## Parts of others")
    assert "\n1 operations" in whole and "[quantize]" in whole and "dequantize_codes" not in whole
    assert "[dequantize_codes](quantise.md#dequantize_codes)" in parts
    assert pages[documents.OPS / "quantise.md"].count("- A part of other operations.") == 1


def test_coverage_has_every_row():
    lists = coverage.everything()
    made = documents.coverage_page(lists)
    text = " ".join(made.split())  # long lists are wrapped
    assert all(
        row["name"] in text and row["provided_by"].split("; ")[0] in text for rows in lists.values() for row in rows
    )


# ---- what is written by hand -----------------------------------------------------------------------------------------


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/inference.md"])
def test_the_code_of_a_page_runs(page, forked):
    done = forked("\n".join(blocks(page, "python")), CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("\n") >= 3


@pytest.mark.parametrize("page", ["README.md", "docs/guide.md", "docs/commands.md", "docs/inference.md"])
def test_the_commands_of_a_page_exist(page):
    known = typer.main.get_command(app).commands
    text = (ROOT / page).read_text()
    inline = re.findall(r"`(tilewright [^`]*)`", text)
    lines = [line for block in blocks(page, "sh") for line in block.splitlines() if line.startswith("tilewright ")]
    assert inline + lines
    for words in map(shlex.split, inline + lines):
        assert words[1] in known, f"{' '.join(words)}: no such command"
        options = {name for parameter in known[words[1]].params for name in parameter.opts}
        assert {word for word in words if word.startswith("--")} <= options, " ".join(words)


def test_every_target_of_make_is_described():
    targets = set(re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)[1].split())
    described = set(re.findall(r"^\| `make (\w+)` \|", (ROOT / "docs/commands.md").read_text(), re.MULTILINE))
    assert described <= targets and targets - described <= {"host", "interpreter", "aten", "compile", "smoke", "clean"}


def test_a_note_stands_with_its_gpu():
    notes = {"Chip A": "as fast as the faster", "Chip B": "not there"}
    made = documents.results_section(results(ROW), [GOAL], TOYS.values(), notes)
    assert "as fast as the faster" in made and "not there" not in made
    assert "None" not in documents.results_section(results(ROW), [GOAL], TOYS.values(), {"Chip A": None})


def test_every_link_leads_somewhere():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        prose = re.sub(r"^```.*?^```$|`[^`\n]*`", "", page.read_text(), flags=re.M | re.S)
        for target in re.findall(r"\]\(([^)\s]+)\)", prose):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert "://" in target or there.exists(), f"{page.relative_to(ROOT)}: {target}"
            if anchor and there.suffix == ".md":
                heads = re.findall(r"^#+ (.*)$", there.read_text(), re.MULTILINE)
                assert anchor in {re.sub(r"[^\w -]", "", head).lower().replace(" ", "-") for head in heads}, target


def test_the_bars_in_contributing_are_those_of_the_code():
    """Each row of the table as the code's numbers would write it."""

    def share(part: float | None) -> str:
        return "any" if part is None else f"{100 * part:g} %" if part else "none"

    rows = re.findall(
        r"^\| ([A-Z]) [^|]*\| (\S+) \| (\S+) \| ([^|]+) \|$", (ROOT / "CONTRIBUTING.md").read_text(), re.M
    )
    assert [row[0] for row in rows] == sorted(BARS)
    for name, low, single, misrounded in rows:
        bar = BARS[name]
        if bar.low:
            assert (float(low), float(single)) == (bar.low, bar.single), f"class {name}"
        else:
            assert low == single == "bitwise", f"class {name}"
        assert misrounded == share(bar.misrounded), f"class {name}"


def test_the_budgets_in_contributing_are_those_of_the_tests():
    text = " ".join((ROOT / "CONTRIBUTING.md").read_text().split())
    said = re.search(
        r"The budgets \(`tests/seconds.py`\): (\d+) on average for an op's own tests .* (\d+) at most for one, (\d+) for all",
        text,
    )
    assert said and (int(said[1]), int(said[2]), int(said[3])) == (seconds.AVERAGE, seconds.OP, seconds.OTHERS)
