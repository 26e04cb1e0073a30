"""Shipped tests: the suites that every implementation of a port must pass, and faults to put into one.

Whoever writes a store of their own subclasses the suite in their own tests. Nothing of the machine imports this.
"""
