"""When a state will be used next, learned from how others like it were used."""
