"""Several hosts as one cluster: membership, heartbeats, leadership, and the cluster's keys.

Each subject has two ends: the controller's (``members``, ``leader_lease``) and the host process's
(``membership``, ``election``). The decisions are in core/cluster; this package has the files,
sockets and clocks. Proxies and replicas use ``epoch_fence``.
"""
