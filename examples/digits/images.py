"""The digits data that ships with scikit-learn: 1,797 scans of 8 by 8 pixels, half held out.

Server and client split in the same way, so what the client posts was never trained on.
"""

from typing import Any

from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split


def split() -> tuple[Any, Any, Any, Any]:
    """Return training images, held-out images, training labels, held-out labels."""
    images, labels = load_digits(return_X_y=True)
    return tuple(train_test_split(images, labels, test_size=0.5, random_state=0, stratify=labels))
