"""Plans for other aims than the shortest step: robust, cheap, or a choice of several."""
