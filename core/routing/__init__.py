"""The router's decisions: which backend, which replica, queueing, limits, retries, mirroring.

A proxy holds one ``Router``, calls it with what callers and replicas send, and performs the effects
that it returns. Code that only follows queries is an ``Observer`` (tickets.py). Pure: values and
functions, without I/O, clock or randomness of its own. It uses nothing else of the core but the
errors. Dispatch leases will count as tickets do in ``balancing``, and be revoked where ``router``
queues a ticket, takes a table, or hears that a replica drains.
"""
