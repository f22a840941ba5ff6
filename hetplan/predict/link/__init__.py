"""Laws of links: messages and collectives."""
