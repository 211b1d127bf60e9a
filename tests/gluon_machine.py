"""A machine that runs warp-specialised Gluon kernels on a CPU, from their own source: for kernels that no interpreter takes.

The functions of a kernel are called as Python, with names of Triton and Gluon that mean tensors of torch. Each role of
`warp_specialize` is a thread; one runs at a time, and who is next is drawn at every step. Bulk copies arrive when they are drawn.
Products that are issued read shared memory when they are waited for. So whatever order the barriers allow may happen, and it is an
error (`Wrong`) if

- nobody can go on;
- a barrier is one or more phases past the one that is waited for, so that its parity tells nothing;
- shared memory is written while products that read it are under way, or while a copy into it is;
- a product reads what threads wrote and did not show it by a fence and a barrier of all who wait for it, or what threads copied
  before its role has waited for the barrier at which they arrived, and then fenced;
- a sum is used before it is waited for;
- a stage's bytes are not those that its barrier was told to expect;
- a bulk copy begins before the tensor, or at a column that is no multiple of 16 bytes;
- what has not arrived is read.

Layouts are not modelled, but for how boxes lie in memory: in columns of 64, or of 128 if a number is a byte.
"""

from __future__ import annotations

import contextlib
import importlib.util
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from tilewright.formats.fp8 import fp8
from tilewright.formats.integers import int8
from tilewright.runtime.kernel import Arguments


@contextlib.contextmanager
def broken(
    module: types.ModuleType, kept: str, instead: str, folder: Path, once: bool = True
) -> Iterator[types.ModuleType]:
    """A module of kernels with another text in the place of one that it has, `once` or more often."""
    text = Path(module.__file__).read_text()
    assert text.count(kept) == 1 if once else kept in text, f"{module.__name__} does not contain {kept!r} once"
    path = folder / "mutant.py"
    path.write_text(text.replace(kept, instead))
    spec = importlib.util.spec_from_file_location(f"{module.__package__}.mutant", path)
    mutant = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = mutant
    try:
        spec.loader.exec_module(mutant)
        yield mutant
    finally:
        del sys.modules[spec.name]


class Wrong(AssertionError):
    """What a GPU would do wrong, or for ever."""


class Value(torch.Tensor):
    """A tensor in registers, with the attributes that Gluon's have. It never changes: `x += 1` makes another."""

    def __iadd__(self, other):
        return self + other

    def __isub__(self, other):
        return self - other

    def __iand__(self, other):
        return self & other

    def __ior__(self, other):
        return self | other

    def to(self, dtype, bitcast=False):
        return self.view(dtype) if bitcast else super().to(dtype)

    @property
    def type(self):
        return SimpleNamespace(layout=None)


def value(x: Any) -> Value:
    if isinstance(x, Pending):
        raise Wrong("a sum is used before it is waited for")
    return (x if isinstance(x, Tensor) else torch.tensor(x)).as_subclass(Value)


# ---- memory ----------------------------------------------------------------------------------------------------------


class Pointer:
    """Addresses in a tensor's storage."""

    def __init__(self, storage: Tensor, at: Any) -> None:
        self.storage, self.at = storage, at
        self.dtype = SimpleNamespace(element_ty=storage.dtype)

    @staticmethod
    def to(t: Tensor) -> Pointer:
        size = t.untyped_storage().nbytes() // t.element_size()
        return Pointer(torch.as_strided(t, (size,), (1,), 0), t.storage_offset())

    def __add__(self, step: Any) -> Pointer:
        return Pointer(self.storage, self.at + step)

    def unsqueeze(self, axis: int) -> Pointer:
        return Pointer(self.storage, value(self.at).unsqueeze(axis))


@dataclass
class Either:
    """Addresses in one storage, where `first` holds, or else in another."""

    first: Tensor
    pointers: tuple[Pointer, Pointer]

    def __add__(self, step: Any) -> Either:
        return Either(self.first, tuple(pointer + step for pointer in self.pointers))

    def unsqueeze(self, axis: int) -> Either:
        return Either(
            self.first.unsqueeze(axis),
            tuple(p.unsqueeze(axis) if isinstance(p.at, Tensor) and p.at.ndim else p for p in self.pointers),
        )

    def read(self, live: Tensor) -> Value:
        wide = (Pointer(p.storage, value(p.at).expand(live.shape)) for p in self.pointers)
        mine, others = (load(p, live & which, 0) for p, which in zip(wide, (self.first, ~self.first)))
        return value(torch.where(self.first, mine, others))


