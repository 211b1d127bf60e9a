"""Which code a definition can run: all definitions that it names, and that these name, through all modules that count.

A definition is a function, a class or an assignment of a module. Statements that are none of these run when their module is
imported, and belong to whatever reaches one of its definitions; so does a function under a decorator that may register it, but for
tests, which run by themselves, and fixtures, which run for those that have an argument of that name. A name that cannot be
followed, such as a module that is handed on as a value, stands for all of that module: rather too much than too little. The library
itself, which tests call `tw`, has its public names, and its catalogue all ops; so has what stands above the ops, such as
integrations. Comments and docstrings are no code; nor are the bars of an op: no call goes through these.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

ALL = None  # in the place of a name: every definition of a module
CATALOGUE = "catalogue"  # of the library: every op
# Decorators, by the name that they begin with, which make something of a function and put it nowhere
MAKERS = {
    "cache", "cached_property", "constexpr_function", "contextlib", "dataclass", "fronted", "functools", "gl", "gluon", "kernel",
    "tl", "triton",
}  # fmt: skip


class Place(NamedTuple):
    """A definition in a file, or all of them."""

    path: Path
    name: str | None


class Module:
    """The definitions of a file by name, the statements that run with it, and what names are imported under."""

    def __init__(self, path: Path, bindings: Callable[[ast.AST, Path], Iterator[tuple[str, Place]]]) -> None:
        self.path = path
        self.definitions: dict[str, list[ast.stmt]] = {}
        self.loose: list[ast.stmt] = []
        self.imports: dict[str, set[Place]] = {}
        tree = without_bars(without_words(ast.parse(path.read_text())))
        # Marks may ask for fixtures by these
        words = {part.value for part in ast.walk(tree) if isinstance(part, ast.Constant)}
        for node in tree.body:
            names = list(defined(node))
            for name in names:
                self.definitions.setdefault(name, []).append(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imports.update(gathered(bindings(node, path)))
            elif not names or (registers(node) and not is_asked_for(node, words)):
                self.loose.append(node)
                self.imports.update(gathered(bound for inner in ast.walk(node) for bound in bindings(inner, path)))

    def nodes(self, name: str | None) -> list[ast.stmt]:
        if name is not ALL:
            return self.definitions[name]
        return [node for nodes in self.definitions.values() for node in nodes]


def gathered(bound: Iterable[tuple[str, Place]]) -> dict[str, set[Place]]:
    """What names are bound to, some to several places."""
    found: dict[str, set[Place]] = {}
    for name, place in bound:
        found.setdefault(name, set()).add(place)
    return found


def defined(node: ast.stmt) -> Iterator[str]:
    """The names that a statement defines, none where it does more than that."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        yield node.name
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    parts = [part for target in targets for part in getattr(target, "elts", [target])]
    if all(isinstance(part, ast.Name) for part in parts):
        yield from (part.id for part in parts)


def registers(node: ast.stmt) -> bool:
    """Whether a function or class has a decorator that may put it somewhere."""
    return any(base_of(decorator) not in MAKERS for decorator in getattr(node, "decorator_list", ()))


def is_asked_for(node: ast.stmt, words: Container[Any]) -> bool:
    """Whether a function is a test, or a fixture that runs for tests with an argument of that name: not for all, nor by a word."""
    if node.name.startswith("test_"):
        return True
    return is_fixture(node) and "autouse" not in ast.unparse(node.decorator_list[0]) and node.name not in words


def is_fixture(node: ast.AST) -> bool:
    """Whether the first decorator of a function makes it one of pytest's fixtures."""
    first = next(iter(getattr(node, "decorator_list", ())), None)
    return first is not None and ast.unparse(first).partition("(")[0] in ("fixture", "pytest.fixture")


def declares(node: ast.stmt, op: str) -> bool:
    """Whether a statement is an op's declaration."""
    call = getattr(node, "value", None)
    named = isinstance(call, ast.Call) and base_of(call) == "Op" and call.args
    return bool(named) and isinstance(call.args[0], ast.Constant) and call.args[0].value == op


