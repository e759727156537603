# The battery: what every framework's binding must do, as a table of cases for any framework.
# Touches the modules of this folder.
"""A framework writes a `Binding` and gets all cases; see binding.py, and run.py for how they are run."""
