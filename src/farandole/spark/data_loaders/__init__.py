# Horovod's data loaders of its estimators.
# Holds pytorch_data_loaders.py alone.
"""Replaces `horovod.spark.data_loaders` in scripts."""
