"""The cluster's hard state as a whole: hosts, placement, long poll, the leader's lease. Pure."""
