"""Checkpoints in int8 (`--enable-int8-mamba-checkpoint`): states of the tree, rounded once, in a pool of their own."""
