"""Backends, releases, replicas, endpoints, applications: from what is wanted to what is. Pure."""
