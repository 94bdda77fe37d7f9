"""The workers behind a router: what they say of themselves, and whether they can be trusted with a request."""
