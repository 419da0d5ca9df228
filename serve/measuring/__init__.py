"""What is learned from traffic: recordings, and their replay against another version.

``recording`` keeps queries and answers of a running system, ``replaying`` runs them again and
compares. Both are clients: they ask the controller for what anyone may ask for.
"""
