"""The cluster as a whole: hosts, requests of clients, status, the leader's lease. Pure."""
