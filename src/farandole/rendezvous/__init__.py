# The rendezvous: the job's secret, the handshake, the hub that all ranks connect to, the links between ranks.
# It opens all sockets of the package, except those of observe/ on loopback.
"""How the ranks of a job find each other and prove that they belong to it."""
