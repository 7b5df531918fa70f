"""What is measured: each module one question, run as ``python -m bench.NAME``."""
