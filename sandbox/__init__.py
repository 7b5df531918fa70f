"""The world outside, to be hurt at will: stand-ins that count what really happened, and example agents."""
