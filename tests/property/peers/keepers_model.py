"""Keepers, losses, cuts, stale returns, writers, take-overs and removals, as a state machine by the real rules.

A world is a value, and `moves` yields each next world. The one thing that the model trusts is the root, as it stands
today: a record begins an epoch, one list goes with it, and only the newest epoch may put a list or a removal there.

- A keeper is on one of two sides, or lost. A side is cut off from the other. A replaced keeper comes back empty.
- A writer puts a manifest at the keepers of its roster, one by one. A request or its answer may get lost. A writer
  never ends: it goes on at any later time, also once another took over. It sees its side, and never asks the root.
- A take-over is on side 0. It begins an epoch at the root, asks each node that it reaches, copies to its own keepers
  what counts, and puts the list at the root. It may end at any time. Then it is a writer, or it was a removal.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from holdfast.base.types.epoch import Fence
from holdfast.errors import CheckpointError
from tests.property.peers import keepers_rules as keepers
from tests.property.peers.keepers_rules import Admission, Answer, Kept, Mark, NoManifest, PutOutcome

LOST = -1
NONE: frozenset[Kept] = frozenset()


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules that are checked. A mutant replaces one."""

    may_learn: Callable[[Mark, Mark], bool] = keepers.may_learn
    refusal: Callable[[Mark, Mark], NoManifest | None] = keepers.refusal
    put_outcome: Callable[[Kept, Sequence[Answer], int], PutOutcome] = keepers.put_outcome
    refusal_of_repair: Callable[[Mark, Mark], NoManifest | None] = keepers.refusal
    read: Callable[[Sequence[Answer]], tuple[Kept | None, list[int]]] = keepers.read
    settled_on_return: Callable[[Collection[Kept], Admission], frozenset[Kept]] = keepers.settled
    settled_in_list: Callable[[Collection[Kept], Admission], frozenset[Kept]] = keepers.settled
    too_few_copies: Callable[[Collection[Kept], Sequence[Collection[Kept]]], list[Kept]] = keepers.too_few_copies
    may_put: Callable[[int, Admission, Collection[Kept]], bool] = keepers.may_put


class Decision(NamedTuple):
    """An admission that can be a member of a set."""

    epoch: int
    revision: int
    accepted: frozenset[tuple[int, str]] = frozenset()
    excluded: frozenset[tuple[int, str]] = frozenset()

    @property
    def mark(self) -> Mark:
        return self.epoch, self.revision


@cache
def admission(decision: Decision) -> Admission:
    fence = Fence(decision.epoch, dict(decision.accepted))
    return Admission(fence, decision.revision, decision.excluded)


class Keeper(NamedTuple):
    side: int = 0
    mark: Mark = keepers.NO_MARK
    held: frozenset[Kept] = NONE


class Writer(NamedTuple):
    epoch: int
    side: int
    roster: tuple[int, ...]
    root: Decision
    """The root's decision, as the writer knows it."""
    put: Kept | None = None
    answers: tuple[Answer, ...] = ()
    would_be_wrong: bool = False
    """Whether the last manifest must not be acknowledged: a take-over that cut this writer off has not listed it."""
    tried: tuple[Kept, ...] = ()
    read: Kept | None = None
    """A manifest that the writer has read, and has not yet put where it lacks."""


class TakeOver(NamedTuple):
    epoch: int
    roster: tuple[int, ...]
    before: Decision
    asked: frozenset[int] = frozenset()
    listed: frozenset[Kept] = NONE
    copied: frozenset[int] = frozenset()
    is_done: bool = False


class Budget(NamedTuple):
    """How much may still happen."""

    losses: int
    cuts: int
    drops: int
    """Requests and answers that get lost."""
    removals: int
    epochs: int
    """The last epoch."""
    puts: int
    """Manifests that each writer puts."""
    steps: int = 1
    reads: int = 1
    retries: int = 0
    """Puts of a manifest whose outcome is unknown."""


