"""Collectives: `schedules` says who sends what, `cost` prices it, `simulate` runs it on arrays."""
