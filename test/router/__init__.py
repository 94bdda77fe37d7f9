"""The router: what it believes of a fleet, and where it sends requests."""
