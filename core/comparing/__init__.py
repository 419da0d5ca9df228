"""Whether two answers are the same, and how they differ where they are not.

Replicas of a shadow compare (``comparing``) and count what they find (``differences``); the
controller adds up their reports. Pure, but for the user's compare function.
"""
