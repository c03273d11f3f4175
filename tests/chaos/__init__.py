"""Chaos: real services and processes, killed, frozen and robbed by a seed; a checker judges their own history."""
