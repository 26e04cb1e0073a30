"""The agreement on a save: every rank states what it saves, and rank 0 decides whether all of them go ahead.

Only `training/saving/attempt.py` calls it. Read `save_agreement.py` first, then `decision.py`.
It moves no tensor bytes, and what it sends through the key-value store does not grow with the tensors of a rank.
"""
