"""One way to start an agent: environment, process group, guardian, terminal, and the attempt loop."""
