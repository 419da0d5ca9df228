"""Several hosts as one cluster: membership, heartbeats, leadership, and the cluster's keys.

Each subject has two ends, the controller's and the host process's: those of membership are
``members`` and ``membership``, the others are in one module. ``controller_seeker`` follows whoever
leads. The decisions are in core/cluster; this package has the files, sockets and clocks. Proxies
and replicas use ``epoch_fence``.
"""
