"""Bounds that know the future: what an eviction rule could reach at most on a trace."""
