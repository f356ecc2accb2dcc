"""What a model is trained with."""

from ndistribute.models import optimizers

__all__ = ["optimizers"]
