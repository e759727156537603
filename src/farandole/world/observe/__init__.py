# What a job shows of its work: the timeline and the log.
# Touches engine, config.
