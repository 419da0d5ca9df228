"""What every process of ours is made of: loop, settings, place in the actor system, logs."""
