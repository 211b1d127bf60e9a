"""Which of the library's code a definition can run: all definitions that it names, and that these name, through all modules.

A definition is a function, a class or an assignment of a module. Statements that are none of these run when their module is
imported, and belong to whatever reaches one of its definitions; so does a function under a decorator that may register it. A
name that cannot be followed, such as a module that is handed on as a value, stands for all of that module: rather too much than too
little. Comments and docstrings are no code.
"""

from __future__ import annotations

import ast
import functools
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

ALL = None  # in the place of a name: every definition of a module
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
        self.imports: dict[str, Place] = {}
        for node in ast.parse(path.read_text()).body:
            without_words(node)
            names = list(defined(node))
            for name in names:
                self.definitions.setdefault(name, []).append(node)
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                self.imports.update(bindings(node, path))
            elif not names or registers(node):
                self.loose.append(node)
                self.imports.update(bound for inner in ast.walk(node) for bound in bindings(inner, path))

    def nodes(self, name: str | None) -> list[ast.stmt]:
        if name is not ALL:
            return self.definitions[name]
        return [node for nodes in self.definitions.values() for node in nodes]


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


def without_words(tree: ast.AST) -> ast.AST:
    """Code without its docstrings; a tree has no comments."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return tree


class Reach:
    """The definitions of a library. `file_of` gives the file of a module by its full name, None if it does not count; `public` the
    modules of names that the library has itself."""

    def __init__(self, root: Path, file_of: Callable[[str], Path | None], public: Mapping[str, str]) -> None:
        self.root, self.file_of, self.public = root, file_of, public
        self.module = functools.cache(lambda path: Module(path, self.bindings))
        self.named = functools.cache(self._named)
        self.text = functools.cache(ast.unparse)

    def bindings(self, node: ast.AST, path: Path) -> Iterator[tuple[str, Place]]:
        """What an import binds of what counts."""
        package = path.relative_to(self.root).with_suffix("").parts[:-1]
        if isinstance(node, ast.Import):
            for alias in node.names:
                found = self.file_of(alias.name)
                if found is not None:
                    yield alias.asname or alias.name, Place(found, ALL)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else ()
            base = ".".join(part for part in (*above, node.module or "") if part)
            for alias in node.names:
                module, within = self.file_of(f"{base}.{alias.name}"), self.file_of(base)
                if module is not None or within is not None:
                    yield (
                        alias.asname or alias.name,
                        Place(module, ALL) if module is not None else Place(within, alias.name),
                    )

    def of_public(self, name: str) -> set[Place]:
        """Where a name that the library has itself is defined, if it counts."""
        path = self.file_of(self.public[name]) if name in self.public else None
        return set() if path is None else self.op(path, name)

    def op(self, path: Path, name: str) -> set[Place]:
        """Where a module declares an op, and what it has under that name; all of it where it has neither."""
        definitions = self.module(path).definitions
        found = [own for own, nodes in definitions.items() if own == name or declares(nodes[-1], name)]
        return {Place(path, own) for own in found or [ALL]}

    def _named(self, path: Path, node: ast.AST) -> frozenset[Place]:
        """What counts of what a statement names."""
        module = self.module(path)
        own = {**module.imports, **dict(bound for inner in ast.walk(node) for bound in self.bindings(inner, path))}
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
        return frozenset(found)

    def resolved(self, module: Module, imports: Mapping[str, Place], name: str, part: str | None) -> set[Place]:
        """What `name`, or `name.part`, is in a module."""
        place = imports.get(name)
        if place is None:
            return {Place(module.path, name)} if name in module.definitions else set()
        if place.name is ALL and part is not None:
            below = self.file_of(".".join((*self.dotted(place.path), part)))
            return {Place(below, ALL) if below is not None else Place(place.path, part)}
        return {place}

    def dotted(self, path: Path) -> tuple[str, ...]:
        parts = path.relative_to(self.root).with_suffix("").parts
        return parts[:-1] if parts[-1] == "__init__" else parts

    def settled(self, place: Place) -> Place:
        """Where a name is defined that a module has from another; all of a module where it has it from nowhere."""
        seen: set[Place] = set()
        while place.name is not ALL and place not in seen:
            seen.add(place)
            module = self.module(place.path)
            if place.name in module.definitions:
                return place
            place = module.imports.get(place.name, Place(place.path, ALL))
        return place

    def reach(self, first: Iterable[Place]) -> dict[Path, set[str | None]]:
        """All that these definitions can run, by file."""
        found: dict[Path, set[str | None]] = {}
        waiting = [self.settled(place) for place in first]
        while waiting:
            place = waiting.pop()
            own = found.setdefault(place.path, set())
            if place.name in own or ALL in own:
                continue
            module = self.module(place.path)
            nodes = module.nodes(place.name)
            if not own:  # `import a.b` binds a, of which b may be taken anywhere
                nodes = [*nodes, *module.loose]
                waiting += (whole for name, whole in module.imports.items() if "." in name)
            own.add(place.name)
            waiting += (self.settled(other) for node in nodes for other in self.named(place.path, node))
        return found

    def digest(self, first: Iterable[Place], own: str) -> str:
        """Sixteen hexadecimal digits that stand for a text and all that these definitions can run."""
        made = hashlib.sha256(own.encode())
        for path, names in sorted(self.reach(first).items()):
            module = self.module(path)
            chosen = module.definitions if ALL in names else names
            nodes = {id(node): node for name in chosen for node in module.definitions[name]}
            nodes |= {id(node): node for node in module.loose}
            made.update(f"\n{path.relative_to(self.root)}\n".encode())
            made.update("\n".join(sorted(map(self.text, nodes.values()))).encode())
        return made.hexdigest()[:16]
