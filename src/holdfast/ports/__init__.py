"""What the machine asks of its surroundings: stores, communication, frameworks, observers, foreign systems.

Every room above imports these Protocols and the few values they exchange. Read `store.py` first, then `comm.py`.
No implementation is here, and implementations never import each other.
"""
