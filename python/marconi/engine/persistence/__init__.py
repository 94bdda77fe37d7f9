"""States that outlive a server (`--marconi-save-dir`): their files, and the pools that they belong to."""
