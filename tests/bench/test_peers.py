"""The bench of peers: its keys, and a small roster on paper."""

from __future__ import annotations

from bench import peers, peers_memory, peers_on_paper, peers_protecting, peers_recovery, peers_training, peers_wire
from bench.goals import GOALS
from bench.parts import PEERS_PARTS


def test_what_is_measured_becomes_every_key_and_each_has_a_goal() -> None:
    found = {
        **peers_protecting.keys([{"protect": 2.0, "limit": 1.0}], {}),
        **peers_recovery.keys([{"recover": 4.0, "limit": 3.0}], {}),
        **peers_recovery.keys([{"slow": 4.0, "even": 2.0}], {}),
        **peers_wire.keys([{"wire_cpu": 3.0, "sockets_cpu": 2.0}], {}),
        **peers_memory.keys([{"peak": 2.7}], {}),
        **peers_training.step_keys([{"with": 3.0, "without": 2.0}, {"with": 1.0, "without": 2.0}], {}),
        **peers_training.reduce_keys([{"beside": 1.1, "alone": 1.0}], {}),
    }
    assert {name: spread.median for name, spread in found.items()} == {
        "protect_vs_limit": 0.5,
        "recover_node_vs_limit": 0.75,
        "load_with_slow_peer": 2.0,
        "wire_cpu_vs_sockets": 1.5,
        "peers_memory_vs_state": 2.7,
        "peers_train_slowdown": 1.0,
        "all_reduce_slowdown": 1.1,
    }
    assert set(found) <= {goal.key for goal in GOALS}
    assert {part.name for part in peers.PARTS} <= set(PEERS_PARTS)


def test_nodes_on_paper_are_looked_at_by_the_real_code() -> None:
    found = peers_on_paper.measured(12, 1)
    assert min(found.values()) > 0
    assert {"peers_all_seconds_12", "peers_plans_seconds_12"} <= set(found)
