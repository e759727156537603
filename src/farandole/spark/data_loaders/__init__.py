# Horovod's data loaders of its estimators.
# Holds pytorch_data_loaders.py alone.
"""Stands where a script has `horovod.spark.data_loaders`."""
