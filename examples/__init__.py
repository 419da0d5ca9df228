"""Applications to run from the folder above: ``greenroom run examples.hello:app``."""