class World(NamedTuple):
    keepers: tuple[Keeper, ...]
    writers: tuple[Writer, ...]
    takeovers: tuple[TakeOver, ...]
    newest: int
    """The epoch of the newest record at the root."""
    root: Decision
    acked: frozenset[Kept]
    """Manifests that were acknowledged and that the design promises to keep."""
    removed: frozenset[Kept]
    budget: Budget

    def with_keeper(self, number: int, keeper: Keeper) -> World:
        return self._replace(keepers=replaced(self.keepers, number, keeper))

    def with_writer(self, number: int, writer: Writer) -> World:
        return self._replace(writers=replaced(self.writers, number, writer))

    def with_takeover(self, number: int, takeover: TakeOver) -> World:
        return self._replace(takeovers=replaced(self.takeovers, number, takeover))

    def spend(self, what: str) -> World:
        return self._replace(budget=self.budget._replace(**{what: getattr(self.budget, what) - 1}))


def replaced(values: tuple, number: int, value: object) -> tuple:
    return (*values[:number], value, *values[number + 1 :])


def first_world(nodes: int, budget: Budget) -> World:
    """Return a world with one writer, whose keepers know it."""
    root = Decision(1, 1)
    roster = tuple(range(min(nodes, 3)))
    states = tuple(Keeper(mark=root.mark if number in roster else keepers.NO_MARK) for number in range(nodes))
    return World(states, (Writer(1, 0, roster, root),), (), 1, root, NONE, NONE, budget)


class Violation(AssertionError):
    """A world in which something is wrong."""


Move = tuple[str, World]


