"""Laws of operators: products, attention, what moves bytes."""
