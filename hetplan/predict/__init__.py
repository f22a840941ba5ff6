"""From samples to times with intervals, for shapes nobody measured."""
