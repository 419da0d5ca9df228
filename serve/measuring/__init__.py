"""What is learned from traffic: recordings, their replay against another version, and tuning.

``recording`` keeps queries and answers of a running system, ``replaying`` runs them again and
compares, ``tuning`` measures an application at settings of its own choice. All of them are clients:
they ask the controller for what anyone may ask for.
"""
