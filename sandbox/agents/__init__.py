"""Example agents: plain programs, to be started by path. They know their world and nothing of twiceshy."""
