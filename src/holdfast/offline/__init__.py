"""What is done to a checkpoint without a training job: diff, export, import, repair, copy.

Only `api`, `wiring` and `cli` call it. Each folder is one verb; read `diff/` first.
Nothing here runs on a training thread.
"""
