"""The life of backends, releases, replicas, endpoints and applications. Pure."""
