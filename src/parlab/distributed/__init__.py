"""Real processes: everything here needs torch, and nothing elsewhere in parlab imports it."""
