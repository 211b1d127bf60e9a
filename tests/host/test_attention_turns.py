"""The order of attention's backward on Hopper, without a GPU: which blocks of queries a tile of keys goes through and when it is
its turn, by the kernel's own functions; and a model of all warps of all programs under random schedules, which must end, add
everything once and in order, and never read what is not there."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest

from tests.attention_model import KEYS, blocks_of, is_whole, keys_alone, order_of, queries_alone, slot_of, turn_of
from tilewright.attention.tiles import Lengths, Tile, Window


class Case:
    """Sequences with their windows, drawn from a seed: dense ones, or packed one after the other."""

    def __init__(self, seed: int) -> None:
        source = random.Random(seed)
        self.queries = source.choice((64, 128))
        self.window = Window(source.choice((None, None, 0, 5, 130, 400)), source.choice((None, 0, 0, 3, 200)))
        self.packed = source.random() < 0.5
        self.kv_heads, self.group = source.choice((1, 2)), source.choice((1, 1, 2, 3))
        sizes = [(source.randrange(0, 500), source.randrange(0, 600)) for _ in range(source.randrange(1, 4))]
        if not self.packed:
            sizes = sizes[:1] * len(sizes)
        counts = [source.choice((m, m, source.randrange(0, m + 1))) for _, m in sizes]
        self.batch = 1 if self.packed else len(sizes)
        self.sequences, first_q, first_k = [], 0, 0
        for at, ((n, m), count) in enumerate(zip(sizes, counts)):
            self.sequences.append((at, first_q, n, first_k, m, count))
            if self.packed:
                first_q, first_k = first_q + n, first_k + m
        longest = first_q if self.packed else sizes[0][0]
        self.slots = -(-longest // self.queries) + (len(sizes) + 1 if self.packed else 0)
        self.lengths = Lengths("a table" if self.packed else None)

    def tiles(self, batch: int) -> list[tuple[Tile, int]]:
        """The tiles of keys of a batch, each with how many keys its sequence has; packed ones have an empty entry after them."""
        own = self.sequences if self.packed else self.sequences[batch : batch + 1]
        found = [
            (Tile(at, first_q, n, first_k, m, start), count)
            for at, first_q, n, first_k, m, count in own
            for start in range(0, m, KEYS)
        ]
        return found + [(Tile(-1, 0, 0, 0, 0, 0), 0)] * self.packed

    def sees(self, tile: Tile, count: int, row: int, key: int) -> bool:
        at = row + count - tile.count_q
        left, right = self.window
        return key < count and (left is None or key >= at - left) and (right is None or key <= at + right)

    def blocks(self, tile: Tile, count: int) -> list[int]:
        first, blocks = blocks_of(self.window, tile, count, self.queries)
        return [first + blocks - 1 - i for i in range(blocks)]


SEEDS = range(40)


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_turns_and_flags_are_what_is_seen(seed):
    case = Case(seed)
    for batch in range(case.batch):
        added = defaultdict(int)
        for tile, count in case.tiles(batch):
            Q = case.queries
            rows, keys = range(tile.count_q), range(tile.start, min(tile.start + KEYS, tile.count_k))
            seeing = {row: [case.sees(tile, count, row, key) for key in keys] for row in rows}
            wanted = sorted({row // Q for row in rows if any(seeing[row])}, reverse=True)
            assert case.blocks(tile, count) == wanted
            for block in wanted:
                m = block * Q
                assert turn_of(case.window, tile, count, m, Q) == added[tile.sequence, block]
                added[tile.sequence, block] += 1
                inside = [row for row in range(m, m + Q) if row < tile.count_q]
                whole = len(inside) == Q and len(keys) == KEYS and all(all(seeing[row]) for row in inside)
                assert is_whole(case.window, tile, count, m, Q) == whole
                alone = queries_alone(case.window, tile, count)
                nothing = [row for row in inside if not any(case.sees(tile, count, row, j) for j in range(count))]
                assert nothing == [row for row in inside if row < alone]
            low = keys_alone(case.window, tile, count)
            if wanted:
                unseen = [j for j in keys if j < count and not any(case.sees(tile, count, row, j) for row in rows)]
                assert unseen == [j for j in keys if j < min(low, count)]


@pytest.mark.parametrize("seed", SEEDS)
def test_blocks_of_packed_sequences_lie_apart(seed):
    case = Case(seed)
    taken = set()
    for at, first_q, n, first_k, m, _ in case.sequences if case.packed else case.sequences[:1]:
        begin = slot_of(case.lengths, Tile(at, first_q, n, first_k, m, 0), case.queries)
        own = {begin + i for i in range(-(-n // case.queries))}
        assert not own & taken and all(0 <= slot < case.slots for slot in own)
        taken |= own


# ---- a model of the program ------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase ends with its last arrival. Whoever waits for a parity goes on when the phase that runs has the other,
    so that one who comes two phases late waits for ever."""

    def __init__(self, count: int) -> None:
        self.count = self.left = count
        self.phase = 0

    def arrive(self) -> None:
        self.left -= 1
        assert self.left >= 0
        if self.left == 0:
            self.phase, self.left = self.phase + 1, self.count

    def passed(self, parity: int) -> Callable[[], bool]:
        return lambda: (self.phase & 1) != parity


