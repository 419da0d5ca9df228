"""Servers of other makers as replicas: their processes, and the way of requests to them."""
