"""HTTP: the sidecar that journals an agent's requests, and the command line that composes it all."""
