"""A classifier of handwritten digits, and a client that measures its accuracy over HTTP."""
