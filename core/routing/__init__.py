"""The router's decisions: which backend, which replica, queueing, limits, retries, mirroring.

A proxy holds one ``Router``, calls it with what callers and replicas send, and performs the effects
that it returns. The state and the steps of queries are in dispatching.py. Code that only follows
queries is an ``Observer`` (tickets.py). Pure: values and functions, without I/O or clock; its
chance is the ``draw`` it is given, but for the keys of new sessions. Of the core it uses the
config, the errors and the formats. Callers that send many queries get dispatch leases (leases.py),
under which queries do not pass a router at all.
"""
