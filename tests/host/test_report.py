"""The report page: every row and no more than its rows, whatever they hold; and, where there is a browser, in it."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import subprocess
from functools import partial
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from tilewright import bench
from tilewright.__main__ import app
from tilewright.bench import documents, evidence, report
from tilewright.bench.cases import CASES
from tilewright.bench.cases import GOALS as GOALS_STATED
from tilewright.bench.report import comparison, page, roofline
from tilewright.bench.results import key_of, standings, understand

H200 = "NVIDIA H200"
GOALS = {
    "norm/fast": ("fraction", 0.90),
    "norm/slow": ("fraction", 0.90),
    "norm/host": ("vs:torch_add", 0.90),
    "norm/bare": ("vs:liger", 1.10),
    "norm/never": ("fraction", 0.50),
}
HOSTILE = "\"'><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">{{ 7*7 }}\u202e\x00"


def row(case: str, **fields: Any) -> dict[str, Any]:
    usual = {
        "op": "norm", "case": case, "dims": {"tokens": 8192, "hidden": 2048}, "us": 20.0, "floor_us": 19.0,
        "fraction": 0.95, "rivals": {"eager": 100.0, "liger": 30.0}, "error": 1.66e-3, "extra_bytes": 0,
        "host_us": 7.5, "gpu": H200, "torch": "2.11.0", "triton": "3.6.0", "date": "2026-11-15T04:31:03+00:00",
        "source": "abc123", "method": "graph", "bytes": [40_000_000, 40_000_000],
    }  # fmt: skip
    return {**usual, **fields}


ROWS = [
    row("norm/fast"),
    row("norm/slow", us=190.0, floor_us=152.0, fraction=0.80, rivals={"eager": 900.0, "liger": 180.0}),
    row("norm/host", us=10.0, floor_us=None, fraction=None, rivals={"torch_add": 9.5}, method="host", bytes=None),
    row("norm/bare", rivals={}),
    row("norm/free", us=100.0, floor_us=95.0, rivals={"liger": 120.0}),
]
STALE = {(H200, "norm/slow", "3.6")}


class Outline(HTMLParser):
    """The page as a browser would take it apart: tags balanced, the text of every row, what could load or run."""

    VOID = frozenset({"meta", "input", "br", "img", "link", "hr"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: dict[str, list[dict[str, str | None]]] = {}
        self.words = ""
        self.titles: list[str] = []
        self._row = ""
        self.feed(text)
        self.close()
        assert not self.open, self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.tags.append((tag, values))
        if tag not in self.VOID:
            self.open.append(tag)
        if tag == "tr":
            self._row = values.get("id") or ""
            self.rows.setdefault(self._row, [])
        if tag in ("td", "th") and self._row:
            self.rows[self._row].append(values)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open.pop() == tag, tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("style", "script"):
            self.words += data
        if self.open and self.open[-1] == "title":
            self.titles.append(data)


def keys(outline: Outline, column: int) -> dict[str | None, str | None]:
    """case -> what the table sorts this column by."""
    return {cells[0]["data-v"]: cells[column]["data-v"] for name, cells in outline.rows.items() if name}


def section(text: str, heading: str) -> str:
    return text.partition(f"<h3>{heading}: ")[2].partition("</section>")[0]


def test_the_page_has_every_row_and_does_not_depend_on_their_order():
    text = page(ROWS, goals=GOALS, stale=STALE)
    assert text == page(ROWS[::-1], goals=dict(reversed(GOALS.items())), stale=STALE)
    outline = Outline(text)
    assert list(keys(outline, 0)) == sorted(r["case"] for r in ROWS)
    for said in (H200, "torch 2.11.0", "triton 3.6.0", "2026-11-15", "tokens 8192, hidden 2048", "4,000"):
        assert said in outline.words, said


def test_the_table_sorts_by_numbers_and_not_by_their_letters():
    outline = Outline(page(ROWS, goals=GOALS, stale=STALE))
    heads = re.findall(r'<th scope="col"[^>]*>([^<]*)', page(ROWS, goals=GOALS, stale=STALE))
    assert keys(outline, heads.index("Time µs")) == {
        "norm/fast": "20.0", "norm/slow": "190.0", "norm/host": "10.0", "norm/bare": "20.0", "norm/free": "100.0",
    }  # fmt: skip
    assert keys(outline, heads.index("Floor µs"))["norm/host"] == ""
    assert float(keys(outline, heads.index("Goal"))["norm/slow"]) == pytest.approx(-0.10)
    assert float(keys(outline, heads.index("Best rival"))["norm/slow"]) == pytest.approx(180 / 190)


def test_what_falls_short_loses_or_is_stale_is_named():
    text = page(ROWS, goals=GOALS, stale=STALE)
    short, slower, stale = (section(text, h) for h in ("Short of the goal", "Slower than a rival", "Stale"))
    assert (
        short.startswith("1 of 4 rows<")
        and "norm/slow" in short
        and "0.800 of 0.90" in short
        and "norm/fast" not in short
    )
    assert "norm/bare" in short and "vs:liger" in short  # recorded, without the number its goal is about
    assert "norm/never" in short and "1 case with a goal and without a row" in short
    assert slower.startswith("2<") and "×0.947 liger" in slower and "×0.950 torch_add" in slower
    assert stale.startswith("1<") and "norm/slow" in stale
    flags = {values["id"]: values["data-flags"] for tag, values in Outline(text).tags if tag == "tr" and "id" in values}
    assert sorted(flags.values()) == ["", "", "", "lost", "short lost stale"]
    fresh = page(ROWS[:1], goals={}, stale=set())
    assert section(fresh, "Stale").startswith("0<") and "Short of the goal" not in fresh and ">Goal<" not in fresh


def test_the_report_and_the_results_count_the_same_goals():
    rows = evidence.everything(Path(__file__).parents[2] / "evidence")
    goals = {name: (case.metric, case.goal) for name, case in CASES.items() if case.goal is not None}
    judge = partial(standings, goals=GOALS_STATED.values(), cases=CASES.values())
    shown = " ".join(Outline(page(rows, goals=goals, stale=set(), judge=judge)).words.split())
    results = documents.understood(rows, goals, set())
    written = " ".join(documents.results_section(results, GOALS_STATED.values(), CASES.values()).split())
    for gpu in {result.gpu for result in results}:
        here = judge([result for result in results if result.gpu == gpu])
        short = [one.goal.case for one in here if one.verdict == "short"]
        measured = [one.goal.case for one in here if one.value is not None]
        said = f"{len(short)} of {len(measured)} measured goals are short at the shapes that they are stated for"
        assert said in shown and said in written
        assert f"goals reached{len(measured) - len(short)} of {len(measured)}" in shown


def test_no_floor_is_said_to_be_a_rate():
    text = page(ROWS, goals=GOALS, stale=STALE)
    assert "measured rate" not in text and text.count("moves the same bytes") == 1


def test_a_goal_against_a_rival_is_the_ratio_of_the_times():
    results = {r["case"]: understand(r, GOALS, STALE) for r in ROWS}
    assert results["norm/host"].measured == pytest.approx(0.95) and results["norm/host"].verdict == "reached"
    assert results["norm/bare"].verdict == "unmeasured" and results["norm/free"].verdict == ""
    assert results["norm/slow"].verdict == "short" and results["norm/slow"].stale and not results["norm/fast"].stale
    assert results["norm/fast"].rate == pytest.approx(4000.0)  # 80 MB in 20 µs
    assert understand(row("x", fraction=None), {}, set()).fraction == pytest.approx(0.95)


@pytest.mark.parametrize("width", [report.WIDE, report.NARROW])
def test_marks_lie_where_their_numbers_say(width):
    results = [understand(r, GOALS, STALE) for r in ROWS]
    names = ["eager", "liger", "torch_add"]
    plot = roofline(results, names, width)
    ours = {mark.title.partition(":")[0]: mark for mark in plot.marks if "ours" in mark.kind}
    assert set(ours) == {"norm/fast", "norm/slow", "norm/bare", "norm/free"}  # one has no floor
    assert ours["norm/slow"].y > ours["norm/fast"].y > plot.one  # downwards is slower
    assert ours["norm/slow"].x > ours["norm/fast"].x == ours["norm/bare"].x
    assert "short" in ours["norm/slow"].kind and "stale" in ours["norm/slow"].kind
    scale = {float(tick.label): tick.at for tick in plot.y_ticks}
    per_unit = (scale[0.0] - scale[1.0]) / 1.0
    assert ours["norm/fast"].y == pytest.approx(scale[0.0] - 0.95 * per_unit, abs=0.11)
    lanes = comparison(results, names, width)
    lost = [mark for mark in lanes.marks if "lost" in mark.kind]
    assert len(lost) == 2 and all(mark.x < lanes.one for mark in lost)
    assert all(mark.x > lanes.one for mark in lanes.marks if "lost" not in mark.kind)
    for drawn in (plot, lanes):
        inside = [(t.at, drawn.left, drawn.right) for t in drawn.x_ticks]
        inside += [(m.x, drawn.left, drawn.right) for m in drawn.marks]
        inside += [(m.y, drawn.top, drawn.bottom) for m in drawn.marks]
        assert len(drawn.x_ticks) >= 2 and all(low <= at <= high for at, low, high in inside)


def hostile_rows() -> list[dict[str, Any]]:
    text = dict.fromkeys(("op", "case", "gpu", "torch", "triton", "date", "source", "method", "direction"), HOSTILE)
    kept = row(**text, dims={HOSTILE: HOSTILE}, rivals={HOSTILE: 3.0, "plain": 90.0})
    numbers = ("us", "floor_us", "fraction", "error", "extra_bytes", "host_us", "bytes", "rivals", "dims")
    return [kept, *({**kept, name: HOSTILE} for name in numbers), {**kept, "rivals": {HOSTILE: HOSTILE}}]


def test_a_hostile_row_is_text():
    plain, hostile = (page(rows, goals=GOALS, stale=STALE) for rows in (ROWS, hostile_rows()))
    outline = Outline(hostile)
    assert "<script>document.title='owned'</script>" in outline.words and "{{ 7*7 }}" in outline.words
    assert {tag for tag, _ in outline.tags} <= {tag for tag, _ in Outline(plain).tags}
    assert [tag for tag, _ in outline.tags].count("script") == 1
    names = {name for _, values in outline.tags for name in values}
    assert not [name for name in names if name.startswith("on") or name in ("src", "style", "srcset", "action")]
    links = [values["href"] for _, values in outline.tags if "href" in values]
    assert links and all(re.fullmatch(r"#(r\d+|results)", link) for link in links)


def test_nothing_is_fetched_and_no_script_but_its_own_may_run():
    text = page(ROWS, goals=GOALS, stale=STALE)
    assert "://" not in text and "url(" not in text and "@import" not in text
    policy = next(v["content"] for _, v in Outline(text).tags if v.get("http-equiv") == "Content-Security-Policy")
    for tag in ("style", "script"):
        inner = re.search(f"<{tag}>(.*?)</{tag}>", text, re.DOTALL)[1]
        digest = base64.b64encode(hashlib.sha256(inner.encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    assert "default-src 'none'" in policy and "unsafe" not in policy


def test_no_evidence_says_how_to_get_some():
    outline = Outline(page([], goals=GOALS, stale=set()))
    assert "No evidence yet" in outline.words and "tilewright bench --record" in outline.words
    assert not any(tag in ("svg", "table") for tag, _ in outline.tags)


@pytest.mark.parametrize(
    "name", ["floor_us", "fraction", "rivals", "error", "extra_bytes", "host_us", "bytes", "us", "date"]
)
@pytest.mark.parametrize("value", [None, "absent", float("nan"), float("inf"), 10**400, -1.0, 0, True, "7", [], {}])
def test_one_row_with_any_field_missing_or_absurd(name, value):
    one = row("norm/fast", **{name: value})
    if value == "absent":
        del one[name]
    text = page([one], goals=GOALS, stale=STALE)
    outline = Outline(text)
    assert list(keys(outline, 0)) == ["norm/fast"]
    sorted_by = [cell.get("data-v") for cell in outline.rows["r0"][1:-1]]
    assert all(key == "" or re.fullmatch(r"-?\d[\d.e+-]*", key) for key in sorted_by), sorted_by
    drawn = " ".join(v for _, values in outline.tags for k in ("d", "transform", "x", "y") if (v := values.get(k)))
    assert "nan" not in drawn and "inf" not in drawn
    text.encode("utf-8")


def test_extreme_times_still_have_a_place_and_few_ticks():
    rows = [row("a", us=1e-9, floor_us=1e-12, fraction=None), row("b", us=1e9, floor_us=1e12, fraction=None)]
    plot = roofline([understand(r, {}, set()) for r in rows], ["eager", "liger"], report.WIDE)
    assert 2 <= len(plot.x_ticks) <= 12 and len(plot.y_ticks) <= 10
    assert all(plot.left <= mark.x <= plot.right and plot.top <= mark.y <= plot.bottom for mark in plot.marks)


def test_half_a_surrogate_pair_can_be_written():
    half = json.loads('"\\ud800"')
    text = page([row(half, gpu=half)], goals={}, stale={key_of(row(half, gpu=half))})
    text.encode("utf-8")
    assert list(keys(Outline(text), 0)) == ["?"]


def test_an_absent_rival_is_said_to_be_absent():
    """Neither short nor left out: by name in the table, with the reason where the goal's own number is missing."""
    lone = row("norm/bare", rivals={}, absent={"liger": "liger_kernel is not installed"})
    text = page([lone], goals=GOALS, stale=set())
    assert '<small title="liger_kernel is not installed">liger absent</small>' in text and "rival absent" in text
    assert "vs:liger: liger_kernel is not installed" in text and 'class="badge bad"' not in text
    assert "absent" not in page([row("norm/bare")], goals=GOALS, stale=set())


