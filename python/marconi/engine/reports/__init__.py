"""A cache's reports on itself: status, metrics, explanations, the record of requests and the live page."""
