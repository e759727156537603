# What scripts import from horovod.spark.common.util.
# Re-exports alone.
from .estimator import check_shapes
from .writing import clear_training_cache

__all__ = ["check_shapes", "clear_training_cache"]
