"""Tuning files are data: a damaged, foreign or hostile one changes nothing but a warning."""

from __future__ import annotations

import json
import os
import random
import warnings
from types import SimpleNamespace

import pytest

from tilewright.core.target import TARGETS
from tilewright.runtime import config
from tilewright.runtime.kernel import Arguments

ARCH = "sm_90"
DEFAULT = {"ROWS": 1, "num_warps": 4}
CANDIDATES = [DEFAULT, {"ROWS": 2, "num_warps": 8}, {"ROWS": 4, "num_warps": 8}]
KERNEL = SimpleNamespace(name="toy", tune_by=("N",), default=lambda a: DEFAULT, candidates=lambda a: CANDIDATES)
GOOD = {"kernel": "toy", "key": {"N": 4096}, "config": CANDIDATES[1]}
KEYS = [*({"N": value} for value in (-1, 1 << 63, 4096.0, True, float("nan"), None, [4096])), [4096], "N"]
CONFIGS = [*({"ROWS": value, "num_warps": 8} for value in (2.0, [2], {"$ref": "x"}, None)), [1, 2], "ROWS"]


@pytest.fixture
def file(tmp_path, monkeypatch):
    """The user's own file for one chip, in a folder of this test's."""
    monkeypatch.setenv("TILEWRIGHT_CACHE", str(tmp_path))
    folder = tmp_path / "tilewright"
    folder.mkdir(mode=0o700)
    yield folder / f"{ARCH}.jsonl"
    config.table.cache_clear()


def chosen(size: int = 4096) -> dict:
    config.table.cache_clear()
    return dict(config.config_for(KERNEL, Arguments(N=size), TARGETS[ARCH]))


def write(file, *rows) -> None:
    text = "".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows)
    file.write_text(text)
    file.chmod(0o600)


def test_no_file_is_the_default(file):
    assert chosen() == DEFAULT


def test_a_row_is_taken_within_a_factor_of_two(file):
    write(file, GOOD)
    for size, expected in ((4096, 1), (2048, 1), (8192, 1), (2047, 0), (8193, 0), (0, 0), (1, 0)):
        assert chosen(size) == CANDIDATES[expected], size


def test_the_nearest_row_wins(file):
    write(file, GOOD, {**GOOD, "key": {"N": 5000}, "config": CANDIDATES[2]})
    assert chosen(4200) == CANDIDATES[1]
    assert chosen(4900) == CANDIDATES[2]


def test_the_users_row_wins_over_the_shipped_one(file, tmp_path, monkeypatch):
    shipped = tmp_path / "data"
    shipped.mkdir()
    monkeypatch.setattr(config, "SHIPPED", shipped)
    write(shipped / file.name, {**GOOD, "config": CANDIDATES[2]})
    assert chosen() == CANDIDATES[2]
    write(file, GOOD)
    assert chosen() == CANDIDATES[1]


@pytest.mark.parametrize(
    "row",
    [
        {**GOOD, "config": {"ROWS": 1 << 20, "num_warps": 64}},
        {**GOOD, "config": {"ROWS": 2}},
        {**GOOD, "config": {**CANDIDATES[1], "maxnreg": 16}},
        {**GOOD, "config": {}},
        {**GOOD, "key": {}},
        {**GOOD, "key": {"M": 4096}},
        {**GOOD, "key": {"N": 4096, "M": 1}},
        {**GOOD, "kernel": "another"},
    ],
    ids=str,
)
def test_what_is_no_candidate_is_not_chosen(file, row):
    write(file, row)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen() == DEFAULT


@pytest.mark.parametrize(
    "line",
    [
        "", "null", "[]", "{}", "1", '"toy"', "{", "nonsense", "\x00", "[" * 100_000, '{"kernel": ' * 5000,
        '{"kernel": "toy", "kernel": "toy"}', "__import__('os').abort()", "9" * 5000,
        *({**GOOD, "key": key} for key in KEYS), *({**GOOD, "config": config} for config in CONFIGS),
        {**GOOD, "kernel": 7}, {**GOOD, "kernel": None}, {**GOOD, "more": 1},
    ],
    ids=lambda line: str(line)[:40],
)  # fmt: skip
def test_a_damaged_row_is_left_out_and_said_once(file, line):
    write(file, line, GOOD)
    with pytest.warns(UserWarning, match=r"1 damaged row\(s\) ignored") as said:
        assert chosen() == CANDIDATES[1]
    assert len(said) == 1


def test_cut_short_anywhere(file):
    whole = json.dumps(GOOD)
    for length in range(len(whole)):
        write(file, whole, whole[:length])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert chosen() == CANDIDATES[1], length


def test_flipped_bits(file):
    source = random.Random(0)
    whole = (json.dumps(GOOD) + "\n").encode() * 3
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(source.randint(1, 8)):
            damaged[source.randrange(len(damaged))] ^= 1 << source.randrange(8)
        file.write_bytes(bytes(damaged))
        file.chmod(0o600)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            assert chosen() in CANDIDATES, bytes(damaged)


def test_not_text(file):
    file.write_bytes(bytes(range(256)) * 10)
    file.chmod(0o600)
    with pytest.warns(UserWarning, match="damaged"):
        assert chosen() == DEFAULT


def test_a_file_that_others_can_write_is_not_believed(file):
    write(file, GOOD)
    file.chmod(0o666)
    with pytest.warns(UserWarning, match="writable by you alone"):
        assert chosen() == DEFAULT


def test_a_pipe_is_not_waited_for(file):
    os.mkfifo(file, 0o600)
    with pytest.warns(UserWarning, match="not a file"):
        assert chosen() == DEFAULT


def test_folders_and_links_in_its_place(file, tmp_path):
    file.mkdir()
    with pytest.warns(UserWarning, match="not a file"):
        assert chosen() == DEFAULT
    file.rmdir()
    file.symlink_to(file)
    assert chosen() == DEFAULT
    file.unlink()
    file.symlink_to(tmp_path / "nowhere")
    assert chosen() == DEFAULT


def test_no_more_is_read_than_the_limit(file, monkeypatch):
    monkeypatch.setattr(config, "LONGEST", 200)
    with file.open("wb") as sparse:
        sparse.write((json.dumps(GOOD) + "\n").encode())
        sparse.truncate(1 << 40)
    file.chmod(0o600)
    with pytest.warns(UserWarning, match="damaged"):
        assert chosen() == CANDIDATES[1]


def test_an_account_without_a_home(monkeypatch):
    for name in ("TILEWRIGHT_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)

    def missing() -> None:
        raise RuntimeError("no home")

    monkeypatch.setattr(config.Path, "home", missing)
    assert chosen() == DEFAULT


def test_choosing_writes_nothing(file):
    chosen()
    assert list(file.parent.iterdir()) == []
