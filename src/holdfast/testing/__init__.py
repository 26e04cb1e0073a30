"""The suite that every store must pass, a store that records calls, and a proxy that injects faults of a network.

The author of a store subclasses the suite in tests of the author's own. Read `store.py` first. `calls.py` counts the
calls of a store, and `fault_proxy.py` stands between a client and a real server.
No module outside this room imports this room.
"""
