"""What every process of Greenroom is made of: loop, place in the actor system, settings, logs.

``actor`` is the base of our actors, ``port`` what other processes have instead, ``connection`` a
script's way in. All other packages of ``greenroom.actors`` use this one.
"""
