# Seeing what a job does: the timeline and the log.
# Touches engine, config.
