"""Our own actor transport; the modules named here are its protocol, free of any I/O."""
