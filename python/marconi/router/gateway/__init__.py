"""The router as an HTTP server: an endpoint like a worker's own, in front of many."""
