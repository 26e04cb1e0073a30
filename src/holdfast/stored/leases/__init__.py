"""How jobs exclude each other through storage alone: the writer lease with its heartbeat, and reader leases.

`training/runs/`, saving and loading take them. Read `writer.py` first.
A lease never relies on the wall clock of another host.
"""
