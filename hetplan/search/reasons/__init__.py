"""Why a job has no plan: what cannot hold together, and the cheapest way out."""
