"""A store behind the host tier (`--hicache-storage-backend`)."""
