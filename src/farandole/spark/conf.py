# Settings of Spark for elastic jobs, as pairs for SparkConf.setAll, with Horovod's names.
# Only constants. Spark has renamed spark.blacklist to spark.excludeOnFailure.
"""FOR_SAME_TASK: whether the next attempts of a task run where one has failed. Without it: other tasks of the stage.
IN_APP: all tasks of the application. A node that is failing has executors on which tasks have failed."""

SPARK_CONF_MAX_INT = str(2**31 - 1)
SPARK_CONF_MAX_INT_MINUS_ONE = str(2**31 - 2)  # for settings to which Spark adds one

# Without it Spark ends the application when a task has failed four times.
SPARK_CONF_ALWAYS_RESTART_FAILED_TASK = ("spark.task.maxFailures", SPARK_CONF_MAX_INT)

SPARK_CONF_BLACKLIST_DISABLED = ("spark.excludeOnFailure.enabled", "false")
SPARK_CONF_BLACKLIST_ENABLED = ("spark.excludeOnFailure.enabled", "true")

# If exclusion is enabled: whether executors and nodes are used again after a failure.
_TASK, _STAGE, _APPLICATION = (f"spark.excludeOnFailure.{level}" for level in ("task", "stage", "application"))
SPARK_CONF_REUSE_EXECUTOR_ALWAYS_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_REUSE_EXECUTOR_ONCE_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerExecutor", "2")
SPARK_CONF_DONT_REUSE_EXECUTOR_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerExecutor", "1")
SPARK_CONF_REUSE_NODE_ALWAYS_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerNode", SPARK_CONF_MAX_INT_MINUS_ONE)
SPARK_CONF_REUSE_NODE_ONCE_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerNode", "2")
SPARK_CONF_DONT_REUSE_NODE_FOR_SAME_TASK = (f"{_TASK}.maxTaskAttemptsPerNode", "1")
SPARK_CONF_REUSE_FAILED_EXECUTOR = (f"{_STAGE}.maxFailedTasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR = (f"{_STAGE}.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE = (f"{_STAGE}.maxFailedExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE = (f"{_STAGE}.maxFailedExecutorsPerNode", "1")
SPARK_CONF_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_APPLICATION}.maxFailedTasksPerExecutor", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILED_EXECUTOR_IN_APP = (f"{_APPLICATION}.maxFailedTasksPerExecutor", "1")
SPARK_CONF_REUSE_FAILING_NODE_IN_APP = (f"{_APPLICATION}.maxFailedExecutorsPerNode", SPARK_CONF_MAX_INT)
SPARK_CONF_DONT_REUSE_FAILING_NODE_IN_APP = (f"{_APPLICATION}.maxFailedExecutorsPerNode", "1")

# The defaults of Spark.
SPARK_CONF_DEFAULT_VALUES = {
    "spark.task.maxFailures": "4",
    "spark.excludeOnFailure.enabled": "false",
    f"{_TASK}.maxTaskAttemptsPerExecutor": "1",
    f"{_TASK}.maxTaskAttemptsPerNode": "2",
    f"{_STAGE}.maxFailedTasksPerExecutor": "2",
    f"{_STAGE}.maxFailedExecutorsPerNode": "2",
    f"{_APPLICATION}.maxFailedTasksPerExecutor": "2",
    f"{_APPLICATION}.maxFailedExecutorsPerNode": "2",
}
