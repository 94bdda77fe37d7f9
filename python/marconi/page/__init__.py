"""Pages for a browser: the style and the charts that all of them share, and how a page becomes one file."""
