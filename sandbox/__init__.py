"""Stand-ins for the world outside, which count what really happened, and example agents that call them.

Stands alone: standard library only, imports nothing of the other packages.
"""
