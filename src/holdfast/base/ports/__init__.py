"""What the machine asks of its surroundings: stores, communication, frameworks, observers, foreign systems.

Every room above imports these Protocols and the few values they exchange. Read `store.py` first, then `comm.py`.
Beside a Protocol is only what several rooms of implementations share: bases of wrappers, an in-process store.
No port imports an implementation, and implementations never import each other.
"""