@dataclass(frozen=True, slots=True)
class Model:
    """All that may happen, by some rules."""

    rules: Rules = Rules()

    def moves(self, world: World) -> Iterator[Move]:
        """Yield each move with the next world.

        Raises:
            Violation: A move acknowledges or forgets what it must not.
        """
        yield from self._mishaps(world)
        for number, writer in enumerate(world.writers):
            if writer.put is None:
                yield from self._begin(world, number, writer)
                yield from self._retry(world, number, writer)
            else:
                yield from self._ask(world, number, writer)
            yield from self._attach(world, number, writer)
            yield from self._read(world, number, writer)
            yield from self._discard(world, number, writer)
        if world.newest < world.budget.epochs:
            roster = tuple(number for number, keeper in enumerate(world.keepers) if keeper.side == 0)[:3]
            if roster:
                takeover = TakeOver(world.newest + 1, roster, world.root)
                started = world._replace(takeovers=(*world.takeovers, takeover), newest=takeover.epoch)
                yield f"epoch {takeover.epoch} begins with keepers {roster}", started
        for number, takeover in enumerate(world.takeovers):
            if takeover.epoch == world.newest and not takeover.is_done:
                yield from self._take_over(world, number, takeover)

    # ------------------------------------------------------------------------------------------- mishaps

    def _mishaps(self, world: World) -> Iterator[Move]:
        for number, keeper in enumerate(world.keepers):
            if keeper.side == LOST:
                yield f"keeper {number} is replaced by an empty one", world.with_keeper(number, Keeper())
                continue
            if world.budget.losses:
                yield f"keeper {number} is lost", world.with_keeper(number, Keeper(LOST)).spend("losses")
            if world.budget.cuts:
                moved = world.with_keeper(number, keeper._replace(side=1 - keeper.side))
                yield f"keeper {number} goes to side {1 - keeper.side}", moved.spend("cuts")
        for number, writer in enumerate(world.writers):
            if world.budget.cuts:
                moved = world.with_writer(number, writer._replace(side=1 - writer.side))
                yield f"writer {writer.epoch} goes to side {1 - writer.side}", moved.spend("cuts")

    # ------------------------------------------------------------------------------------------- a writer

    def _begin(self, world: World, number: int, writer: Writer) -> Iterator[Move]:
        if len(writer.tried) >= world.budget.puts:
            return
        for step in range(1, world.budget.steps + 1):
            if self.rules.may_put(step, admission(writer.root), writer.tried):
                put = Kept(step, writer.epoch, f"{writer.epoch}.{len(writer.tried)}")
                begun = writer._replace(put=put, would_be_wrong=False, tried=(*writer.tried, put))
                yield f"writer {writer.epoch} puts {put.digest} as step {step}", world.with_writer(number, begun)

    def _retry(self, world: World, number: int, writer: Writer) -> Iterator[Move]:
        """Put the last manifest again: the writer does not know whether it counts."""
        for last in writer.tried[-1:]:
            if world.budget.retries and last not in world.acked and admission(writer.root).admits(last):
                again = world.with_writer(number, writer._replace(put=last)).spend("retries")
                yield f"writer {writer.epoch} puts {last.digest} again", again

    def _ask(self, world: World, number: int, writer: Writer) -> Iterator[Move]:
        """Ask the next keeper."""
        at = writer.roster[len(writer.answers)]
        keeper, put = world.keepers[at], writer.put
        assert put is not None
        name = f"keeper {at} answers writer {writer.epoch}"
        if keeper.side != writer.side:
            yield f"{name}: no answer", self._answered(world, number, writer, NoManifest.SILENT)
            return
        answer, stored = put_if_absent(keeper, put, self.rules.refusal(keeper.mark, writer.root.mark))
        after = world.with_keeper(at, stored)
        if after != world and keeper.mark[0] > writer.epoch:
            writer = writer._replace(would_be_wrong=True)
        yield f"{name}: {answer}", self._answered(after, number, writer, answer)
        if world.budget.drops:
            yield f"{name}: lost", self._answered(after.spend("drops"), number, writer, NoManifest.SILENT)
            if after != world:
                lost = self._answered(world.spend("drops"), number, writer, NoManifest.SILENT)
                yield f"{name}: never asked", lost

    def _answered(self, world: World, number: int, writer: Writer, answer: Answer) -> World:
        answers, put = (*writer.answers, answer), writer.put
        assert put is not None
        if len(answers) < len(writer.roster) and answer in (put, NoManifest.SILENT, NoManifest.BEHIND):
            return world.with_writer(number, writer._replace(answers=answers))
        world = world.with_writer(number, writer._replace(put=None, answers=()))
        if self.rules.put_outcome(put, answers, len(writer.roster)) is PutOutcome.STORED:
            return acknowledged(world, writer, put, answers)
        return world

    def _attach(self, world: World, number: int, writer: Writer) -> Iterator[Move]:
        """A keeper learns the decision of the root from a writer, keeps what counts, and drops the rest."""
        for at in writer.roster:
            keeper = world.keepers[at]
            if keeper.side != writer.side or not self.rules.may_learn(keeper.mark, writer.root.mark):
                continue
            others = (
                other.held
                for other in (world.keepers[each] for each in writer.roster)
                if other.side == writer.side and other.mark == writer.root.mark
            )
            held = self.rules.settled_on_return(keeper.held.union(*others), admission(writer.root))
            attached = world.with_keeper(at, keeper._replace(mark=writer.root.mark, held=held))
            yield f"keeper {at} learns {writer.root.mark}", attached

    def _read(self, world: World, number: int, writer: Writer) -> Iterator[Move]:
        """A writer reads a step; later it puts the manifest where it lacks, one keeper at a time."""
        if writer.read is not None:
            yield "reader forgets", world.with_writer(number, writer._replace(read=None))
            for at in writer.roster:
                keeper = world.keepers[at]
                if keeper.side == writer.side:
                    refusal = self.rules.refusal_of_repair(keeper.mark, writer.root.mark)
                    _, stored = put_if_absent(keeper, writer.read, refusal)
                    if stored != keeper:
                        yield f"keeper {at} is given {writer.read.digest} again", world.with_keeper(at, stored)
            return
        if not world.budget.reads:
            return
        for step in range(1, world.budget.steps + 1):
            answers = [self._get(world.keepers[at], writer, step) for at in writer.roster]
            try:
                found, lacking = self.rules.read(answers)
            except CheckpointError:
                continue
            left_out = [kept for kept in world.acked if kept.step == step and admission(writer.root).admits(kept)]
            if found is None and writer.root == world.root and left_out:
                raise Violation(f"writer {writer.epoch} reads {answers}, so no step {step}; acknowledged is {left_out}")
            if lacking:
                read = world.with_writer(number, writer._replace(read=found)).spend("reads")
                yield f"writer {writer.epoch} reads step {step}", read

    def _get(self, keeper: Keeper, writer: Writer, step: int) -> Answer:
        if keeper.side != writer.side:
            return NoManifest.SILENT
        refusal = self.rules.refusal(keeper.mark, writer.root.mark)
        return refusal or next((kept for kept in keeper.held if kept.step == step), NoManifest.ABSENT)

    def _discard(self, world: World, number: int, writer: Writer) -> Iterator[Move]:
        """The writer of the newest epoch removes a step of its own: it went back."""
        if not world.budget.removals or world.newest != writer.epoch or writer.put is not None:
            return
        for kept in sorted_kept(world.acked):
            if admission(world.root).admits(kept):
                excluded = world.root.excluded | {(kept.step, kept.digest)}
                root = world.root._replace(revision=world.root.revision + 1, excluded=excluded)
                gone = world.with_writer(number, writer._replace(root=root, read=None)).spend("removals")
                removed = gone._replace(root=root, acked=world.acked - {kept}, removed=world.removed | {kept})
                yield f"writer {writer.epoch} removes {kept.digest}", removed

    # ------------------------------------------------------------------------------------------- a take-over

    def _take_over(self, world: World, number: int, takeover: TakeOver) -> Iterator[Move]:
        """Ask every node, copy what counts, put the list."""
        mark = (takeover.epoch, 0)
        reached = [at for at, keeper in enumerate(world.keepers) if keeper.side == 0]
        name = f"epoch {takeover.epoch}"
        for at in reached:
            keeper = world.keepers[at]
            if at not in takeover.asked and self.rules.may_learn(keeper.mark, mark):
                asked = takeover._replace(
                    asked=takeover.asked | {at}, listed=takeover.listed | keeper.held, copied=frozenset()
                )
                after = world.with_keeper(at, keeper._replace(mark=mark))
                yield f"{name} asks keeper {at}", after.with_takeover(number, asked)
        if not all(at in takeover.asked for at in reached):
            return
        listed = self.rules.settled_in_list(takeover.listed, admission(takeover.before))
        steps = {kept.step for kept in listed}
        for at in takeover.roster:
            keeper = world.keepers[at]
            if at in reached and at not in takeover.copied and keeper.mark == mark:
                held = frozenset(kept for kept in keeper.held if kept.step not in steps) | listed
                copied = takeover._replace(copied=takeover.copied | {at})
                after = world.with_keeper(at, keeper._replace(held=held)).with_takeover(number, copied)
                yield f"{name} copies to keeper {at}", after
        if not self.rules.too_few_copies(listed, [listed if at in takeover.copied else NONE for at in takeover.roster]):
            yield f"{name} puts its list", with_list(world, number, takeover, listed, None)
            for removed in sorted_kept(listed) if world.budget.removals else ():
                yield f"{name} removes {removed.digest}", with_list(world, number, takeover, listed, removed)


