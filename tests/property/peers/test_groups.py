"""Groups, parity and degraded reads of any roster: sizes as designed, and every readable byte as it was saved."""

from __future__ import annotations

import math
import os
import random
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.plan.parity import PackStream, ParityInput, Stripe, Survival, survival, xor_into
from holdfast.core.plan.placement import Grouping, RosterNode, grouping
from holdfast.errors import CheckpointError, CorruptError, InvalidError, MissingError, UnavailableError
from tests.property.states import examples

NODES_MAX = 2000
EXAMPLES = int(os.environ.get("PEER_EXAMPLES", examples(40)))


def roster(count: int, seed: int) -> list[RosterNode]:
    """Return nodes in domains of unequal sizes, shuffled."""
    drawn = random.Random(seed)
    largest = drawn.choice((1, 2, max(count // 8, 1), count))
    nodes: list[RosterNode] = []
    while len(nodes) < count:
        domain = f"rack {len(nodes):04}"
        size = min(drawn.randint(1, largest), count - len(nodes))
        nodes += [RosterNode(f"node {len(nodes) + each:04}", domain) for each in range(size)]
    drawn.shuffle(nodes)
    return nodes


def check_grouping(nodes: list[RosterNode], group: int | None) -> None:
    count, found = len(nodes), grouping(nodes, group)
    g = group or (2 if count < 8 else 4)
    sizes = [len(members) for members in found.groups]
    assert sum(sizes) == count and {*chain(*found.groups)} == {node.name for node in nodes}
    assert min(g, count) <= min(sizes) and max(sizes) <= min(min(sizes) + 1, 2 * g - 1)
    assert count < 2 * g or max(sizes) < 1.5 * g + 1
    # A domain of at most N // g nodes never meets itself, and a larger one is told.
    domain_of = {node.name: node.domain for node in nodes}
    in_domain = Counter(domain_of.values())
    meets_itself = set()
    for members in found.groups:
        times = Counter(domain_of[name] for name in members)
        if len(times) < len(members):
            meets_itself |= {domain for domain in times if times[domain] > 1}
    assert meets_itself == set(found.large_domains)
    assert all(in_domain[domain] > count // g for domain in meets_itself)
    check_keepers(found, domain_of)


def check_keepers(found: Grouping, domain_of: dict[str, str]) -> None:
    count = len(domain_of)
    assert len(set(found.keepers)) == len(found.keepers) == min(count, 3)
    domains = {domain_of[name] for name in found.keepers}
    assert len(domains) == min(len(set(domain_of.values())), len(found.keepers))
    first, second = found.keepers[:2]
    assert any({first, second} <= {*members} for members in found.groups)


@pytest.mark.parametrize("group", [None, 2, 4, 7])
def test_groups_of_few_nodes_are_as_the_design_says(group: int | None) -> None:
    for count in range(group or 2, 160):
        check_grouping(roster(count, count), group)


def test_groups_of_any_size_are_as_the_design_says() -> None:
    for count in range(2, 33):
        for group in range(2, count + 1):
            check_grouping(roster(count, group), group)


def test_groups_of_many_nodes_are_as_the_design_says() -> None:
    for count in range(160, NODES_MAX + 1, 23):
        check_grouping(roster(count, count), None)
        check_grouping(roster(count, -count), 2 + count % 14)


@pytest.mark.long
def test_groups_of_every_number_of_nodes_are_as_the_design_says() -> None:
    for count in range(2, NODES_MAX + 1):
        check_grouping(roster(count, count), None if count % 2 else min(count, 2 + count // 2 % 30))


def test_the_order_of_the_nodes_does_not_matter() -> None:
    nodes = roster(41, 0)
    assert grouping(nodes) == grouping(sorted(nodes, key=lambda node: node.name))


def test_one_node_is_a_group_without_protection() -> None:
    assert grouping([RosterNode("a", "a")]) == (alone := Grouping((("a",),), ("a",), ())) and alone.node_share == 1
    assert survival([("a",)], {"a": 1}, set(), {"a"}) is Survival.PARTIAL
    assert Stripe((PackStream.of({"pack": 3}),)).pulls(0) == []
    assert Stripe((PackStream.of({"pack": 3}),)).parity_bytes(0) == 0


def test_a_wrong_roster_is_refused() -> None:
    three = [RosterNode(name, name) for name in "abc"]
    with pytest.raises(InvalidError, match=r"group=4\): expected 2 to 3, the number of nodes"):
        grouping(three, 4)
    with pytest.raises(InvalidError, match=r"group=1\): expected 2 to 3"):
        grouping(three, 1)
    with pytest.raises(InvalidError, match="nothing protects one node alone"):
        grouping(three[:1], 2)
    with pytest.raises(InvalidError, match=r"node 'b' is in the roster twice.*HOLDFAST_NODE"):
        grouping([*three, RosterNode("b", "c")])
    with pytest.raises(InvalidError, match="no nodes"):
        grouping([])


# ------------------------------------------------------------------------------------------------- bytes

Memory = dict[str, dict[str, bytes]]
"""Packs by key, by node."""


class Peers:
    """The memory of the nodes of a job, with parity as the members pull it."""

    def __init__(self, nodes: list[RosterNode], packs: Memory, group: int | None, unprotected: Collection[str]) -> None:
        self.groups = grouping(nodes, group).groups
        self.packs, self.parity = packs, dict[str, bytes]()
        self.bytes = {name: sum(map(len, held.values())) for name, held in packs.items()}
        self.protected = {node.name for node in nodes} - {*unprotected}
        self.lost: Collection[str] = ()
        for members in self.groups:
            stripe = self.stripe(members)
            for number, name in enumerate(members):
                if name in self.protected:
                    pulls = stripe.pulls(number)
                    assert number not in {each.member for each in pulls}
                    self.parity[name] = self.xor(members, pulls, stripe.parity_bytes(number))

    def stripe(self, members: tuple[str, ...]) -> Stripe:
        sizes = ({key: len(data) for key, data in self.packs[name].items()} for name in members)
        return Stripe(tuple(map(PackStream.of, sizes)))

    def survival(self) -> Survival:
        return survival(self.groups, self.bytes, {*self.packs} - {*self.lost}, self.protected)

    def xor(self, members: tuple[str, ...], inputs: Iterable[ParityInput], length: int) -> bytes:
        target = bytearray(length)
        for each in inputs:
            name = members[each.member]
            assert name not in self.lost, f"{name} is lost, and was asked"
            if each.key is None and name not in self.parity:
                raise UnavailableError(f"{name} has no parity")
            held = self.parity[name] if each.key is None else self.packs[name][each.key]
            assert 0 <= each.start < each.stop <= len(held)
            xor_into(target, each.at, memoryview(held)[each.start : each.stop])
        return bytes(target)

    def read(self, name: str, key: str, start: int, stop: int) -> bytes:
        if name not in self.lost:
            return self.packs[name][key][start:stop]
        members = next(members for members in self.groups if name in members)
        lost = [number for number, each in enumerate(members) if each in self.lost]
        inputs = self.stripe(members).rebuild(members.index(name), key, start, stop, lost)
        return self.xor(members, inputs, stop - start)

    def reads_back(self, drawn: random.Random) -> bool:
        """Read every pack, and a range of it; return whether all could be read. A wrong byte fails at once."""
        is_whole = True
        for name, held in self.packs.items():
            for key, data in held.items():
                start = drawn.randint(0, len(data))
                stop = drawn.randint(start, len(data))
                try:
                    assert self.read(name, key, 0, len(data)) == data
                    assert self.read(name, key, start, stop) == data[start:stop]
                except CheckpointError:
                    is_whole = False
        return is_whole


@dataclass(frozen=True)
class Job:
    """Nodes with their packs, drawn from a seed."""

    count: int
    group: int | None
    sizes: tuple[int, ...]
    seed: int

    def peers(self, drawn: random.Random, unprotected: int = 0) -> Peers:
        nodes = roster(self.count, drawn.randrange(2**32))
        packs = {
            node.name: {
                f"{node.name}/{number}": drawn.randbytes(drawn.choice(self.sizes))
                for number in range(drawn.randint(0, 4))
            }
            for node in nodes
        }
        return Peers(nodes, packs, self.group, drawn.sample(sorted(packs), min(unprotected, len(packs))))


JOBS = st.integers(1, 40).flatmap(
    lambda count: st.builds(
        Job,
        st.just(count),
        st.none() | st.integers(2, count) if count > 1 else st.none(),
        st.sampled_from(((0, 1, 2, 3), (17,), (0, 5, 64, 300), (1, 4096))),
        st.integers(0, 2**32 - 1),
    )
)


@settings(max_examples=EXAMPLES)
@given(JOBS)
def test_any_one_loss_is_read_back_bit_for_bit(job: Job) -> None:
    drawn = random.Random(job.seed)
    peers = job.peers(drawn)
    assert peers.survival() is Survival.WHOLE
    for name in peers.packs if job.count > 1 else ():
        peers.lost = {name}
        assert peers.survival() is (Survival.DEGRADED if peers.bytes[name] else Survival.WHOLE)
        assert peers.reads_back(drawn)


@settings(max_examples=EXAMPLES)
@given(JOBS, st.sampled_from((0, 0, 1, 3)))
def test_what_is_called_readable_is_read_back_and_the_rest_is_refused(job: Job, unprotected: int) -> None:
    drawn = random.Random(job.seed)
    peers = job.peers(drawn, unprotected)
    for losses in range(min(job.count, 6)):
        peers.lost = {*drawn.sample(sorted(peers.packs), losses)}
        is_readable, reads_back = peers.survival() is not Survival.PARTIAL, peers.reads_back(drawn)
        # A member without parity makes a step partial, although the lost stream may be too short to need that parity.
        assert reads_back if is_readable else (not reads_back or unprotected)


def test_a_group_of_two_holds_plain_copies() -> None:
    peers = Peers([RosterNode("a", "a"), RosterNode("b", "b")], {"a": {"y": b"34", "x": b"12"}, "b": {}}, None, ())
    assert peers.parity == {"a": b"", "b": b"1234"}


@pytest.mark.parametrize("members", [3, 4, 7])
def test_parity_of_equal_streams_takes_a_share_and_pulls_a_stream(members: int) -> None:
    stripe = Stripe((PackStream.of({"a": 100_003, "b": 7}),) * members)
    for number in range(members):
        assert stripe.parity_bytes(number) == math.ceil(100_010 / (members - 1))
        share_bytes = grouping(roster(members, 0), group=members).node_share * members * 100_010
        assert math.isclose(share_bytes, 100_010 + stripe.parity_bytes(number), abs_tol=1)
        pulled = sum(each.stop - each.start for each in stripe.pulls(number))
        assert abs(pulled - 100_010) < members
    reads = stripe.rebuild(0, "a", 5, 1005, [0])
    assert sorted(each.member for each in reads) == [*range(1, members)], "as many ranges as there are other members"
    assert sum(each.key is None for each in reads) == 1


def test_a_range_that_no_pack_has_is_refused() -> None:
    stripe = Stripe((PackStream.of({"a": 10, "c": 5}), PackStream.of({})))
    with pytest.raises(MissingError, match="b: not among the 2 packs"):
        stripe.rebuild(0, "b", 0, 1, [0])
    with pytest.raises(CorruptError, match="c: bytes 0 to 6 of 5"):
        stripe.rebuild(0, "c", 0, 6, [0])
    with pytest.raises(UnavailableError, match=r"members \[0, 1\] of a group of 2 are lost"):
        stripe.rebuild(0, "c", 0, 5, [0, 1])
