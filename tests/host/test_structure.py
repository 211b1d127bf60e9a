"""The shape of the code base: which layer imports which, what is not to appear, how long files and functions may be."""

from __future__ import annotations

import ast
import gc
import re
from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "tilewright"
# A layer may import itself and those of a lower rank; `device` holds kernels' functions and knows Triton alone, and the names
# that Triton's versions give its parts.
RANK = {
    "core": 0, "toolchain": 1, "runtime": 2, "op": 3, "formats": 4, "gemm": 5, "attention": 5, "ops": 6, "aten": 7, "nn": 8,
    "integrations": 9, "jax": 9,
}  # fmt: skip
HOLD_KERNELS = ("formats", "ops", "gemm", "attention", "aten", "bench")
# Above all those: they may import any layer, and no other layer imports them.
ABOVE = ("check", "bench", "demo", "commands")
VERSIONS = (PACKAGE, "core", "triton_versions")
NOBODY_IMPORTS = (*ABOVE, "integrations", "jax")
LONG_FILE, LONG_FUNCTION = 500, 80  # lines from which a file or function is listed, for somebody to look at
BANNED_CALLS = {
    "eval", "exec", "__import__", "yaml.load", "torch.load", "np.load", "numpy.load", "os.system", "os.popen",
    "tempfile.mktemp", "torch.jit.load", "torch.package.PackageImporter",
}  # fmt: skip
BANNED_MODULES = {"pickle", "cPickle", "_pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib"}
BANNED_NAMES = {"util", "utils", "common", "helper", "helpers", "misc", "v2", "experimental"}
FIXED_FOLDERS = ("/" + "tmp", "/var/" + "tmp", "/dev/" + "shm")
UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|XX" r"X|HA" r"CK)\b")


def files(*folders: str) -> list[Path]:
    found = [p for folder in folders for p in sorted((ROOT / folder).rglob("*.py")) if "__pycache__" not in p.parts]
    assert found
    return found


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> dict[type[ast.AST], list]:
    """All of a file's nodes by their class, each class's in the order of `ast.walk`: a walk is slow, and many tests need one."""
    found: dict[type[ast.AST], list] = defaultdict(list)
    for node in ast.walk(tree(path)):
        found[type(node)].append(node)
    return found


@pytest.fixture(scope="module", autouse=True)
def trees() -> Iterator[None]:
    """They are millions of objects and no garbage: to look for it among them takes longer than to parse, here and in the tests that
    come after these."""
    gc.disable()
    yield
    tree.cache_clear()
    nodes.cache_clear()
    gc.enable()


LIBRARY = files(PACKAGE)
EVERYTHING = files(PACKAGE, "tests")


def module_of(path: Path) -> tuple[str, ...]:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return parts[:-1] if parts[-1] == "__init__" else parts


def imports(path: Path) -> Iterator[tuple[str, ...]]:
    """Every module that a file imports, absolute, wherever in the file it does so."""
    package = module_of(path) if path.name == "__init__.py" else module_of(path)[:-1]
    for node in nodes(path)[ast.Import]:
        yield from (tuple(alias.name.split(".")) for alias in node.names)
    for node in nodes(path)[ast.ImportFrom]:
        base = package[: len(package) - node.level + 1] if node.level else ()
        base += tuple(node.module.split(".")) if node.module else ()
        yield from ((*base, alias.name) for alias in node.names)


def layer(module: tuple[str, ...]) -> str | None:
    return module[1] if len(module) > 1 and module[0] == PACKAGE else None


def offences(paths: list[Path], find: Callable[[Path], Iterator[str]]) -> None:
    """Fail with everything that `find` says of these files."""
    found = [f"{path.relative_to(ROOT)}{words}" for path in paths for words in find(path)]
    assert not found, f"{len(found)} offences:\n" + "\n".join(found)


def test_imports_go_one_way():
    def find(path: Path) -> Iterator[str]:
        own = layer(module_of(path))
        for module in imports(path):
            other = layer(module)
            if own in (None, "__main__") or other is None or own == other:  # the command line stands above all
                continue
            if own in ABOVE and other in ABOVE:  # the commands may use both, and a benchmark checks before it times
                if ABOVE.index(other) > ABOVE.index(own):
                    yield f" imports {'.'.join(module)}"
                continue
            wrong = other in NOBODY_IMPORTS
            if own == "device":
                wrong = module[:3] != VERSIONS
            elif other == "device":
                wrong = own not in HOLD_KERNELS
            elif own not in ABOVE and other in RANK:
                wrong = wrong or own not in RANK or RANK[other] > RANK[own]
            if wrong:
                yield f" imports {'.'.join(module)}"

    offences(LIBRARY, find)


def graph() -> dict[tuple[str, ...], set[tuple[str, ...]]]:
    """Which modules each module imports, those named for annotations alone included."""
    modules = {module_of(path) for path in LIBRARY}

    def imported(path: Path) -> set[tuple[str, ...]]:
        """`from .a import b` is of module a.b if there is one, else of a."""
        return {next((m for m in (module, module[:-1]) if m in modules), ()) for module in imports(path)}

    return {module_of(path): imported(path) - {(), module_of(path), (PACKAGE,)} for path in LIBRARY}


