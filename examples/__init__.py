"""Applications to run from the folder above: ``understudy run examples.hello:app``."""
