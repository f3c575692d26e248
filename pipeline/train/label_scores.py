"""Scores of predicted labels on held-out rows: accuracy, or squared error and correlation.

B rows · C classes, or one number
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from pipeline.model.head import IGNORED


def label_sums(labels_B: Tensor, rows_BC: Tensor) -> Tensor:
    """Return sums over the rows with a label, which can be added over micro-batches and ranks.

    For classes: rows, loss and right predictions. For numbers: rows, loss, and the first and second
    moments of prediction and label."""
    if not labels_B.is_floating_point():
        loss = F.cross_entropy(rows_BC.double(), labels_B, ignore_index=IGNORED, reduction="sum")
        right_B = rows_BC.argmax(-1) == labels_B  # false for rows without a label
        return torch.stack(((labels_B >= 0).sum(), loss, right_B.sum()))
    labeled_B = ~labels_B.isnan()
    guess_B = rows_BC[:, 0].double() * labeled_B
    label_B = labels_B.double().nan_to_num()
    products = (guess_B * guess_B, label_B * label_B, guess_B * label_B)
    error_B = (guess_B - label_B).square()
    parts = (labeled_B.double(), error_B, guess_B, label_B, *products)
    return torch.stack([part.sum() for part in parts])


def label_figures(sums: Tensor) -> dict[str, float]:
    """Return the figures of an evaluation, from `label_sums` of all rows."""
    rows, loss, *rest = sums.tolist()
    if len(rest) == 1:
        return {"loss": loss / rows, "labels/accuracy": rest[0] / rows}
    guess, label, guess_2, label_2, both = (each / rows for each in rest)
    # Rounding can make a variance slightly negative; without variance there is no correlation.
    spread = math.sqrt(max(0.0, guess_2 - guess**2) * max(0.0, label_2 - label**2))
    correlation = (both - guess * label) / spread if spread > 0 else 0.0
    return {"loss": loss / rows, "labels/correlation": correlation}
