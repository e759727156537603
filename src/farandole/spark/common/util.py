# What scripts import from horovod.spark.common.util.
# Re-exports alone.
from .writing import clear_training_cache

__all__ = ["clear_training_cache"]
