"""A launch before a process serves: flags, policies, refusals, and how memory and requests are divided."""