def circles(arrows: dict[tuple[str, ...], set[tuple[str, ...]]]) -> list[str]:
    """The modules that import one another: what is left after taking away, again and again, modules that import nothing
    that is left, or that nothing left imports."""
    left = {m: set(to) for m, to in arrows.items()}
    while True:
        wanted = set().union(*left.values()) if left else set()
        gone = {m for m, to in left.items() if not to & left.keys() or m not in wanted}
        if not gone:
            return sorted(".".join(m) for m in left)
        left = {m: to - gone for m, to in left.items() if m not in gone}


def test_no_circle_is_imported():
    found = circles(graph())
    assert not found, f"these modules import one another: {found}"


def test_a_circle_would_be_found():
    a, b, c, d = (("a",), ("b",), ("c",), ("d",))
    assert circles({a: {b}, b: {c}, c: set(), d: {a}}) == []
    assert circles({a: {b}, b: {c}, c: {b}, d: {a}}) == ["b", "c"]


def test_device_functions_know_triton_alone():
    def find(path: Path) -> Iterator[str]:
        for module in imports(path):
            ours = module[:2] == (PACKAGE, "device") or module[:3] == VERSIONS
            if module[0] not in ("triton", "typing", "__future__") and not ours:
                yield f" imports {'.'.join(module)}"

    offences(files(f"{PACKAGE}/device"), find)


def test_what_differs_between_tritons_is_in_one_module():
    """It imports nothing of ours, nothing else imports Gluon, and nothing asks for Triton's number but to write it down."""
    versions = ROOT.joinpath(*VERSIONS).with_suffix(".py")
    assert not [m for m in imports(versions) if m[0] == PACKAGE]

    def find(path: Path) -> Iterator[str]:
        if path == versions:
            return
        yield from (f" imports {'.'.join(m)}" for m in imports(path) if m[:3] == ("triton", "experimental", "gluon"))
        for call in nodes(path)[ast.Call]:
            if dotted(call.func).startswith("triton.__version__."):
                yield f":{call.lineno} calls {dotted(call.func)}"

    offences(LIBRARY, find)


def dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def calls(node: ast.AST) -> Iterator[ast.Call]:
    return (n for n in ast.walk(node) if isinstance(n, ast.Call))


def test_nothing_runs_or_loads_foreign_code():
    def find(path: Path) -> Iterator[str]:
        yield from (f" imports {'.'.join(m)}" for m in imports(path) if m[0] in BANNED_MODULES)
        for call in nodes(path)[ast.Call]:
            if dotted(call.func) in BANNED_CALLS:
                yield f":{call.lineno} calls {dotted(call.func)}"
            if any(k.arg == "shell" and getattr(k.value, "value", True) is not False for k in call.keywords):
                yield f":{call.lineno} runs a shell"

    offences(EVERYTHING, find)


def test_no_fixed_temporary_folder():
    def find(path: Path) -> Iterator[str]:
        for node in nodes(path)[ast.Constant]:
            if isinstance(node.value, str) and node.value.startswith(FIXED_FOLDERS):
                yield f":{node.lineno} names {node.value[:60]}"

    offences(EVERYTHING, find)


def test_powers_of_two_come_from_exponent_bits():
    """exp2(ceil(log2(x))) is wrong at a third of the powers of two and their neighbours."""

    def find(path: Path) -> Iterator[str]:
        for call in nodes(path)[ast.Call]:
            if dotted(call.func).rpartition(".")[2] in ("ceil", "floor", "exp2", "round"):
                inner = {dotted(c.func).rpartition(".")[2] for a in call.args for c in calls(a)}
                if inner & {"log2", "log"}:
                    yield f":{call.lineno} rounds a logarithm"

    offences(LIBRARY, find)


# What takes elements from one place to another, and looks at none of them
MOVES = ("tl.store", "tl.interleave", "tl.gather", "to")


def holds_nothing(call: ast.Call) -> bool:
    """Whether this is a load under a mask that says nothing of what is not loaded."""
    given = {k.arg for k in call.keywords}
    return dotted(call.func) == "tl.load" and (len(call.args) == 2 or "mask" in given) and "other" not in given


