"""Fixtures of the page."""

from browsing import html, visit  # noqa: F401
