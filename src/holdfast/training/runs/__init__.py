"""A run is a directory of steps: which steps are saved, kept, deleted, tagged and resumed from.

`CheckpointManager` and `api` call it. Read `step_request.py` first.
It drives saving and loading and never touches tensor bytes.
"""