def test_two_chips_have_a_plot_each_and_a_column():
    rows = [*ROWS, *(dict(r, gpu="NVIDIA A100") for r in ROWS)]
    text = page(rows, goals=GOALS, stale=STALE)
    assert text.count('aria-label="Roofline of') == 4 and text.index("NVIDIA A100") < text.index(
        H200
    )  # wide and narrow
    assert '<th scope="col">GPU</th>' in text and '<th scope="col">GPU</th>' not in page(ROWS, goals={}, stale=set())
    assert section(text, "Stale").startswith("0<")  # the other chip's row of the same name is fresh


def test_versions_stand_in_the_rows_where_they_differ():
    mixed = [*ROWS, row("norm/old", torch="2.10.0")]
    assert "<small>torch 2.10.0</small>" in page(mixed, goals={}, stale=set())
    assert "torch 2.10.0, 2.11.0" in page(mixed, goals={}, stale=set())
    assert "<small>torch 2" not in page(ROWS, goals={}, stale=set())


# -------------------------------------------------------------------------------------------------------------- command


@pytest.fixture
def command(monkeypatch, tmp_path):
    """`tilewright report` in a folder of its own, over rows that are given and of which one is stale."""

    def everything(folder: Path) -> list[dict[str, Any]]:
        lines = (folder / "chip.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    evidence = SimpleNamespace(everything=everything, stale_keys=lambda rows: {key_of(row) for row in rows} & STALE)
    monkeypatch.setattr(bench, "evidence", evidence, raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evidence").mkdir()
    (tmp_path / "evidence" / "chip.jsonl").write_text("".join(json.dumps(r) + "\n" for r in ROWS))
    return lambda *words: CliRunner().invoke(app, ["report", *words])


def test_the_command_writes_the_page(command, tmp_path):
    result = command()
    assert result.exit_code == 0 and result.stdout == "report.html: rows 5, GPUs 1, stale 1\n"
    goals = {name: (case.metric, case.goal) for name, case in CASES.items() if case.goal is not None}
    written = (tmp_path / "report.html").read_text(encoding="utf-8")
    judge = partial(standings, goals=GOALS_STATED.values(), cases=CASES.values())
    assert written == page(ROWS, goals=goals, stale=STALE, judge=judge)
    assert "cases with a goal and without a row" in written
    assert command("--out", "other.html", "--evidence", str(tmp_path / "evidence")).exit_code == 0
    assert (tmp_path / "other.html").read_text(encoding="utf-8") == written


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--evidence", "nowhere"), "nowhere"), (("--out", "no/such/folder.html"), "no/such/folder.html")],
)
def test_what_the_command_cannot_do_is_one_line(command, words, said):
    result = command(*words)
    assert result.exit_code == 2 and result.stdout == "" and said in result.stderr and result.stderr.count("\n") == 1


def test_damaged_evidence_is_one_line(command, tmp_path):
    (tmp_path / "evidence" / "chip.jsonl").write_text("{")
    result = command()
    assert result.exit_code == 2 and result.stderr.count("\n") == 1 and not (tmp_path / "report.html").exists()


# ------------------------------------------------------------------------------------------------------------- browser

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage", "--virtual-time-budget=2000",
)  # fmt: skip


