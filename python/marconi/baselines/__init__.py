"""Baselines, bounds and block caches: what a replay compares with, and no server offers."""
