"""The admin client, and what it and the commands ask of the controller."""
