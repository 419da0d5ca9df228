"""Code of users that decides for the controller or a proxy: policies and request routers.

It could block or end a process that all depends on, so it runs in a child process of that process:
``program`` is what the child runs, ``child`` the parent's end of it. ``routing`` has the classes
that request routers of users are made of.
"""
