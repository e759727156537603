# The rendezvous room: the secret, the handshake, the hub where ranks meet, the mesh of links between them.
# The only sockets in Python, but for those of observe/ on loopback.
"""How the ranks of a job find and prove each other."""
