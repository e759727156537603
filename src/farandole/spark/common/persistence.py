# Saving and loading of estimators and models, as Spark's own stages are: `stage.save(path)`, `Stage.load(path)`.
# Touches Spark's metadata files, and our pickles in Parquet next to them.
"""A saved stage contains code (pickles): load only files from sources that you trust."""

from __future__ import annotations

from typing import Any

from pyspark.ml.util import DefaultParamsReader, DefaultParamsWriter, MLReadable, MLReader, MLWritable, MLWriter
from pyspark.sql import SparkSession

from ...bindings.private import spark_names
from ...launch.calls import pack as serialize
from ...launch.calls import unpack as deserialize

spark_names.look_up_stages()
CHUNK = 4 << 20  # bytes of a row: Spark sends rows in messages


class Writer(MLWriter):
    """Writes the parameters of a stage, all in one pickle: an optimizer knows the parameters of its model."""

    def __init__(self, instance: Any) -> None:
        super().__init__()
        self.instance = instance

    def saveImpl(self, path: str) -> None:
        """For Spark."""
        spark = SparkSession.active()
        DefaultParamsWriter.saveMetadata(self.instance, path, spark, paramMap={})
        set_ones = [param for param in self.instance.params if self.instance.isSet(param)]
        values = {param.name: self.instance.getOrDefault(param) for param in set_ones}
        data = serialize(self.instance.freeze(values))
        rows = [(index, data[index : index + CHUNK]) for index in range(0, len(data), CHUNK)]
        spark.createDataFrame(rows, "place long, data binary").coalesce(1).write.parquet(f"{path}/values")


class Reader(MLReader[Any]):
    """Reads what the writer wrote."""

    def __init__(self, cls: Any) -> None:
        super().__init__()
        self.cls = cls

    def load(self, path: str) -> Any:
        """A stage like the one that was saved."""
        spark = SparkSession.active()
        metadata = DefaultParamsReader.loadMetadata(path, spark)
        stage = self.cls()
        found = f"{type(stage).__module__}.{type(stage).__name__}"
        if metadata["class"] != found:
            raise ValueError(f"{path} holds a {metadata['class']}, not a {found}")
        rows = spark.read.parquet(f"{path}/values").orderBy("place").collect()
        spark_names.take_uid(stage, metadata["uid"])
        stage._set(**stage.thaw(deserialize(b"".join(bytes(row["data"]) for row in rows))))
        return stage


class Saved(MLReadable[Any], MLWritable):
    """A stage that can be saved. Subclasses convert parameters that cannot be pickled."""

    def write(self) -> Writer:
        """For Spark, and for `stage.write().overwrite().save(path)`."""
        return Writer(self)

    @classmethod
    def read(cls) -> Reader:
        """For Spark."""
        return Reader(cls)

    def freeze(self, values: dict[str, Any]) -> dict[str, Any]:
        """Parameters in the form in which they are saved."""
        return values

    def thaw(self, values: dict[str, Any]) -> dict[str, Any]:
        """Parameters from their saved form."""
        return values
