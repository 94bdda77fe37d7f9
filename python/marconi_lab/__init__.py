"""The laboratory: what a replay compares with and no server offers, simulated fleets, and traces of single data sets.

The product finds it by entry points (`marconi/extensions.py`) and imports none of it; it imports no server.
"""
