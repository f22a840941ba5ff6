"""Device kinds without samples, by the laws of other kinds."""
