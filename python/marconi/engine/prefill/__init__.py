"""How states are kept inside a prefill: planned before it, written at exactly their positions while it runs."""
