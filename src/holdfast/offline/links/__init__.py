"""The names of shared packs in a run: proving that two are equal, and replacing one by a link.

Repair uses it; `stored/copying/` has the proof of one pack. Read `shared_packs.py` first.
It never decides which steps or packs stay.
"""
