"""Health of a saved state: non-finite values and replicas that differ, as the ranks of one save find them.

The commit calls it. Read `health_record.py` first.
It never fails a save.
"""
