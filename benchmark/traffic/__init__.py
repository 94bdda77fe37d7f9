"""Ordinary shapes of traffic on real servers: what of each prompt came from the cache, over what could have."""
