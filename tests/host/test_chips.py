"""Chips as facts: what is asked of a target, and what becomes of a chip that is not in the table."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

import tilewright as tw
from tilewright.__main__ import app
from tilewright.core.target import TARGETS, Target, nearest, pretend

LIBRARY = Path(tw.__file__).parent


@pytest.mark.parametrize(
    "arch, lower, fp8",
    [
        ("sm_75", "sm_80", False),
        ("sm_87", "sm_86", False),
        ("sm_103", "sm_100", True),
        ("sm_110", "sm_100", True),
        ("sm_121", "sm_120", True),
        ("sm_200", "sm_120", True),
        ("gfx90a", "gfx942", False),
        ("gfx955", "gfx950", True),
        ("gfx1201", "gfx950", True),
    ],
)
def test_an_unknown_chip_takes_the_nearest_lower_one_and_portable_kernels(arch, lower, fp8):
    found = nearest(arch)
    assert (found.arch, found.stands_for, found.fp8, found.ran) == (arch, lower, fp8, False)
    assert not (found.tma or found.wgmma or found.takes_gluon or found.early_launch or found.block_scaled)
    with pretend(found), tw.force("triton"):
        for op in (tw.rms_norm.op, tw.glu.op):
            names = op.signature.names
            x = torch.ones(4, 256, dtype=torch.bfloat16)
            one = op.implementation({**dict.fromkeys(names), **op.signature.defaults, "x": x})
            assert one.name == "triton"


def test_what_a_chip_can_do_follows_from_its_row():
    """Of a chip that is not in the table no more is said than is known; attention's portable kernel wants bf16."""
    facts = {arch: (t.number, t.fp4, t.fused_attention) for arch, t in TARGETS.items()}
    assert facts["sm_80"] == (80, False, True) and facts["sm_90"] == (90, False, True)
    assert facts["sm_100"] == (100, True, True) and facts["sm_120"] == (120, True, True)
    assert facts["gfx942"] == (0x942, False, True) and facts["gfx950"] == (0x950, False, True)
    old, new = nearest("sm_75"), nearest("sm_103")
    assert (old.number, old.fp4, old.fused_attention) == (75, False, False)
    assert (new.number, new.fp4, new.fused_attention) == (103, False, True)


def test_what_is_no_chip_of_ours_is_refused():
    with pytest.raises(RuntimeError, match="sm_\\* and gfx\\*, not for xe2"):
        nearest("xe2")


@pytest.fixture
def gpu(monkeypatch):
    """A GPU of any arch, as torch would tell of it."""

    def become(major: int, minor: int, shared: int) -> None:
        props = SimpleNamespace(
            major=major, minor=minor, multi_processor_count=40, L2_cache_size=4 << 20, name="A chip", warp_size=32,
            shared_memory_per_block_optin=shared,
        )  # fmt: skip
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: props)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A chip")
        Target.of.cache_clear()

    yield become
    Target.of.cache_clear()


def test_sizes_come_from_the_driver(gpu):
    gpu(8, 7, 64 << 10)
    found = Target.of(0)
    assert (found.arch, found.stands_for, found.sms, found.shared_memory) == ("sm_87", "sm_86", 40, 64 << 10)
    gpu(9, 0, 64 << 10)
    found = Target.of(0)
    assert found == replace(TARGETS["sm_90"], sms=40, l2=4 << 20)


def test_doctor_says_so(gpu):
    gpu(12, 1, 99 << 10)
    printed = CliRunner().invoke(app, ["doctor", "--json"])
    assert "sm_121, not known: portable kernels, with the facts of sm_120" in printed.stdout, printed.stdout


def test_nothing_asks_a_chip_for_its_name():
    """What an implementation depends on is a fact of the chip, so that the next chip with it needs no search for its name."""
    found = []
    for room in ("ops", "gemm", "attention", "formats", "nn", "runtime"):
        for path in sorted((LIBRARY / room).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Compare) and any(
                    isinstance(n, ast.Attribute) and n.attr == "arch" for n in (node.left, *node.comparators)
                ):
                    found.append(f"{path.relative_to(LIBRARY)}:{node.lineno}")
                if (
                    isinstance(node, ast.Attribute)
                    and node.attr == "startswith"
                    and ast.unparse(node.value).endswith(".arch")
                ):
                    found.append(f"{path.relative_to(LIBRARY)}:{node.lineno}")
    assert not found, found
