"""The life of backends, releases, replicas, endpoints and applications, and their hard state. Pure.

Imports go one way: ``cluster`` uses ``rollouts``, both use this folder, and of the other folders it
uses only the settings of ``autoscaling`` and the tables of ``routing``.
"""
