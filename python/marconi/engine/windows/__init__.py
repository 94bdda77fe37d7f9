"""Hybrid models with sliding windows: the KV that layers with a window keep, beside states."""
