"""A server's events: where it publishes them, from what, and what `GET /marconi` says of that."""