@pytest.fixture
def browse(tmp_path):
    if CHROMIUM is None:
        pytest.skip("no chromium or chrome on the PATH (apt-get install chromium)")

    def dom(text: str) -> str:
        path = tmp_path / "page.html"
        path.write_text(text, encoding="utf-8")
        command = [CHROMIUM, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", path.as_uri()]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout

    return dom


def without_policy(text: str, script: str) -> str:
    """A copy for the browser in which a script of the test may run too."""
    cut = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    assert cut != text
    return cut.replace("</body>", f"<script>{script}</script></body>")


def shown(dom: str) -> list[str]:
    """The cases of the rows on the screen, in their order."""
    rows = re.findall(r'<tr id="r\d+"([^>]*)>\s*<th scope="row" data-v="([^"]*)"', dom)
    return [case for attributes, case in rows if "hidden" not in attributes]


def test_the_browser_runs_the_page_and_nothing_else(browse):
    dom = browse(page(hostile_rows(), goals=GOALS, stale=STALE))
    assert "<title>tilewright: measured</title>" in dom
    assert re.search(r'<div class="tools" id="tools">', dom) and '<button type="button">Time µs</button>' in dom
    assert browse(without_policy(page(hostile_rows(), goals={}, stale=set()), "")).count("<title>tilewright") == 1


def test_the_browser_sorts_filters_and_turns_dark(browse):
    text = page(ROWS, goals=GOALS, stale=STALE)
    click = "[...document.querySelectorAll('thead button')].find((b) => b.textContent === 'Floor µs').click();"
    by_floor = shown(browse(without_policy(text, click)))
    assert by_floor[-2:] == ["norm/slow", "norm/host"]  # a missing value is last, upwards and downwards
    down = browse(without_policy(text, click * 2))
    assert shown(down)[0] == "norm/slow" and shown(down)[-1] == "norm/host" and 'aria-sort="descending"' in down
    choose = (
        "const only = document.getElementById('only'); only.value = 'lost'; only.dispatchEvent(new Event('input'));"
    )
    lost = browse(without_policy(text, choose + "document.getElementById('theme').click();"))
    assert shown(lost) == ["norm/host", "norm/slow"] and "2 of 5 rows" in lost
    assert re.search(r'<html[^>]* data-theme="(dark|light)"', lost)
    mark = choose + "document.querySelector('[data-row=r0]').dispatchEvent(new MouseEvent('click', {bubbles: true}));"
    assert len(shown(browse(without_policy(text, mark)))) == 5  # r0 was filtered away, and its mark leads to it
