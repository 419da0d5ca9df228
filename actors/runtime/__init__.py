"""The parts of every process of Greenroom: loop, place in the actor system, settings, logs.

``actor`` is the base of our actors, other processes have a ``port`` instead, and scripts use a
``connection``. All other packages of ``greenroom.actors`` use this one.
"""
