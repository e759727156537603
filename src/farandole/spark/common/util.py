# What scripts import from horovod.spark.common.util.
# Only re-exports names.
from .writing import clear_training_cache

__all__ = ["clear_training_cache"]