def chosen(ok: Any, a: Any, b: Any) -> Any:
    """`where`, of numbers or of addresses."""
    if isinstance(a, Pointer):
        return Either(value(ok), (a, b))
    return value(torch.where(value(ok), value(a), value(b)))


def load(pointer: Pointer, mask: Any = None, other: Any = 0) -> Value:
    at = value(pointer.at).long()
    live = torch.ones_like(at, dtype=torch.bool) if mask is None else value(mask).expand_as(at)
    found = pointer.storage[torch.where(live, at, 0)]
    return value(torch.where(live, found, value(other).to(found.dtype)))


def store(pointer: Pointer, x: Any, mask: Any = None) -> None:
    at, live = torch.broadcast_tensors(value(pointer.at).long(), value(True if mask is None else mask))
    pointer.storage[at[live]] = value(x).to(pointer.storage.dtype).expand_as(at)[live].as_subclass(Tensor)


def atomic_add(pointer: Pointer, step: int, sem: str = "acq_rel") -> Value:
    before = load(pointer).clone()
    store(pointer, before + step)
    return before


@dataclass
class Box:
    """What happens to one box of shared memory."""

    readers: int = 0  # products under way
    copying: list[range] = field(default_factory=list)  # what copies under way will write; several may fill a box
    written: dict[str, str] = field(default_factory=dict)  # by role: "written", or "fenced"
    # Copies by threads that have arrived: at which phase of which barrier, and to the products of which roles they are shown
    arrived: tuple[Barrier | None, int] | None = None
    shown: set[str] = field(default_factory=set)


