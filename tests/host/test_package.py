"""The wheel as somebody installs it: all its files, torch and triton as its only needs, signatures that a type checker sees."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

from tilewright import __main__ as command_line
from tilewright import names

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "tilewright"


def needed(*names: str) -> dict[str, metadata.Distribution]:
    """The distributions of these names and all that they require, extras aside."""
    found: dict[str, metadata.Distribution] = {}
    waiting = list(names)
    while waiting:
        name = waiting.pop().lower().replace("_", "-")
        if name in found:
            continue
        try:
            found[name] = metadata.distribution(name)
        except metadata.PackageNotFoundError:  # for another platform
            continue
        lines = [line for line in found[name].requires or () if "extra ==" not in line]
        waiting += [re.match(r"[\w.-]+", line)[0] for line in lines]
    return found


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    shutil.copytree(PACKAGE, source / "tilewright", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    words = ["wheel", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    subprocess.run([*pip, *words], check=True, timeout=300)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def bare(wheel, tmp_path_factory) -> Path:
    """A folder of packages: the wheel, torch, triton, what these two require, and nothing else."""
    folder = tmp_path_factory.mktemp("bare")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    subprocess.run([*pip, "install", "--no-deps", "--no-index", "--target", str(folder), str(wheel)], check=True)
    for distribution in needed("torch", "triton").values():
        for name in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (folder / name).exists():
                (folder / name).symlink_to(distribution.locate_file(name))
    assert not (folder / "typer").exists() and not (folder / "numpy").exists()
    return folder


def run(bare: Path, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    """Python with the packages of `bare` alone."""
    environment = {"PYTHONPATH": str(bare), "PATH": "", "HOME": str(folder), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-S", *words]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def test_the_wheel_has_every_file(wheel):
    held = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("tilewright/")}
    there = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert held == there and {"tilewright/py.typed", "tilewright/__init__.pyi"} <= held


def test_it_needs_torch_and_triton_alone(bare, tmp_path):
    lines = metadata.Distribution.at(next(bare.glob("tilewright-*"))).requires
    names = {line: re.match(r"\w+", line)[0] for line in lines}
    assert sorted(name for line, name in names.items() if "extra" not in line) == ["torch", "triton"]
    assert [name for line, name in names.items() if 'extra == "cli"' in line] == list(command_line.NEEDS)
    example = re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.MULTILINE | re.DOTALL)[0]
    (tmp_path / "first.py").write_text(example)
    done = run(bare, tmp_path, "first.py")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "torch.float32 torch.bfloat16" in done.stdout


def test_every_public_name_is_there_without_the_extras(bare, tmp_path):
    code = "import tilewright as tw; tw.catalogue(); print(len([getattr(tw, name) for name in dir(tw)]))"
    done = run(bare, tmp_path, "-c", code)
    assert done.returncode == 0, done.stderr[-3000:]


def test_a_command_without_the_extras_says_what_to_install(bare, tmp_path):
    for words in ((), ("list",), ("demo", "--help")):
        done = run(bare, tmp_path, "-m", "tilewright", *words)
        assert done.returncode == 1 and not done.stdout
        assert (
            done.stderr.count("\n") == 1 and 'pip install "tilewright[cli]"' in done.stderr and "typer" in done.stderr
        )


# ---- types -----------------------------------------------------------------------------------------------------------

RIGHT = """
import torch
import tilewright as tw

