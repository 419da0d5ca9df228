"""The router's decisions: backends, replicas, queues, limits, retries, mirroring. Pure."""
