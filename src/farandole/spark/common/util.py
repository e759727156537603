# What scripts import from horovod.spark.common.util.
# Re-exports alone.
from .backend import active
from .estimator import check_shapes
from .writing import clear_training_cache

__all__ = ["active", "check_shapes", "clear_training_cache"]
