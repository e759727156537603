# Tuning: which values of the settings that cannot change bits are the fastest here, found by measuring.
# The room's parts: search (pure), cache (a file), live (during training), at_init.
"""`live.Tuner` tunes a job that trains; `at_init.tune` measures once for each kind of hosts and stores the result."""
