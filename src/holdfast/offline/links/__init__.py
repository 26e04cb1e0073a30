"""The names of shared packs in a run: proving that two are equal, linking them again, copying a run with its links.

`offline_api` calls `relink.py` and `copy_run.py`; repair uses the proofs. Read `shared_packs.py` first.
It never decides which steps or packs stay.
"""
