"""Whether two answers are the same, and how they differ where they are not. Pure."""
