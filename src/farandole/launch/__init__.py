# The launch room: the command line, and starting the ranks of a job on this host.
# Only spawn.py starts processes.
"""How the ranks of a job are started and watched."""
