"""HTTP: the routes of a server, and what requests and answers say of the cache."""
