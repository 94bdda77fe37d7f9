"""Which positions get a state, and what goes first."""
