"""Requests, turns and releases of memory that would end a scheduler are refused."""
