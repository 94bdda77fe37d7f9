"""What a router in front of workers costs its requests, and how many streams it holds."""
