"""The protocol vectors of topics/vectors against both pure cores."""
