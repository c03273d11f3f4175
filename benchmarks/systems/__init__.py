"""The systems that are compared, each with its recommended settings."""
