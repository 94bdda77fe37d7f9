"""What workers tell a router: the records of it, and how they travel."""
