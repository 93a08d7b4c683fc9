"""The one exception of our own; everything else raises ValueError, TypeError, IndexError or NotImplementedError."""

from __future__ import annotations

from collections.abc import Iterable


class QuantizationError(ValueError):
    """A model, checkpoint or packed weight is not what it claims to be, or was not quantized as asked.

    Args:
        message: what is wrong, the rule, the actual value, and what to do about it.
        names: dotted names of the modules or tensors concerned, in model order; may be empty.

    Attributes:
        names: the same names as a tuple, so that a caller can act on them without parsing the message.

    Example:
        >>> error = QuantizationError("2 layers stayed dense", names=["fc1", "fc2"])
        >>> str(error), error.names
        ('2 layers stayed dense', ('fc1', 'fc2'))
    """

    names: tuple[str, ...]

    def __init__(self, message: str, names: Iterable[str] = ()) -> None:
        # `names` stays out of `args`: str(error) is the message alone, and pickling carries `__dict__`.
        super().__init__(message)
        self.names = tuple(names)
