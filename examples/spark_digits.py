"""A pipeline of Spark MLlib with a network in it: assembler, TorchEstimator, classes from its outputs, evaluator.
Run it as it is, `python spark_digits.py`, or on a cluster: `spark-submit spark_digits.py --store /shared/folder`."""

import argparse
import tempfile

import torch
from farandole.spark.common.store import Store  # or: from horovod.spark.common.store import Store
from farandole.spark.torch import TorchEstimator
from pyspark.ml import Pipeline
from pyspark.ml.evaluation import MulticlassClassificationEvaluator
from pyspark.ml.feature import SQLTransformer, VectorAssembler
from pyspark.sql import SparkSession
from sklearn.datasets import load_digits


def main(store: str, ranks: int, epochs: int) -> None:
    spark = SparkSession.builder.config("spark.ui.enabled", "false").getOrCreate()
    images, labels = load_digits(return_X_y=True)
    names = [f"pixel{n}" for n in range(64)]
    rows = [(*map(float, image / 16), float(label)) for image, label in zip(images, labels, strict=True)]
    digits = spark.createDataFrame(rows, [*names, "label"])
    train, test = digits.randomSplit([0.8, 0.2], seed=1)

    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 10))
    estimator = TorchEstimator(
        num_proc=ranks,
        store=Store.create(store),
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
        loss=torch.nn.CrossEntropyLoss(),
        feature_cols=["features"],
        label_cols=["label"],
        validation=0.1,
        batch_size=32,
        epochs=epochs,
        partitions_per_process=1,
    )
    spark.udf.register("argmax", lambda vector: float(vector.argmax()), "double")
    pipeline = Pipeline(
        stages=[
            VectorAssembler(inputCols=names, outputCol="features"),
            estimator,
            SQLTransformer(statement="SELECT *, argmax(label__output) AS prediction FROM __THIS__"),
        ]
    )
    fitted = pipeline.fit(train)
    accuracy = MulticlassClassificationEvaluator(metricName="accuracy").evaluate(fitted.transform(test))
    print(f"accuracy {accuracy:.1%} with {ranks} ranks after {len(fitted.stages[1].getHistory())} epochs")
    spark.stop()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--store", help="a folder or URL that driver and executors reach; a temporary one by default")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=4)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        main(options.store or folder, options.ranks, options.epochs)
