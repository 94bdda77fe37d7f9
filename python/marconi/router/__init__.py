"""Who of a fleet holds which prefix and which state, and where a request goes."""
