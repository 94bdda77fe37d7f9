"""A server's events: where it tells them, from what, and what it says of that itself."""
