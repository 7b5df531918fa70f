-- Keys of starts, the oldest first: those whose runs have long ended are forgotten (runtime.queue).
CREATE INDEX start_at ON twiceshy.start (at);
