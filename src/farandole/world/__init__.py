# The world: from init to shutdown, this process's engine, process sets, tuning, the timeline and the log.
# Its files touch base, engine, rendezvous and clusters.
