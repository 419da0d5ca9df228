"""User code on its way to replicas: found, packed, hashed."""
