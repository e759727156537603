# Tuning: which values of the settings that cannot change bits are the fastest here, found by measuring.
# The room's parts: search (pure), cache (a file), live (during training), first (at init).
"""`live.Tuner` tunes a job that trains; `first.tune` measures once per host shape and remembers."""
