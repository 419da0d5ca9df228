"""The router's decisions: which backend, which replica, queueing, limits, retries, mirroring.

A proxy holds one ``Router``, calls it with what callers and replicas send, and performs the effects
that it returns. Code that only follows queries is an ``Observer`` (tickets.py). Pure: values and
functions, without I/O, clock or randomness of its own. It uses nothing else of the core but the
errors. Callers that send many queries get dispatch leases (leases.py), under which queries do not
pass a router at all.
"""
