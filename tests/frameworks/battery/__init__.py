# The battery: what every framework's binding must do, as a table of cases that know no framework.
# Touches the modules beside it.
"""A framework writes a `Binding` and gets all cases; see binding.py, and run.py for how they are run."""
