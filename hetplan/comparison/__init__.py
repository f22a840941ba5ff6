"""A run beside its plan: which part of the step is off, and factors from measured runs."""