x = torch.randn(4, 256)
y: torch.Tensor = tw.rms_norm(x, None, 1e-5)
q: tw.Quantized = tw.glu(x, act="gelu_tanh", out_format=tw.fp8("1x128", ways="both"))
plain: torch.Tensor = q.dequantize()
print(q.format.key, q.data_t.shape, q.scale.shape)
normed, total = tw.add_rms_norm(x, residual=x)
y = tw.rms_norm(x, out=torch.empty_like(x))
normed, rstd = tw.rms_norm_rstd(x, out=(None, torch.empty(4)))
q = tw.rms_norm(x, out_format=q.format, out=q)
loss: torch.Tensor = tw.cross_entropy(x, torch.zeros(4, dtype=torch.long), reduction="sum")
layer: torch.nn.Module = tw.nn.Linear(256, 256)
norm: torch.Tensor = tw.clip_grad_norm_(layer.parameters(), 1.0)
product: torch.Tensor = tw.scaled_mm(tw.quantize(x, tw.fp8()), tw.quantize(x, tw.fp8()))
report = tw.patch(layer, strict=True)
print(report.replaced, tw.declaration("glu").name, tw.__version__)
"""
WRONG = {  # a line -> what a type checker says of it
    "tw.rms_norm(x, epsilon=1e-5)": 'Unexpected keyword argument "epsilon"|No overload variant',
    "tw.rms_norm([1.0, 2.0])": "No overload variant",
    'tw.topk_routing(x, k="two")': "arg-type|call-arg",
    'tw.cross_entropy(x, x, reduction="avg")': "Literal",
    "tw.cross_entropy(x)": 'Missing positional argument "labels"',
    "tw.cross_entropy_lse(x, x, out=x)": "arg-type",
    "tw.glu_linaer(x, x, x)": "Module has no attribute",
    "loss: str = tw.cross_entropy(x, x)": "Incompatible types in assignment",
    'tw.clip_grad_norm_("weights", 1.0)': "arg-type",
    "tw.nn.Linear(256, 256, biass=False)": "call-arg",
}


# What no signature of ours names, and what takes over half of a first reading of torch: its compilers and its other packages
UNREAD = """
_dynamo _export _functorch _higher_order_ops _inductor _native _numpy
ao distributed distributions export fx jit onnx package quantization testing
"""


def checked(folder: Path, **programs: str) -> list[str]:
    """What mypy says of a user's programs, a line each."""
    for name, text in programs.items():
        (folder / f"{name}.py").write_text(text)
    unread = ",".join(f"torch.{name}.*" for name in UNREAD.split())
    (folder / "mypy.ini").write_text(f"[mypy]\n[mypy-{unread},matplotlib.*,PIL.*]\nfollow_imports = skip\n")
    cache = ROOT / ".cache" / "mypy"
    words = ["--follow-imports=silent", "--no-error-summary", "--show-error-codes", "--no-color-output", "--cache-dir"]
    environment = {**os.environ, "MYPYPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "mypy", *words, str(cache), *(f"{name}.py" for name in programs)], cwd=folder,
        env=environment, capture_output=True, text=True, timeout=400,
    )  # fmt: skip
    assert not done.stderr, done.stderr
    return [line for line in done.stdout.splitlines() if ": error:" in line]


def test_a_type_checker_sees_every_signature(tmp_path):
    head = "import torch\nimport tilewright as tw\nx = torch.randn(4, 256)\n"
    said = checked(tmp_path, right=RIGHT, wrong=head + "\n".join(WRONG))
    assert [line for line in said if not line.startswith("wrong.py:")] == []
    lines = {int(line.split(":")[1]): line for line in said}
    for number, (line, words) in enumerate(WRONG.items(), head.count("\n") + 1):
        assert re.search(words, lines.get(number, "")), (line, lines.get(number))


def test_the_stub_has_every_name():
    there = ast.parse((PACKAGE / "__init__.pyi").read_text())
    defined = {node.name for node in ast.walk(there) if isinstance(node, ast.FunctionDef)}
    imported = {alias.asname for node in ast.walk(there) if isinstance(node, ast.ImportFrom) for alias in node.names}
    assert {*names.NAMES, "nn"} <= imported and set(names.OPS) <= defined | imported
    own = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assert {node.name for node in own if isinstance(node, ast.FunctionDef) and node.name[0] != "_"} <= defined
