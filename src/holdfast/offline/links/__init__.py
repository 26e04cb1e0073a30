"""The names of shared packs in a run: proving that two are equal, and linking them again.

`offline_api` calls `relink.py`; repair uses the proofs. Read `shared_packs.py` first.
It never decides which steps or packs stay.
"""
