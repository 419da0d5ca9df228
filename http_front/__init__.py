"""The HTTP front: a Falcon ASGI app under gunicorn, and its link to the router."""
