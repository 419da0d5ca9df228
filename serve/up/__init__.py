"""``greenroom up``: machines that SSH reaches become one cluster, as a file says.

hosts_file.py is what is wanted, plan.py decides what differs, run.py does it host by host. ssh.py
alone runs something on a host: on_host.py, which is sent there and is no part of what runs here.
Only the command line calls this.
"""
