"""How many replicas a backend should have, by its load.

``decision`` decides for one backend by its ``settings``. The cluster's autoscaler, which
keeps all backends, takes its steps and uses effects to ask users' policies. Pure.
"""
