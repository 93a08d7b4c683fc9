"""QuantEmbedding: an `nn.Embedding` whose table is packed rows."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.formats import Format
from halfbyte.nn.packed import PackedRows, as_dtype
from halfbyte.nn.tensor_parallel import embed_sharded
from halfbyte.ops.embedding import embedding
from halfbyte.ops.quantize import quantize
from halfbyte.optim.sharding import is_dtensor


class QuantEmbedding(PackedRows, nn.Embedding):  # type: ignore[misc]  # weight: uint8 Parameter in both
    """A lookup table stored as packed rows: a gather of rows, then a decode of nothing else.

    Args:
        num_embeddings: V, rows of the table.
        embedding_dim: K, size of each embedding.
        padding_idx: as for `nn.Embedding`; the row is zero and, like every packed row, never gets a gradient.
        format: a `Format` or its name; int8 is nearly lossless.
        compute_dtype: dtype (or its name) of the output. None: `dtype`.
        device: where to put the table; on "meta" nothing is computed.
        dtype: dtype of the dense table this stands for; None: torch's default dtype.

    Attributes:
        weight: packed rows, shape (V, row_bytes) uint8, `requires_grad=False`.

    Raises:
        ValueError: unknown format or compute dtype, or `padding_idx` outside the table.
        TypeError: `compute_dtype` is not a dtype.

    Example:
        >>> import torch, halfbyte
        >>> table = halfbyte.nn.QuantEmbedding(1000, 64)
        >>> table(torch.tensor([[1, 2, 3]])).shape
        torch.Size([1, 3, 64])
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        *,
        format: str | Format = "int8",
        compute_dtype: torch.dtype | str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        nn.Module.__init__(self)
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"QuantEmbedding: padding_idx must be from {-num_embeddings} to {num_embeddings - 1}, got {padding_idx}"
            )
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.max_norm, self.norm_type, self.scale_grad_by_freq, self.sparse = None, 2.0, False, False
        self._init_packed(format, compute_dtype, dtype, device)
        self.reset_parameters()

    @property
    def weight_shape(self) -> tuple[int, int]:
        """(num_embeddings, embedding_dim)."""
        return self.num_embeddings, self.embedding_dim

    def reset_parameters(self) -> None:
        """Draws the table `nn.Embedding` would draw and quantizes it; on meta there is nothing to do."""
        if self.weight.is_meta:
            return
        dense = torch.empty(self.weight_shape, device=self.weight.device, dtype=self.dense_dtype)
        nn.init.normal_(dense)
        if self.padding_idx is not None:
            dense[self.padding_idx].zero_()
        self.quantize_(dense)

    def forward(self, input: Tensor) -> Tensor:
        """Looks up embeddings.

        Args:
            input: indices of any shape, int64 or int32.

        Returns:
            Shape (*input.shape, embedding_dim) in the compute dtype.

        Raises:
            TypeError: `input` is not int64 or int32.
            IndexError: an index outside the table.
        """
        weight = self.weight
        if is_dtensor(weight):
            return embed_sharded(input, weight, self._look_up, self.embedding_dim)
        return self._look_up(input, self.packed if self._contained else weight)

    def _look_up(self, indices: Tensor, packed: Tensor) -> Tensor:
        return embedding(indices, packed, self.format, self.embedding_dim, self.compute_dtype or self.dense_dtype)

    @classmethod
    def from_embedding(
        cls, table: nn.Embedding, format: str | Format = "int8", *, compute_dtype: torch.dtype | str | None = None
    ) -> QuantEmbedding:
        """A quantized copy of a dense table.

        Raises:
            TypeError: `table` is not an `nn.Embedding`, or is quantized already.
            NotImplementedError: `max_norm` is set: it rewrites rows during forward, which packed rows can't do.
        """
        if not isinstance(table, nn.Embedding) or isinstance(table, QuantEmbedding):
            raise TypeError(
                f"QuantEmbedding.from_embedding: table must be a dense nn.Embedding, got {type(table).__name__}"
            )
        copy = nn.Embedding(
            table.num_embeddings, table.embedding_dim, table.padding_idx, table.max_norm, device="meta"
        ).train(table.training)
        copy._parameters["weight"] = table._parameters["weight"]
        return quantize_embedding_(copy, Format.parse(format), as_dtype("compute_dtype", compute_dtype))

    def extra_repr(self) -> str:
        """Sizes, padding and format."""
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}, format={self.format}"


def quantize_embedding_(table: nn.Embedding, format: Format, compute_dtype: torch.dtype | None) -> QuantEmbedding:
    """Turns a dense table into a QuantEmbedding where it stands; see `quantize_linear_`."""
    if table.max_norm is not None:
        raise NotImplementedError("QuantEmbedding: max_norm rewrites rows during forward; packed rows are frozen")
    weight = table.weight
    if weight.is_meta:
        shape = (table.num_embeddings, format.row_bytes(table.embedding_dim))
        packed = torch.empty(shape, dtype=torch.uint8, device="meta")
    else:
        packed = quantize(weight.detach(), format)
    table._parameters["weight"] = nn.Parameter(packed, requires_grad=False)
    if getattr(weight, "_is_hf_initialized", False):
        table.weight._is_hf_initialized = True  # type: ignore[attr-defined]
    table.__class__ = QuantEmbedding
    assert isinstance(table, QuantEmbedding)
    table.format, table.compute_dtype, table.dense_dtype = format, compute_dtype, weight.dtype
    return table


def dequantize_embedding_(table: QuantEmbedding, weight: nn.Parameter) -> nn.Embedding:
    """The inverse of `quantize_embedding_`: the module becomes a dense `nn.Embedding` with the given weight (V, K)."""
    for name in ("format", "compute_dtype", "dense_dtype"):
        table.__dict__.pop(name, None)
    table.__class__ = nn.Embedding  # type: ignore[assignment]
    dense: nn.Embedding = table
    dense._parameters["weight"] = weight
    return dense