class Meeting:
    """A named barrier of both warpgroups."""

    def __init__(self) -> None:
        self.here = [0, 0]

    def come(self, who: int) -> Callable[[], bool]:
        self.here[who] += 1
        mine = self.here[who]
        return lambda: self.here[1 - who] >= mine


class Device:
    """Global memory: the counter of units, turns, and which tiles have added to a block."""

    def __init__(self, case: Case, mutant: str) -> None:
        self.case, self.mutant = case, mutant
        self.tiles = [case.tiles(batch) for batch in range(case.batch)]
        self.units = max(map(len, self.tiles)) * case.kv_heads * case.batch
        self.counter = 0
        self.turn = defaultdict(int)
        self.sums: dict[int, list[int]] = {}
        self.adding: dict[int, int] = {}
        self.stored = set()

    def unit(self, at: int):
        """(tile, its keys, its place among the blocks of the first head of its group)."""
        case = self.case
        index, kv_head, batch = order_of(at, len(self.tiles[0]), case.kv_heads, case.batch, 2, False)
        tile, count = self.tiles[batch][index]
        place = (batch * case.kv_heads + kv_head) * case.group * case.slots
        return tile, count, place + slot_of(case.lengths, tile, case.queries)

    def steps(self, at: int) -> list[tuple[int, int, bool]]:
        """A unit's blocks in order: place, turn, whether rows are cleared."""
        tile, count, place = self.unit(at)
        case, found = self.case, []
        for block in case.blocks(tile, count):
            m = block * case.queries
            clears = m < queries_alone(case.window, tile, count) or m + case.queries > tile.count_q
            turn = turn_of(case.window, tile, count, m, case.queries)
            found += [(place + block + g * case.slots, turn, clears) for g in range(case.group)]
        return found


STAGES = 2
Wait = Iterator[Callable[[], bool]]