def put_if_absent(keeper: Keeper, put: Kept, refusal: NoManifest | None) -> tuple[Answer, Keeper]:
    """Return the answer of a keeper to a put, and the keeper after it."""
    if refusal is not None:
        return refusal, keeper
    there = next((kept for kept in keeper.held if kept.step == put.step), put)
    return there, keeper._replace(held=keeper.held | {there})


def with_list(world: World, number: int, takeover: TakeOver, listed: frozenset[Kept], removed: Kept | None) -> World:
    """Return the world once the list is at the root.

    Raises:
        Violation: The list lacks an acknowledged step that a reachable keeper holds.
    """
    left = listed - {removed}
    root = Decision(takeover.epoch, 1, frozenset((kept.step, kept.digest) for kept in left))
    after = world.with_takeover(number, takeover._replace(is_done=True))._replace(root=root)
    if removed is not None:
        after = after._replace(acked=after.acked - {removed}, removed=after.removed | {removed}).spend("removals")
    else:
        after = after._replace(writers=(*after.writers, Writer(takeover.epoch, 0, takeover.roster, root)))
    there = NONE.union(*(keeper.held for keeper in world.keepers if keeper.side == 0))
    for at, writer in enumerate(world.writers):
        if there.intersection(writer.tried[-1:]) - left:
            after = after.with_writer(at, writer._replace(would_be_wrong=True))
    for kept in after.acked - left:
        if kept in there:
            raise Violation(f"the list of epoch {takeover.epoch} leaves out {kept}, which a reachable keeper holds")
    # The others were lost with all their keepers, or are behind a cut.
    return after._replace(acked=after.acked & left)


