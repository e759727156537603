# Who is in an elastic job, and with which generation: the decisions, and what they are made of.
# Its files touch base, and the messages of rendezvous; they open no socket and start no process.