class Program:
    """The shared memory and the four roles of one program, step by step as `backward.py` has them. What is in flight is checked
    when it is waited for: it must be what it was when it was asked for."""

    def __init__(self, device: Device, start: Callable) -> None:
        self.device, self.start = device, start
        self.full = [Barrier(1) for _ in range(STAGES)]
        self.empty = [Barrier(2) for _ in range(STAGES)]
        self.kv_full, self.kv_empty = Barrier(1), Barrier(2)
        self.ds_full = [Barrier(1) for _ in range(4)]
        self.turn, self.added = Barrier(1), Barrier(2)
        self.ticket_full, self.ticket_empty = Barrier(1), Barrier(3)
        self.meeting = Meeting()
        self.ring: list = [None] * STAGES
        self.kv = None
        self.ds: list = [None] * 4
        self.ticket = None

    def load(self, where: Callable, barrier: Barrier) -> None:
        def arrives() -> Wait:
            for _ in range(random.randrange(3)):
                yield lambda: True
            where()
            barrier.arrive()

        self.start(arrives())

    def copying(self) -> Wait:
        stage, phase, kv_phase, ticket_phase = 0, 1, 1, 1
        unit = 0
        while unit < self.device.units:
            unit, self.device.counter = self.device.counter, self.device.counter + 1
            yield self.ticket_empty.passed(ticket_phase)
            ticket_phase ^= 1
            self.ticket = unit
            self.ticket_full.arrive()
            if unit >= self.device.units:
                continue
            steps = self.device.steps(unit)
            if steps:
                yield self.kv_empty.passed(kv_phase)
                kv_phase ^= 1
                self.kv = None
                self.load(lambda u=unit: setattr(self, "kv", u), self.kv_full)
            for at in range(len(steps)):
                yield self.empty[stage].passed(phase)
                self.ring[stage] = None
                self.load(lambda s=stage, what=(unit, at): self.ring.__setitem__(s, what), self.full[stage])
                stage, phase = (stage + 1, phase) if stage + 1 < STAGES else (0, phase ^ 1)

    def keeping(self) -> Wait:
        device, phase, ticket_phase = self.device, 0, 0
        unit = 0
        while unit < device.units:
            yield self.ticket_full.passed(ticket_phase)
            ticket_phase ^= 1
            unit = self.ticket
            self.ticket_empty.arrive()
            if unit >= device.units:
                continue
            for place, mine, _ in device.steps(unit):
                if device.mutant != "out of turn":
                    yield lambda p=place, t=mine: device.turn[p] == t
                self.turn.arrive()
                yield self.added.passed(phase)
                phase ^= 1
                assert device.turn[place] == mine or device.mutant
                device.turn[place] = mine + 1

    def finish_dq(self, W: int, unit: int, step: tuple, count: int, flight: tuple) -> Wait:
        device, before = self.device, (count & 1) ^ 1
        yield lambda: True
        # The products that were in flight read ds of both, and k
        assert (self.ds[2 * before], self.ds[2 * before + 1], self.kv) == flight
        yield self.turn.passed(before)
        place, mine, _ = step
        if mine == 0:
            assert (place, W) not in device.stored, "two tiles store"
            device.stored.add((place, W))
            device.sums.setdefault((place, W), [])
        assert (place, W) in device.sums, "added to what nobody has stored"
        device.sums[place, W].append(unit)
        yield lambda: True
        self.added.arrive()

    def warpgroup(self, W: int) -> Wait:
        device = self.device
        stage, phase, kv_phase, ticket_phase, count = 0, 0, 0, 0, 0
        unit = 0
        while unit < device.units:
            yield self.ticket_full.passed(ticket_phase)
            ticket_phase ^= 1
            unit = self.ticket
            self.ticket_empty.arrive()
            if unit >= device.units:
                continue
            steps = device.steps(unit)
            if not steps:
                continue
            yield self.kv_full.passed(kv_phase)
            kv_phase ^= 1
            if unit % 3 == 0:  # keys are cleared
                yield self.meeting.come(W)
            before = None
            for at, step in enumerate(steps):
                buffer = count & 1
                yield self.full[stage].passed(phase)
                assert self.ring[stage] == (unit, at) and self.kv == unit
                if step[2]:
                    yield self.meeting.come(W)
                if before is not None:
                    if device.mutant != "no wait for ds":
                        yield self.ds_full[2 * (buffer ^ 1) + 1 - W].passed(((count - 1) >> 1) & 1)
                    flight = ((unit, at - 1, 0), (unit, at - 1, 1), unit)
                    yield from self.finish_dq(W, unit, before, count, flight)
                yield lambda: True
                self.ds[2 * buffer + W] = (unit, at, W)
                self.ds_full[2 * buffer + W].arrive()
                yield lambda: True
                assert self.ring[stage] == (unit, at)  # products read it until here
                self.empty[stage].arrive()
                stage, phase = (stage + 1, phase) if stage + 1 < STAGES else (0, phase ^ 1)
                count += 1
                before = step
            last = (count & 1) ^ 1
            yield self.ds_full[2 * last + 1 - W].passed(((count - 1) >> 1) & 1)
            end = len(steps) - 1
            yield from self.finish_dq(W, unit, before, count, ((unit, end, 0), (unit, end, 1), unit))
            self.kv_empty.arrive()


def run(seed: int, mutant: str = "") -> Device:
    """All programs until they end: of those that may go on, any does, for a while. Some programs begin late."""
    random.seed(seed)
    device = Device(Case(seed), mutant)
    running: list[list] = []

    def start(role: Wait) -> None:
        running.append([role, lambda: True])

    late = [Program(device, start) for _ in range(random.choice((1, 2, 3, 7)))]
    favour = random.choice((0.0, 0.9))  # of the one that went last: warps that run far ahead of others
    last = None
    while running or late:
        if late and (not running or random.random() < 0.02):
            program = late.pop()
            for role in (program.copying(), program.keeping(), program.warpgroup(0), program.warpgroup(1)):
                start(role)
        able = [one for one in running if one[1]()]
        assert able or late, "all wait"
        if not able:
            continue
        one = last if last in able and random.random() < favour else random.choice(able)
        last = one
        try:
            one[1] = next(one[0])
        except StopIteration:
            running.remove(one)
    return device


def added_once_in_order(device: Device) -> bool:
    wanted = defaultdict(list)
    for unit in range(device.units):
        for place, _, _ in device.steps(unit):
            wanted[place].append(unit)
    return device.sums == {(place, W): units for place, units in wanted.items() for W in range(2)}


@pytest.mark.parametrize("seed", SEEDS)
def test_every_block_is_added_to_in_order_by_any_schedule(seed):
    assert added_once_in_order(run(seed))


@pytest.mark.parametrize("mutant", ["out of turn", "no wait for ds"])
def test_the_model_sees_what_is_left_out(mutant):
    def fails(seed: int) -> bool:
        try:
            return not added_once_in_order(run(seed, mutant))
        except AssertionError:
            return True

    assert any(fails(seed) for seed in SEEDS)
