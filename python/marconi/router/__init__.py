"""Which worker of a fleet holds which prefixes and states, and where to send a request."""
