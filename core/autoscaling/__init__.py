"""How many replicas a backend should have, by its load.

``decision`` decides for one backend, ``autoscaler`` keeps all backends and uses effects to ask
users' policies, and ``config`` has the settings. The cluster calls the autoscaler in each turn and
passes it the proxies' load reports. Pure.
"""
