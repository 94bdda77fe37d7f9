"""Traces in, hit rates and latencies out."""
