"""What users' code needs on a host: its folders and its packages, made once and shared."""
