"""How ranks talk to each other: groups with their backends, messages, sums, and what they carry."""
