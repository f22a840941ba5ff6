"""Lower bounds of whole families: without an order of islands, and with what crossings cost."""
