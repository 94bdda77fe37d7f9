"""Operators on recurrent states: each a folder with a torch reference and, where it pays, a Triton kernel."""

__version__ = "0.1.0"
