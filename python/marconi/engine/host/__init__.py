"""A host tier below the cache (`--enable-hierarchical-cache`)."""
