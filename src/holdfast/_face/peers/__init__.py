"""Opens a near tier of peers: for a job, for the agents of its nodes, and for a reader on one of them.

The modules of `_face/` import the room at the first such tier, since the wire needs h11. Read `place.py` first.
Nothing here moves bytes: `stored/peers/` does.
"""
