"""The parts of every process of Greenroom: loop, place in the actor system, settings, logs.

``actor`` is the base of our actors, other processes have a ``port`` instead; ``records`` says which
processes a host has. All other packages of ``greenroom.actors`` use this one, which uses only
``actors.messages`` and ``actors.transport`` of them.
"""