def base_of(node: ast.AST) -> str | None:
    """The first name of `a.b(c).d`."""
    while not isinstance(node, ast.Name):
        if not isinstance(node, (ast.Attribute, ast.Call)):
            return None
        node = node.value if isinstance(node, ast.Attribute) else node.func
    return node.id


def without_words(tree: ast.Module) -> ast.Module:
    """Code without its docstrings; a tree has no comments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


def without_bars(tree: ast.Module) -> ast.Module:
    """Code without what its ops are held to, and without what that alone names."""
    taken: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and base_of(node) == "Op":
            taken += [keyword for keyword in node.keywords if keyword.arg == "bars"]
            node.keywords = [keyword for keyword in node.keywords if keyword.arg != "bars"]
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and base_of(node.value) == "Bars":
            taken.append(node.value)
            node.value = ast.Constant(None)
    orphans, named = names_in(taken), names_in([tree])
    tree.body = [node for node in tree.body if not (isinstance(node, ast.FunctionDef) and node.name in orphans - named)]
    return tree


def names_in(nodes: Iterable[ast.AST]) -> set[str]:
    return {part.id for node in nodes for part in ast.walk(node) if isinstance(part, ast.Name)}


class Reach:
    """The definitions of a library. `file_of` gives the file of a module by its full name, None if it does not count; `above` says
    of such a one whether it stands above the ops; `aside` says of a file of the library that what else is in the library does not
    lead to it; `public` has the modules of names that the library has itself."""

    def __init__(
        self,
        root: Path,
        file_of: Callable[[str], Path | None],
        above: Callable[[str], bool],
        aside: Callable[[Path], bool],
        public: Mapping[str, Iterable[str]],
        library: str = "tilewright",
    ) -> None:
        self.root, self.file_of, self.above, self.aside = root, file_of, above, aside
        self.public, self.library = public, library
        self.every_op = Place(root / library / "__init__.py", CATALOGUE)
        self.module = functools.cache(lambda path: Module(path, self.bindings))
        self.named = functools.cache(self._named)
        self.text = functools.cache(ast.unparse)

    def bindings(self, node: ast.AST, path: Path) -> Iterator[tuple[str, Place]]:
        """What an import binds of what counts."""
        package = path.relative_to(self.root).with_suffix("").parts[:-1]
        if isinstance(node, ast.Import):
            for alias in node.names:
                for place in self.of_module(alias.name):
                    yield alias.asname or alias.name, place
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join(part for part in (*above, node.module or "") if part)
            for alias in node.names:
                module, within = self.file_of(f"{base}.{alias.name}"), self.file_of(base)
                if module is not None:
                    found = {Place(module, ALL)}
                elif within is not None:
                    found = {Place(within, alias.name)}
                else:
                    found = self.of_library(alias.name) if base == self.library else self.of_module(base)
                for place in found:
                    yield alias.asname or alias.name, place

    def of_module(self, name: str) -> set[Place]:
        """All of a module by its full name; of the library itself and of what stands above the ops, these."""
        found = self.file_of(name)
        if found is not None:
            return {Place(found, ALL)}
        return {self.every_op} if name == self.library or self.above(name) else set()

    def of_library(self, name: str) -> set[Place]:
        """What a name of the library stands for: its catalogue, one that it has itself, or a module."""
        if name == CATALOGUE:
            return {self.every_op}
        if name not in self.public:
            return self.of_module(f"{self.library}.{name}")
        found: set[Place] = set()
        for module in self.public[name]:
            path = self.file_of(f"{self.library}.{module}")
            found |= self.of_module(f"{self.library}.{module}") if path is None else self.op(path, name)
        return found

    def op(self, path: Path, name: str) -> set[Place]:
        """Where a module declares an op, and what it has under that name; all of it where it has neither."""
        definitions = self.module(path).definitions
        found = [own for own, nodes in definitions.items() if own == name or declares(nodes[-1], name)]
        return {Place(path, own) for own in found or [ALL]}

    def _named(self, path: Path, node: ast.AST) -> frozenset[Place]:
        """What counts of what a statement names."""
        module = self.module(path)
        own = {**module.imports, **gathered(bound for inner in ast.walk(node) for bound in self.bindings(inner, path))}
        found: set[Place] = set()
        based = set()  # names of which a part is taken
        for part in ast.walk(node):
            if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
                based.add(part.value)
                found |= self.resolved(module, own, part.value.id, part.attr)
            elif isinstance(part, (ast.Import, ast.ImportFrom)):
                found |= {place for _, place in self.bindings(part, path)}
        for part in ast.walk(node):
            if isinstance(part, ast.Name) and part not in based:
                found |= self.resolved(module, own, part.id, None)
        for argument in node.args.args if is_fixture(node) else ():
            found |= self.resolved(module, own, argument.arg, None)
        outside = self.aside(path) or not path.is_relative_to(self.root / self.library)
        return frozenset(one for one in found if outside or not self.aside(one.path))

    def resolved(
        self, module: Module, imports: Mapping[str, set[Place]], name: str, part: str | None
    ) -> set[Place]:  # fmt: skip
        """What `name`, or `name.part`, is in a module."""
        found: set[Place] = {Place(module.path, name)} if name in module.definitions and name not in imports else set()
        for place in imports.get(name, ()):
            if place.name is ALL and part is not None:
                below = self.file_of(".".join((*self.dotted(place.path), part)))
                found.add(Place(below, ALL) if below is not None else Place(place.path, part))
            elif place == self.every_op and part is not None:
                found |= self.of_library(part)
            else:
                found.add(place)
        return found

    def dotted(self, path: Path) -> tuple[str, ...]:
        parts = path.relative_to(self.root).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    def settled(self, place: Place) -> set[Place]:
        """Where a name is defined that a module has from another; all of a module where it has it from nowhere."""
        seen: set[Place] = set()
        waiting, found = [place], set()
        while waiting:
            one = waiting.pop()
            if one in seen:
                continue
            seen.add(one)
            if one.name is ALL or one == self.every_op or one.name in self.module(one.path).definitions:
                found.add(one)
            else:
                waiting += self.module(one.path).imports.get(one.name, {Place(one.path, ALL)})
        return found

    def entry(self, place: Place, key: str) -> tuple[str, frozenset[Place]] | None:
        """(its text, what it names) of the entry of a table that a key names; None where a definition has no such entry. In tables
        of tables, `a-b` names entry b of table a."""
        if place == self.every_op or place.name is ALL:
            return None
        value = getattr(self.module(place.path).definitions[place.name][-1], "value", None)
        while isinstance(value, ast.Dict):
            for name, inner in zip(value.keys, value.values):
                text = name.value if isinstance(name, ast.Constant) else None
                if isinstance(text, str) and (key == text or key.startswith(f"{text}-")):
                    key, value = key[len(text) + 1 :], inner
                    break
            else:
                return None
            if not isinstance(value, ast.Dict):
                return self.text(value), self.named(place.path, value)
        return None

    def reach(self, first: Iterable[Place], ops: Iterable[Place] = ()) -> dict[Path, set[str | None]]:
        """All that these definitions can run, by file; who asks the catalogue can run `ops`."""
        found: dict[Path, set[str | None]] = {}
        waiting, ops = [*first], [*ops]
        while waiting:
            place = waiting.pop()
            if place == self.every_op:
                waiting += ops
                ops = []
                continue
            own = found.setdefault(place.path, set())
            if place.name in own or ALL in own:
                continue
            module = self.module(place.path)
            nodes = module.nodes(place.name)
            if not own:  # `import a.b` binds a, of which b may be taken anywhere
                nodes = [*nodes, *module.loose]
                waiting += (whole for name, places in module.imports.items() if "." in name for whole in places)
            own.add(place.name)
            waiting += (one for node in nodes for other in self.named(place.path, node) for one in self.settled(other))
        return found

    def digest(self, first: Iterable[Place], ops: Iterable[Place], own: str) -> str:
        """Sixteen hexadecimal digits that stand for a text and all that these definitions can run, whichever files it is in."""
        texts = []
        for path, names in self.reach(first, ops).items():
            module = self.module(path)
            chosen = module.definitions if ALL in names else names
            nodes = {id(node): node for name in chosen for node in module.definitions[name]}
            texts += map(self.text, (nodes | {id(node): node for node in module.loose}).values())
        return hashlib.sha256("\n".join((own, *sorted(texts))).encode()).hexdigest()[:16]
