"""Timings, side by side in one run. Never assertions: machines differ."""
