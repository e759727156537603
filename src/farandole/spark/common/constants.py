# Constants of horovod.spark.common.constants, for programs that import them.
# Touches nothing.
"""Names of formats and limits of Horovod's readers. Farandole's readers use none of them."""

PETASTORM_HDFS_DRIVER = "libhdfs"
METRIC_PRINT_FREQUENCY = 100
ARRAY = "array"
CUSTOM_SPARSE = "custom_sparse_format"
NOCHANGE = "nochange"
MIXED_SPARSE_DENSE_VECTOR = "mixed_sparse_dense_vector"
SPARSE_VECTOR = "sparse_vector"
DENSE_VECTOR = "dense_vector"
TOTAL_BUFFER_MEMORY_CAP_GIB = 4
BYTES_PER_GIB = 1024**3
