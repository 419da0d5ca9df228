"""Traffic moved to a new backend step by step, and back where the evidence says so. Pure."""