def acknowledged(world: World, writer: Writer, put: Kept, answers: Sequence[Answer]) -> World:
    """Return the world once a manifest is acknowledged.

    Raises:
        Violation: Too few keepers of the roster have it, or a take-over that cut the writer off has not listed it.
    """
    needed = min(len(writer.roster), 2)
    if answers.count(put) < needed:
        raise Violation(f"{put} is acknowledged by {answers}; expected {needed} keepers of the roster {writer.roster}")
    if NoManifest.NEWER in answers:
        raise Violation(f"{put} is acknowledged, although a keeper says that another writer took over")
    if put in world.removed:
        return world
    if admission(world.root).admits(put):
        return world._replace(acked=world.acked | {put})
    if writer.would_be_wrong:
        raise Violation(f"{put} is acknowledged, and a take-over that reached its keepers has not listed it")
    # The design promises nothing to a writer with two keepers behind a cut.
    return world


def check(world: World) -> None:
    """Look for a step that counts twice, one that was removed and counts, and one that a read leaves out.

    Raises:
        Violation: There is one.
    """
    root = admission(world.root)
    counting = [kept for kept in world.acked if root.admits(kept)]
    standing = {kept.step: kept for kept in counting}
    if len(standing) < len(counting):
        raise Violation(f"a step counts twice: {counting}")
    if any(map(root.admits, world.removed)):
        raise Violation(f"one of {world.removed} was removed, and counts")
    serving = {number: keeper for number, keeper in enumerate(world.keepers) if keeper.mark == world.root.mark}
    for number, keeper in serving.items():
        for kept in keeper.held:
            if kept in world.removed or not root.admits(kept):
                raise Violation(f"keeper {number} gives {kept}, which does not count")
            if standing.get(kept.step, kept) != kept:
                raise Violation(f"keeper {number} gives {kept}; acknowledged is {standing[kept.step]}")
    roster = next((writer.roster for writer in world.writers if writer.epoch == world.root.epoch), ())
    for kept in counting:
        without = [number for number in roster if number in serving and kept not in serving[number].held]
        if without and len(without) >= min(len(roster), 2):
            raise Violation(f"{kept} is acknowledged, and keepers {without} of {roster} call the step absent")


def sorted_kept(kept: Collection[Kept]) -> list[Kept]:
    return sorted(kept, key=lambda each: (each.step, each.epoch, each.digest))


def search(model: Model, start: World) -> Collection[World]:
    """Return every world that can be reached. The nearest are looked at first, so the moves to a violation are few.

    Raises:
        Violation: Something is wrong; the text has the moves that lead there.
    """
    origins: dict[World, tuple[World, str] | None] = {start: None}
    ahead = deque([start])
    while ahead:
        world = last = ahead.popleft()
        try:
            for name, after in model.moves(world):
                if after not in origins:
                    origins[after] = world, name
                    last = after
                    check(after)
                    last = world
                    ahead.append(after)
        except Violation as error:
            raise Violation(f"{error}. Moves: {'; '.join(path_to(last, origins))}") from None
    return origins.keys()


def path_to(world: World, origins: Mapping[World, tuple[World, str] | None]) -> list[str]:
    """Return the moves that lead to a world."""
    names: list[str] = []
    origin = origins[world]
    while origin is not None:
        world, name = origin
        names.append(name)
        origin = origins[world]
    return names[::-1]
