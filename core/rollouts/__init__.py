"""Moving traffic to a new backend step by step, and back if the evidence is against it.

Proxies count what becomes of queries (``judging.Tallies``, which observes the router). The cluster
gives their reports to ``rollouts``, which weighs them by ``judging`` and sets the traffic. Pure.
"""
