"""Jobs: requests that outlive their connection, run by task consumers.

``consumers`` has what users write, ``queue`` the deployment that keeps a consumer's jobs and sends
them to it, ``log`` its durable part, ``callbacks`` the webhooks. What is decided is in
:mod:`greenroom.core.jobs`. To the rest of the system a queue is a deployment as any other: it
is placed, watched, restarted and routed to as those are.
"""
