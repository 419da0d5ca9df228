"""The side of whoever sends queries: HTTP workers, replicas with handles, scripts."""
