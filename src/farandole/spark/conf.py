# Settings of Spark that elastic jobs may want, as pairs for SparkConf.setAll, under the names that Horovod gave them.
# Constants alone. Spark has renamed spark.blacklist to spark.excludeOnFailure since.
"""Failed: a task's attempt has failed there. Failing: tasks of a stage have. Faulty: tasks of the application have."""

SPARK_CONF_MAX_INT = str(2**31 - 1)
SPARK_CONF_MAX_INT_MINUS_ONE = str(2**31 - 2)  # where one more has to fit

# Without it Spark gives the application up when a task has failed four times.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

SPARK_CONF_BLACKLIST_DISABLED = ("spark.excludeOnFailure.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = ("spark.excludeOnFailure.enabled", "true")

# With the list enabled: whether executors and nodes are used again.
_TASK, _STAGE, _APPLICATION = (f"spark.excludeOnFailure.{level}" for level in ("task", "stage", "application"))
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_TASK}.maxTaskAttemptsPerExecutor", SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_TASK}.maxTaskAttemptsPerExecutor", "1")
SPARK_CONF_REUSE_FAILED_NODE = (f"{_TASK}.maxTaskAttemptsPerNode", SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_DONT_REUSE_FAILED_NODE = (f"{_TASK}.maxTaskAttemptsPerNode", "1")
SPARK_CONF_REUSE_FAILING_EXECUTOR = (f"{_STAGE}.maxFailedTasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_EXECUTOR = (f"{_STAGE}.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE = (f"{_STAGE}.maxFailedExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (f"{_STAGE}.maxFailedExecutorsPerNode", "1")
SPARK_CONF_REUSE_FAULTY_EXECUTOR = (f"{_APPLICATION}.maxFailedTasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAULTY_EXECUTOR = (f"{_APPLICATION}.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAULTY_NODE = (f"{_APPLICATION}.maxFailedExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAULTY_NODE = (f"{_APPLICATION}.maxFailedExecutorsPerNode", "1")
