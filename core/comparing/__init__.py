"""Whether two answers are the same, and how they differ if not.

Replicas of a shadow compare answers (``comparing``) and count the differences (``differences``);
the controller adds up their reports. Pure, except for the user's compare function.
"""
