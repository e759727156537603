"""Measurements that ship with the package: `python -m farandole.tools.bench allreduce` and `idle`.
__main__ starts the ranks and prints; worker measures inside them; report makes the tables."""
