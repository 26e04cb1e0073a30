"""Work within a training job: a save, a load, a run of steps, the agreement of ranks, events.

`_face/` and `offline/` call it. Read `saving/save.py` first.
No module here imports torch or a store: backends arrive as arguments.
"""
