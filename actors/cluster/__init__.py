"""Several hosts: who is a member, who is alive, who leads."""
