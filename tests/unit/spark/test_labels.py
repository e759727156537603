"""Labels of a wrong shape: which losses compare number with number, and what is said when there are not as many.
Touches torch and Keras; starts no Spark."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pyspark")
pytest.importorskip("pyarrow")
torch = pytest.importorskip("torch")

from farandole.spark.common.estimator import check_labels  # noqa: E402
from farandole.spark.common.parquet import Column, DataError  # noqa: E402
from farandole.spark.torch.batches import compares_numbers  # noqa: E402


class Own(torch.nn.MSELoss):  # type: ignore[misc,name-defined]
    """A class of a user, with its own comparison."""

    def forward(self, output: Any, label: Any) -> Any:
        return super().forward(output, label.reshape(-1, 1).expand_as(output))


class Named(torch.nn.MSELoss):  # type: ignore[misc,name-defined]
    """A class of a user, which does the same as torch's class."""


def test_losses_of_torch() -> None:
    nn, functional = torch.nn, torch.nn.functional
    for loss in (nn.MSELoss(), nn.L1Loss, nn.BCEWithLogitsLoss(), functional.smooth_l1_loss, Named()):
        assert compares_numbers(loss), loss
    for loss in (
        nn.CrossEntropyLoss(),
        nn.NLLLoss,
        functional.cross_entropy,
        Own(),
        lambda output, label: output.sum(),
    ):
        assert not compares_numbers(loss), loss


@pytest.mark.parametrize(
    ("output", "label", "shapes"),
    [
        ((1,), (), None),
        ((), (1,), None),
        ((3,), (3,), None),
        ((2, 2), (4,), None),
        ((3,), (3,), [[-1, 3]]),
        ((4,), (2, 2), [[-1, 4]]),
        ((3,), (1,), [[2, -1]]),  # of a batch, so that a row's is not known
    ],
)
def test_labels_of_the_right_shape_are_accepted(output: Any, label: Any, shapes: Any) -> None:
    check_labels([output], [Column("y", "float64", label)], shapes, [True])


@pytest.mark.parametrize(("label", "shapes"), [((), None), ((1,), None), ((2,), None), ((1,), [[-1]])])
def test_labels_that_would_be_broadcast(label: Any, shapes: Any) -> None:
    column = Column("y", "float64", label)
    with pytest.raises(DataError, match=r"label column .y. has values of shape .* output for it is of shape \(3,\)"):
        check_labels([(3,)], [column], shapes, [True])
    check_labels([(3,)], [column], shapes, [False])  # class indices
