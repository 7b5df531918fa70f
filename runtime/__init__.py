"""Durable state and all that acts on it: journal, runs, leases, the launcher, the keeper.

``runtime`` never imports ``proxy``; import-linter holds that (see pyproject.toml).
"""
