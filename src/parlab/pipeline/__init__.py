"""Pipelines: `schedules` order the actions of each rank, `timeline` gives them times."""
