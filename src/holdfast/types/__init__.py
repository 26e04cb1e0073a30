"""Frozen values that rooms exchange: plans, manifests, policies, events, reports.

Every room above imports them. They have no behaviour beyond what follows from their fields.
They never touch a store, a clock or a thread.
"""