class Shared:
    """Boxes of shared memory, or a view of them. `at` is where it begins, in elements."""

    def __init__(
        self, dtype: torch.dtype, shape: list[int], memory: Tensor | None = None, boxes: Any = None, at: int = 0
    ) -> None:
        self.dtype, self.shape, self.at = dtype, list(map(int, shape)), int(at)
        count = torch.Size(self.shape).numel()
        nothing = float("nan") if dtype.is_floating_point else -1
        self.memory = torch.full((count,), nothing, dtype=dtype) if memory is None else memory
        self.boxes = [Box() for _ in range(self.shape[0])] if boxes is None else boxes
        self.turned = False

    def index(self, i: Any) -> Shared:
        if not 0 <= int(i) < self.shape[0]:
            raise Wrong(f"box {int(i)} of {self.shape[0]}")
        size = torch.Size(self.shape[1:]).numel()
        return Shared(self.dtype, self.shape[1:], self.memory, self.boxes, self.at + int(i) * size)

    def reinterpreted(self, dtype: torch.dtype, shape: list[int], _: Any) -> Shared:
        size, own = torch.Size(shape).numel() * dtype.itemsize, torch.Size(self.shape).numel() * self.dtype.itemsize
        if size != own:
            raise Wrong(f"{self.shape} of {self.dtype} as {shape} of {dtype}")
        at = self.at * self.dtype.itemsize // dtype.itemsize
        return Shared(dtype, shape, self.memory.view(dtype), self.boxes, at)

    def permute(self, _: Any) -> Shared:
        made = Shared(self.dtype, self.shape, self.memory, self.boxes, self.at)
        made.turned = not self.turned
        return made

    @property
    def spanned(self) -> list[Box]:
        """The boxes that it lies in: a view may be part of one, or several."""
        size = self.memory.numel() // len(self.boxes)
        last = self.at + max(1, torch.Size(self.shape).numel()) - 1
        return self.boxes[self.at // size : last // size + 1]

    @property
    def span(self) -> range:
        return range(self.at, self.at + torch.Size(self.shape).numel())

    @property
    def part(self) -> Tensor:
        """[rows, columns], as a view of memory in columns of 64, or of 128 bytes."""
        columns = self.shape[-1]
        rows, narrow = torch.Size(self.shape[:-1]).numel(), min(128 if self.dtype.itemsize == 1 else 64, columns)
        return self.memory[self.at : self.at + rows * columns].view(columns // narrow, rows, narrow).permute(1, 0, 2)

    def read(self) -> Tensor:
        found = self.part.reshape(-1, self.shape[-1])
        return found.t() if self.turned else found

    def write(self, x: Tensor) -> None:
        if any(box.readers or box.copying for box in self.spanned):
            raise Wrong("shared memory is written while it is read or copied into")
        self.part.copy_(x.reshape(self.part.shape))

    def load(self, _: Any) -> Value:
        if any(box.copying for box in self.spanned):
            raise Wrong("what has not arrived is read")
        return value(self.read().reshape(self.shape).clone())

    def store(self, x: Value) -> None:
        self.write(x.as_subclass(Tensor))
        for box in self.spanned:
            box.written[machine().role] = "written"


class Descriptor:
    """A tensor that bulk copies read, [..., rows, columns], a box at a time; 0 outside of it."""

    def __init__(self, given: Any) -> None:
        self.tensor, self.dtype, self.layout = given.base, given.base.dtype, None
        nbytes = torch.Size(given.block_shape).numel() * given.base.element_size()
        self.block_type = SimpleNamespace(shape=list(given.block_shape), nbytes=nbytes)

    def box_at(self, at: list[int]) -> Tensor:
        made = torch.zeros(self.block_type.shape, dtype=self.dtype)
        ends = [min(a + b, n) for a, b, n in zip(at, self.block_type.shape, self.tensor.shape)]
        if min(at) < 0 or at[-1] * self.tensor.element_size() % 16:
            raise Wrong(f"a copy from {at}, of {self.dtype}")
        if all(e > a for a, e in zip(at, ends)):
            source = self.tensor[tuple(slice(a, e) for a, e in zip(at, ends))]
            made[tuple(slice(0, n) for n in source.shape)] = source
        return made


# ---- products --------------------------------------------------------------------------------------------------------


class Pending:
    """A sum that products are being added to."""

    def __init__(self) -> None:
        self.result: Tensor | None = None


@dataclass
class Product:
    a: Any
    b: Shared
    before: Any
    use_acc: bool
    into: Pending

    def finish(self) -> None:
        a = self.a.read() if isinstance(self.a, Shared) else self.a.as_subclass(Tensor)
        before = self.before.result if isinstance(self.before, Pending) else self.before.as_subclass(Tensor)
        b = self.b.read()
        if a.dtype == torch.int8:
            made = (a.double() @ b.double()).to(torch.int32)  # exactly
        else:
            made = a.float() @ b.float()
        self.into.result = made + before if self.use_acc else made
        for operand in (self.a, self.b):
            for box in operand.spanned if isinstance(operand, Shared) else ():
                box.readers -= 1


def issue(a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False) -> Pending:
    role, made = machine().role, Pending()
    for operand in (a, b):
        for box in operand.spanned if isinstance(operand, Shared) else ():
            hidden = any(how == "written" or who != role for who, how in box.written.items())
            if box.copying or hidden or (box.arrived and role not in box.shown):
                raise Wrong("a product reads what has not arrived, or was written and not shown to it")
            box.readers += 1
    machine().under_way[role].append(Product(a, b, acc, bool(use_acc), made))
    if not is_async:
        raise Wrong("products are asynchronous here")
    machine().step()
    return made


def await_products(left: int = 0, deps: tuple = ()) -> Any:
    queue = machine().under_way[machine().role]
    while len(queue) > left:
        queue.pop(0).finish()
    machine().step()
    found = []
    for dep in deps:
        if isinstance(dep, Pending) and dep.result is None:
            raise Wrong("a sum is used before its products are waited for")
        found.append(value(dep.result if isinstance(dep, Pending) else dep))
    return found[0] if len(found) == 1 else tuple(found)


# ---- barriers and roles ----------------------------------------------------------------------------------------------


class Barrier:
    def __init__(self) -> None:
        self.count = self.arrived = self.bytes = self.phase = 0
        self.waited: dict[str, int] = {}  # by role, the phase that it last waited for

    def settle(self) -> None:
        if self.arrived == self.count and self.bytes == 0:
            self.phase, self.arrived = self.phase + 1, 0
        elif self.arrived > self.count:
            raise Wrong("more arrive at a barrier than it waits for")


class Machine:
    """Runs the roles of one program. Whoever holds the turn goes on; at each step it is given to somebody who can."""

    def __init__(self, seed: int, program: int) -> None:
        self.random, self.program = random.Random(seed), program
        self.under_way: dict[str, list[Product]] = {}
        self.copies: list[Callable[[], None]] = []
        self.groups: list[list[Callable[[], None]]] = []  # copies by threads, as they were committed
        self.uncommitted: list[Callable[[], None]] = []
        self.allocated: list[Shared] = []
        self.threads: dict[str, int] = {}  # by role
        self.can_go: dict[str, Callable[[], bool]] = {}
        self.meeting: set[str] = set()
        self.turns: dict[int, int] = {}  # given and not taken, by warpgroup
        self.turn: str | None = None
        self.failed: BaseException | None = None
        self.changed = threading.Condition()
        self.names = threading.local()

    @property
    def role(self) -> str:
        return getattr(self.names, "role", "all")

    def pass_on(self) -> None:
        """Give the turn to a role that can go on, after some copies have arrived."""
        while self.copies and self.random.random() < 0.5:
            self.copies.pop(self.random.randrange(len(self.copies)))()
        while True:
            ready = [role for role, able in self.can_go.items() if able()]
            if ready or not self.can_go:
                self.turn = self.random.choice(ready) if ready else None
                break
            if not self.copies:
                raise Wrong(f"nobody can go on: {sorted(self.can_go)} wait")
            self.copies.pop(self.random.randrange(len(self.copies)))()
        self.changed.notify_all()

    def step(self, able: Callable[[], bool] = lambda: True, often: float = 0.5) -> None:
        """Let others go on, and come back when it is our turn and we are able to; or go on at once, unless this happens `often`."""
        role = self.role
        if role == "all" or (self.random.random() >= often and able()):
            return
        with self.changed:
            self.can_go[role] = able
            try:
                self.pass_on()
            except Exception as wrong:
                self.failed = self.failed or wrong
                self.changed.notify_all()
            self.changed.wait_for(lambda: self.turn == role or self.failed)
            if self.failed:
                raise Wrong("stopped")

    def run(self, parts: list[tuple[Callable, tuple]], warps: Any = ()) -> None:
        def play(role: str, function: Callable, args: tuple) -> None:
            _here.machine, self.names.role = self, role
            try:
                with self.changed:
                    self.changed.wait_for(lambda: self.turn == role or self.failed)
                if not self.failed:
                    function(*args)
            except BaseException as error:
                self.failed = self.failed or error
            with self.changed:
                del self.can_go[role]
                try:
                    self.pass_on()
                except Exception as wrong:
                    self.failed = self.failed or wrong
                self.changed.notify_all()

        for i, (function, _) in enumerate(parts):
            role = f"{function.__name__} {i}"
            self.can_go[role], self.under_way[role] = lambda: True, []
            self.threads[role] = 32 * (4, *warps)[i] if len(warps) == len(parts) - 1 else 0
        roles = [threading.Thread(target=play, args=(r, *p), daemon=True) for r, p in zip(self.can_go, parts)]
        for thread in roles:
            thread.start()
        with self.changed:
            self.pass_on()
        for thread in roles:
            thread.join()
        if self.failed:
            raise self.failed
        if self.copies or any(self.under_way.values()):
            raise Wrong("copies or products are under way when the program ends")


_here = threading.local()


def machine() -> Machine:
    return _here.machine


def init(barrier: Barrier, count: int) -> None:
    barrier.count = count


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    """Whoever waits for it may then read by products what the role has written and fenced."""
    if pred:
        for memory in machine().allocated:
            for box in memory.boxes:
                if box.written.get(machine().role) == "fenced":
                    del box.written[machine().role]
        barrier.arrived += count
        barrier.settle()
    machine().step(often=1.0)  # others may have waited for this


def expect(barrier: Barrier, size: int) -> None:
    barrier.bytes += size
    barrier.arrived += 1
    barrier.settle()
    machine().step()


def wait(barrier: Barrier, parity: Any) -> None:
    """Wait for the phase of that parity which comes after the one that the role waited for last, or for that one once more. Of a
    barrier that nobody has arrived at, the phase before the first, whose parity is 1, is over."""
    parity, role = int(parity), machine().role
    last = barrier.waited.get(role)
    phase = -parity if last is None else last if last % 2 == parity else last + 1
    barrier.waited[role] = phase
    machine().step(lambda: barrier.phase > phase)
    if barrier.phase > phase + 1:
        raise Wrong("a barrier is phases ahead of who waits for it: its parity tells nothing")


def copy_in(descriptor: Descriptor, at: list, barrier: Barrier, into: Shared) -> None:
    (box,), span = into.spanned, into.span
    if box.readers or any(max(span[0], other[0]) <= min(span[-1], other[-1]) for other in box.copying):
        raise Wrong("a copy is begun into what is read or copied into")
    box.copying.append(span)
    place = [int(a) for a in at]

    def arrives() -> None:
        if box.readers:
            raise Wrong("a copy arrives in what is read")
        into.part.copy_(descriptor.box_at(place).reshape(into.part.shape))
        box.copying.remove(span)
        box.written.clear()
        box.arrived = None
        barrier.bytes -= descriptor.block_type.nbytes
        if barrier.bytes < 0:
            raise Wrong("more bytes arrive than were expected")
        barrier.settle()

    machine().copies.append(arrives)
    machine().step()


def copy_ahead(into: Shared, pointer: Any, mask: Any) -> None:
    """A copy by the program's threads, which arrives when it is drawn, or is waited for: with its group, or at a barrier. Where
    there is nothing to copy it writes 0."""
    boxes, span = into.spanned, into.span
    if any(box.copying or box.readers for box in boxes):
        raise Wrong("a copy is begun into what is read or copied into")
    for box in boxes:
        box.copying.append(span)
        box.written.clear()
        box.arrived, box.shown = (None, 0), set()
    given = torch.tensor(True) if mask is None else value(mask).as_subclass(Tensor)
    live = given.expand(into.shape)

    def arrives() -> None:
        if span in boxes[0].copying:
            if any(box.readers for box in boxes):
                raise Wrong("a copy arrives in what is read")
            found = pointer.read(live) if isinstance(pointer, Either) else load(pointer, live, 0)
            into.part.copy_(rows_in_part(found.as_subclass(Tensor), into))
            for box in boxes:
                box.copying.remove(span)

    arrives.boxes = boxes
    machine().uncommitted.append(arrives)
    if machine().random.random() < 0.5:
        arrives()


def rows_in_part(x: Tensor, into: Shared) -> Tensor:
    return x.expand(into.shape).reshape(into.part.shape)


def arrive_when_copied(barrier: Barrier, increment_count: bool = True) -> None:
    """All threads of the role arrive, when what they have begun to copy is there. Whoever waits for the barrier sees it, and shows
    it to its products by a fence. Each thread arrives by itself; those that come early change nothing: they come together here."""
    now = machine()
    if increment_count:
        raise Wrong("a barrier is to know how many arrive")
    copies, now.uncommitted, threads = now.uncommitted, [], now.threads[now.role]

    def arrives() -> None:
        for copy in copies:
            copy()
            for box in copy.boxes:
                box.arrived, box.shown = (barrier, barrier.phase), set()
        barrier.arrived += threads
        barrier.settle()

    now.copies.append(arrives)
    now.step()


def commit_group() -> None:
    machine().groups.append(machine().uncommitted)
    machine().uncommitted = []


def wait_group(left: int) -> None:
    groups = machine().groups
    while len(groups) > left:
        for arrives in groups.pop(0):
            arrives()


def fence() -> None:
    for memory in machine().allocated:
        for box in memory.boxes:
            if box.written.get(machine().role) == "written":
                box.written[machine().role] = "fenced"
            if box.arrived and not box.copying:
                barrier, phase = box.arrived
                if barrier is not None and barrier.waited.get(machine().role, -1) >= phase:
                    box.shown.add(machine().role)


def meet() -> None:
    """Both warpgroups wait for each other; what both have shown by a fence, both may read."""
    now = machine()
    now.meeting.add(now.role)
    met = now.meeting
    if len(met) == 2:
        for memory in machine().allocated:
            for box in memory.boxes:
                box.written = {who: how for who, how in box.written.items() if how == "written"}
        now.meeting = set()
    now.step(lambda: len(met) == 2)


def await_turn(group: int) -> None:
    turns = machine().turns
    machine().step(lambda: turns.get(group, 0) > 0)
    turns[group] -= 1


def give_turn(group: int, count: int = 2) -> None:
    """Arrive at the barrier of the next warpgroup, at which nobody may arrive twice before it has waited."""
    turns, following = machine().turns, (group + 1) % count
    turns[following] = turns.get(following, 0) + 1
    if turns[following] > 1:
        raise Wrong("a turn is given that was given before and not taken")
    machine().step(often=1.0)


def await_count(at: Pointer, count: Any) -> None:
    machine().step(lambda: int(load(at)) == int(count))


def tell_count(at: Pointer, count: Any) -> None:
    store(at, count)
    machine().step(often=1.0)


def add_to_block(y: Value, to: Pointer, first: Any, columns: int) -> None:
    y = y.reshape(4, 2, 8, columns // 8, 4, 2).permute(0, 3, 2, 4, 1, 5).reshape(-1)
    at = to + torch.arange(y.numel())
    store(at, y if first else load(at) + y)


def ask_for(keys: Any, page: Any, place: Any, size: int) -> None:
    """What memory is asked for is there."""
    at = int(keys.data.at + page * keys.stride_b + place * keys.stride_t)
    if not 0 <= at <= keys.data.storage.numel() - size // keys.data.storage.element_size():
        raise Wrong("memory is asked for that there is not")


def scaled_where_moved(x: Value, by: Value) -> Value:
    return x * by.unsqueeze(1)


def load_words(memory: Any, stage: Any, layout: Any, plan: Any) -> Value:
    """A stage's codes, four to a word."""
    codes = memory.boxes.reinterpreted(memory.boxes.dtype, [plan.stages, 64, 128], layout).index(stage).load(layout)
    return value(codes.contiguous().view(torch.int32))


def widened(words: Value, kind: torch.dtype) -> tuple[Value, ...]:
    """The first, the second, the third and the fourth codes of words."""
    return tuple(words.contiguous().view(kind).reshape(*words.shape, 4).to(torch.float16).unbind(-1))


def query_codes(y: Value, same: Value, words: str) -> tuple[Value, Value]:
    """Rows in codes with scales of their own, by the formats' own rules."""
    made = (int8("row") if "int8" in words else fp8("row", pow2=False, rule="exact")).quantize(y.as_subclass(Tensor))
    return value(made.data), value(made.scale.reshape(-1))


def allocate(dtype: Any, shape: list[int], _: Any) -> Any:
    if dtype == torch.int64:
        return Barriers([Barrier() for _ in range(shape[0])])
    made = Shared(dtype, shape)
    machine().allocated.append(made)
    return made


class Barriers(list):
    def index(self, i: Any) -> Barrier:
        return self[int(i)]


# ---- names of Triton and Gluon ---------------------------------------------------------------------------------------


class Anything:
    """What layouts are made of here."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_: Any, **__: Any) -> Any:
        return self


def reduced(function: Callable[[Tensor, int], Tensor]) -> Callable[[Tensor, int], Value]:
    return lambda x, axis: value(function(x.as_subclass(Tensor), axis))


def folded(parts: tuple, axis: int, combine: Callable) -> tuple:
    """`reduce` of one or several [n], n a power of two."""
    if isinstance(parts, Tensor):
        return folded((parts,), axis, lambda a, b: (combine(a, b),))[0]
    while parts[0].shape[axis] > 1:
        halves = [part.chunk(2, axis) for part in parts]
        parts = combine(*(half[0] for half in halves), *(half[1] for half in halves))
    return tuple(value(part.squeeze(axis)) for part in parts)


LANGUAGE = SimpleNamespace(
    **{name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "int64", "int32", "int8")},
    float8e4nv=torch.float8_e4m3fn,
    program_id=lambda _: value(machine().program),
    static_range=range,
    cdiv=lambda a, b: -(-a // b),
    arange=lambda start, stop, _=None: value(torch.arange(start, stop, dtype=torch.int32)),
    zeros=lambda shape, dtype, _=None: value(torch.zeros(shape, dtype=dtype)),
    full=lambda shape, x, dtype, _=None: value(torch.full(shape, float(x)).to(dtype)),
    expand_dims=lambda x, axis: x.unsqueeze(axis),
    convert_layout=lambda x, _, assert_trivial=False: x,
    where=chosen,
    multiple_of=lambda x, _: x,
    PropagateNan=Anything(),
    minimum=lambda a, b, propagate_nan=None: value(torch.minimum(value(a), value(b))),
    maximum=lambda a, b: value(torch.maximum(value(a), value(b))),
    max=reduced(torch.amax),
    sum=reduced(torch.sum),
    reduce=folded,
    rsqrt=lambda x: value(torch.rsqrt(x)),
    join=lambda a, b: value(torch.stack((a, b), -1)),
    exp2=lambda x: value(torch.exp2(x)),
    log=lambda x: value(torch.log(x)),
    abs=lambda x: value(torch.abs(x)),
    load=load,
    store=store,
    atomic_add=atomic_add,
    BlockedLayout=Anything(),
    SwizzledSharedLayout=Anything(),
    allocate_shared_memory=allocate,
    inline_asm_elementwise=lambda asm, constraints, args, dtype, pure, pack: args[0].to(dtype),
    warp_specialize=lambda parts, warps, _: machine().run(parts, warps),
    SliceLayout=Anything(),
    DotOperandLayout=Anything(),
)
INSTEAD = {
    "gl": LANGUAGE,
    "tl": LANGUAGE,
    "mbarrier": SimpleNamespace(init=init, arrive=arrive, expect=expect, wait=wait, MBarrierLayout=Anything()),
    "range": lambda *ends: map(value, range(*map(int, ends))),
    "async_load": copy_in,
    "copy_ahead": copy_ahead,
    "arrive_when_copied": arrive_when_copied,
    "commit_group": commit_group,
    "wait_group": wait_group,
    "fence_async_shared": fence,
    "reinterpret": Shared.reinterpreted,
    "warpgroup_mma": issue,
    "warpgroup_mma_wait": await_products,
    "meet": meet,
    "await_turn": await_turn,
    "give_turn": give_turn,
    "scaled_where_moved": scaled_where_moved,
    "scaled_where_any": lambda x, by, moved: x * by.unsqueeze(0),
    "factors_moved": lambda by: by,
    "ask_for": ask_for,
    "await_count": await_count,
    "tell_count": tell_count,
    "add_to_block": add_to_block,
    "unknown_zero": lambda: 0,
    "halve": lambda x, dtype: x.to(dtype),
    "double": lambda x, dtype: x.to(torch.float32),
    "barrier": lambda: machine().step(),
    "reciprocal": lambda x: 1.0 / x,
    "query_codes": query_codes,
    "load_words": load_words,
    "widened": widened,
    "triton": Anything(),
}


def playable(function: Any, known: dict[int, Callable] | None = None) -> Callable:
    """A function of a kernel, and all that it calls, as Python with the names above."""
    known = {} if known is None else known
    if id(function) not in known:
        source = function.fn
        names: dict[str, Any] = {}
        made = types.FunctionType(source.__code__, names, source.__name__, source.__defaults__)
        made.__kwdefaults__ = source.__kwdefaults__
        known[id(function)] = made
        for name in {*source.__code__.co_names, "range", "float", "len"}:
            if name in INSTEAD:
                names[name] = INSTEAD[name]
            elif name in source.__globals__:
                names[name] = playable_global(source.__globals__[name], known)
        names["__builtins__"] = __builtins__
    return known[id(function)]


def playable_global(x: Any, known: dict[int, Callable]) -> Any:
    if type(x).__name__ == "ConstexprFunction":
        return lambda *args: x.fn(*args)
    if isinstance(x, tl.constexpr):
        return x.value
    return playable(x, known) if callable(getattr(x, "fn", None)) else x


def argument(x: Any) -> Any:
    """What a kernel is launched with, as it gets it here."""
    if isinstance(x, Tensor):
        return Pointer.to(x)
    if hasattr(x, "block_shape"):
        return Descriptor(x)
    if isinstance(x, tuple):
        return type(x)(*map(argument, x))
    return x


def play(wanted: Any, seed: int, body: Callable | None = None) -> None:
    """Run a launch that `collect` kept: each program of it, one after the other. `body` takes the place of the kernel's."""
    body = body or playable(wanted.kernel.jit)
    (programs,) = wanted.kernel.grid(Arguments(zip(wanted.kernel.names, wanted.ordered)))
    for program in range(programs):
        _here.machine = Machine(1000 * seed + program, program)
        body(*map(argument, wanted.ordered))
        if _here.machine.uncommitted or any(_here.machine.groups):
            raise Wrong("copies are under way when the program ends")
