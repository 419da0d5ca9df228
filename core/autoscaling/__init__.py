"""How many replicas a backend should have, by its load.

``decision`` decides for one backend, ``autoscaler`` keeps all backends and asks policies of users
by effects, and ``config`` has the settings. The cluster calls the autoscaler in each turn and gives
it the load reports of proxies. Pure.
"""
