"""What an agent may import. Standard library only, so that it can be put beside any agent's own packages.

Agents need none of it: a request that passes the sidecar is journalled whatever sent it.
"""

__version__ = "0.1.0.dev0"
