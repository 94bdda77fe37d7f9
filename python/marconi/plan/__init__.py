"""How to divide memory and by which rule to evict, for one kind of traffic."""
