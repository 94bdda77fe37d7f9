"""States that outlive a server (`--marconi-save-dir`): their files, and the pools that they come from and go to."""
