"""Sockets of the house: what the machine asks of stores, communication, frameworks and the clock.

Only Protocols and the few nouns they exchange live here. Implementations never import each other, only this.
"""
