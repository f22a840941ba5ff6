"""From a plan to its step: layers, stages, hops and pipelines, priced and composed."""