def only_moved(function: ast.FunctionDef) -> bool:
    """Whether nothing is computed from such loads, and all of it is stored under a mask: a copy needs nothing in their place."""
    assigned = [n for n in ast.walk(function) if isinstance(n, ast.Assign)]
    names: set[str] = set()

    def loaded(node: ast.AST) -> bool:
        if isinstance(node, ast.Attribute) and node.attr == "dtype":
            return False
        if isinstance(node, ast.Call) and holds_nothing(node):
            return True
        return isinstance(node, ast.Name) and node.id in names or any(map(loaded, ast.iter_child_nodes(node)))

    for _ in assigned:  # until what is made of what is loaded is known
        names |= {
            t.id for n in assigned if loaded(n.value) for w in n.targets for t in ast.walk(w) if isinstance(t, ast.Name)
        }
    for node in ast.walk(function):
        if isinstance(node, (ast.BinOp, ast.Compare, ast.UnaryOp, ast.BoolOp, ast.AugAssign, ast.Return)) and loaded(
            node
        ):
            return False
        if isinstance(node, ast.Call) and not holds_nothing(node):
            name = dotted(node.func)
            bare = name == "tl.store" and len(node.args) < 3
            if any(map(loaded, node.args)) and (name not in MOVES or bare):
                return False
            if isinstance(node.func, ast.Attribute) and loaded(node.func.value) and node.func.attr not in MOVES:
                return False
    return True


def test_masked_loads_say_what_they_hold():
    def find(path: Path) -> Iterator[str]:
        bare = [call for call in nodes(path)[ast.Call] if holds_nothing(call)]
        if not bare:
            return
        chosen = {id(c) for w in nodes(path)[ast.Call] if dotted(w.func) == "tl.where" for c in calls(w)}
        functions = [n for n in nodes(path)[ast.FunctionDef] if any(map(holds_nothing, calls(n)))]
        chosen |= {id(c) for function in filter(only_moved, functions) for c in calls(function)}
        yield from (f":{call.lineno} has a mask and no other" for call in bare if id(call) not in chosen)

    offences(LIBRARY, find)


@pytest.mark.parametrize(
    ("body", "fine"),
    [
        ("x = tl.load(X + i, i < N)\n    tl.store(Y + i, x, i < N)", True),
        ("x = tl.load(X + i, i < N)\n    y = tl.interleave(x, x)\n    tl.store(Y + i, y.to(tl.int8), i < N)", True),
        ("x = tl.load(X + i, i < N)\n    tl.store(Y + i, x)", False),
        ("x = tl.load(X + i, i < N)\n    tl.store(Y + i, x + 1, i < N)", False),
        ("x = tl.load(X + i, i < N)\n    y = x\n    tl.store(Y + i, tl.sum(y), i < N)", False),
        ("tl.store(Y + i, tl.load(X + i, i < N), i < N)", True),
        ("return tl.load(X + i, i < N)", False),
    ],
)
def test_what_a_copy_is(body, fine):
    (function,) = ast.parse(f"def f(X, Y, i, N):\n    {body}").body
    assert only_moved(function) is fine


def test_long_files_and_functions_are_listed(capsys):
    """Length is a symptom, not a rule: what is long is printed, and whoever reads it decides whether it is one thing."""
    long = []
    for path in EVERYTHING:
        lines = path.read_text().count("\n")
        if lines > LONG_FILE:
            long.append(f"{path.relative_to(ROOT)} has {lines} lines")
        for node in (*nodes(path)[ast.FunctionDef], *nodes(path)[ast.AsyncFunctionDef]):
            length = node.end_lineno - node.lineno + 1
            if length > LONG_FUNCTION:
                long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines")
    with capsys.disabled():
        print("\n".join(["", *long]))
    assert len(long) < len(EVERYTHING) / 10, "one file of ten is long"


def test_names_say_something():
    def find(path: Path) -> Iterator[str]:
        words = {word for part in path.relative_to(ROOT).with_suffix("").parts for word in part.split("_")}
        yield from (f": {word} says nothing" for word in words & BANNED_NAMES)
        for node in (*nodes(path)[ast.FunctionDef], *nodes(path)[ast.ClassDef]):
            if node.name.lower() in BANNED_NAMES:
                yield f":{node.lineno} {node.name} says nothing"

    offences(EVERYTHING, find)


def test_nothing_is_unfinished():
    def find(path: Path) -> Iterator[str]:
        yield from (f": {found[0]}" for found in UNFINISHED.finditer(path.read_text()))

    offences(EVERYTHING, find)


def test_every_module_says_what_it_is():
    offences(LIBRARY, lambda path: iter(() if ast.get_docstring(tree(path)) else (" has no docstring",)))


def test_op_files_begin_with_the_reference():
    """Whoever has read one op file has read them all."""

    def find(path: Path) -> Iterator[str]:
        body = tree(path).body
        if any(
            isinstance(n, ast.Assign) and isinstance(n.value, ast.Call) and dotted(n.value.func) == "Op" for n in body
        ):
            first = next(n for n in body if isinstance(n, ast.FunctionDef))
            if not first.name.startswith("reference"):
                yield f":{first.lineno} begins with {first.name}"

    offences(files(f"{PACKAGE}/ops"), find)


def test_layers_are_known():
    """A new folder needs a place in the order of imports."""
    folders = {p.relative_to(ROOT / PACKAGE).parts[0] for p in LIBRARY if p.parent != ROOT / PACKAGE}
    assert folders <= {*RANK, *ABOVE, "device", "data"}
