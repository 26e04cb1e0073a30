"""How the ranks of one job agree, through the key-value store only.

Saving, loading and `training/runs/` call it. Read `job.py` first, then `commit_vote.py` and `agreement/`.
It issues no collective after construction, every wait has a deadline, and it knows no tensor bytes.
"""
