"""Frozen values that rooms exchange: plans, manifests, policies, events, reports.

Every room above imports them. Read `manifest.py` first.
They have no behaviour beyond what follows from their fields, and never touch a store, a clock or a thread.
"""
