"""Admission, which chooses the positions that get a state, and eviction."""
