"""What decorates a deployment's methods: batches, and models by id."""
