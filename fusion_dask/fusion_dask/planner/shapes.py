"""Transformers known by their shape alone: from published sizes to a `ModelCost`, without torch.

Sizes: BERT-Large from Devlin et al. (arXiv 1810.04805); GPT-2 from Radford et al. (2019); GPT-3 from Brown
et al. (arXiv 2005.14165, table 2.1), where the width of 13B is printed as 5140 and 24 heads of 128 are given
to a width of 2048: taken as 5120, which is 40 heads of 128, and as 16 heads; Llama from Touvron et al.
(arXiv 2302.13971, table 2) and, for the widths of its feed-forward nets, the published configurations;
Llama 3 from Grattafiori et al. (arXiv 2407.21783, table 3).

Counted per token, H the width, K the width of keys or values, F that of the feed-forward net, V the
vocabulary, S the context:

- FLOPs: a matrix product of n weights takes 2 n forward and 4 n backward; attention 4 S H and 8 S H,
  not halved for causality. So a step of D tokens takes 6 N D + 12 L S H D, N without embeddings.
- memory: 16 bytes for a trained number. In float32: weight 4, gradient 4, Adam 8. In 16 bits: weight 2
  beside a float32 master of 4, gradient 2, Adam 8.
- kept for the backward: (4 H + 2 K) numbers for attention that does not store its S × S scores (Dao et
  al., arXiv 2205.14135), 2 H + 2 F for a feed-forward net, 2 H + 4 F for a gated one; as Korthikanti et al.
  (arXiv 2205.05198) count, without dropout and with the activation in one kernel. Logits and loss are
  in float32.
- a boundary: H numbers each way.

A block is half a layer, attention or feed-forward; embeddings and head are blocks of their own.

Not covered: models that are no such transformer, which are captured (`model_cost.py`).

Invariant: the number of parameters is that of the published model, exactly.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Literal

from fusion_dask.errors import PlanError
from fusion_dask.planner.records import BlockCost, ModelCost, TiedParameter

__all__ = ["SHAPES", "Shape", "parameters_of", "shape_cost", "shape_named"]

Family = Literal["gpt", "llama", "bert"]

#: Bytes of a number in the matrix products and at boundaries.
ELEMENT_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2}
#: Token types of BERT.
BERT_TYPES: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The sizes of a transformer.

    Attributes:
        name: As people type it.
        family: gpt: LayerNorm, biases, learned positions, head tied to the embedding. llama: RMSNorm,
            no biases, gated feed-forward, own head. bert: as gpt, both ways, with token types and a
            transform before the tied head, which is applied to every position.
        layers: Number of layers.
        width: Of the hidden state.
        heads: Attention heads; divides the width.
        kv_heads: Heads of keys and values.
        ffn: Width of the feed-forward net.
        vocabulary: Rows of the embedding.
        context: Longest sequence, in tokens.
    """

    name: str
    family: Family
    layers: int
    width: int
    heads: int
    kv_heads: int
    ffn: int
    vocabulary: int
    context: int

    @property
    def kv_width(self) -> int:
        """Width of the keys, and of the values."""
        return self.width // self.heads * self.kv_heads


def _plain(
    name: str, family: Family, layers: int, width: int, heads: int, vocabulary: int, context: int
) -> Shape:
    return Shape(
        name=name,
        family=family,
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn=4 * width,
        vocabulary=vocabulary,
        context=context,
    )


def _llama(name: str, layers: int, width: int, heads: int, ffn: int) -> Shape:
    return Shape(
        name=name,
        family="llama",
        layers=layers,
        width=width,
        heads=heads,
        kv_heads=heads,
        ffn=ffn,
        vocabulary=32000,
        context=2048,
    )


SHAPES: Final[Mapping[str, Shape]] = MappingProxyType(
    {
        shape.name: shape
        for shape in (
            _plain("bert-large", "bert", 24, 1024, 16, 30522, 512),
            _plain("gpt2", "gpt", 12, 768, 12, 50257, 1024),
            _plain("gpt2-xl", "gpt", 48, 1600, 25, 50257, 1024),
            _plain("gpt3-xl", "gpt", 24, 2048, 16, 50257, 2048),
            _plain("gpt3-6.7b", "gpt", 32, 4096, 32, 50257, 2048),
            _plain("gpt3-13b", "gpt", 40, 5120, 40, 50257, 2048),
            _plain("gpt3-175b", "gpt", 96, 12288, 96, 50257, 2048),
            _llama("llama-7b", 32, 4096, 32, 11008),
            _llama("llama-13b", 40, 5120, 40, 13824),
            _llama("llama-65b", 80, 8192, 64, 22016),
            Shape(
                name="llama3-8b",
                family="llama",
                layers=32,
                width=4096,
                heads=32,
                kv_heads=8,
                ffn=14336,
                vocabulary=128256,
                context=8192,
            ),
        )
    }
)


def shape_named(name: str) -> Shape:
    """A shape by its name.

    Raises:
        PlanError: There is none of that name.
    """
    if name not in SHAPES:
        raise PlanError(f"no shape is called {name!r}; there are {', '.join(SHAPES)}")
    return SHAPES[name]


def parameters_of(shape: Shape) -> int:
    """All trainable numbers, tied ones once.

    >>> parameters_of(shape_named("gpt2")), parameters_of(shape_named("llama-7b"))
    (124439808, 6738415616)
    """
    cost = shape_cost(shape)
    return sum(b.parameters for b in cost.blocks) + sum(t.parameters for t in cost.tied)


def shape_cost(
    shape: Shape, *, batch: int = 1, context: int | None = None, dtype: str = "bfloat16"
) -> ModelCost:
    """What the planner has to know of a shape.

    Args:
        shape: The shape.
        batch: Sequences in a microbatch.
        context: Tokens in a sequence; the longest by default.
        dtype: Of the matrix products and boundaries.

    Raises:
        PlanError: The sequence is longer than the shape allows, or the dtype is unknown.
    """
    length = shape.context if context is None else context
    if not 0 < length <= shape.context:
        raise PlanError(f"{shape.name} takes 1 to {shape.context} tokens, not {length}")
    if dtype not in ELEMENT_BYTES:
        raise PlanError(f"the dtype is one of {', '.join(ELEMENT_BYTES)}, not {dtype!r}")
    counts = _Counts(shape=shape, tokens=batch * length, length=length, dtype=dtype)
    blocks = tuple(counts.blocks())
    boundary = batch * length * shape.width * ELEMENT_BYTES[dtype]
    between = (boundary,) * (len(blocks) - 1)
    return ModelCost(
        name=shape.name,
        dtype=dtype,
        tokens=batch * length,
        blocks=blocks,
        positions=tuple(range(1, len(blocks))),
        boundary_bytes=between,
        gradient_boundary_bytes=between,
        tied=counts.tied(len(blocks)),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Counts:
    """Counts the blocks of one microbatch."""

    shape: Shape
    tokens: int
    length: int
    dtype: str

    def blocks(self) -> Iterator[BlockCost]:
        shape = self.shape
        yield self._embedding()
        for i in range(shape.layers):
            yield self._attention(f"{i}.attn")
            yield self._feed_forward(f"{i}.mlp")
        yield self._head()

    def tied(self, blocks: int) -> tuple[TiedParameter, ...]:
        if self.shape.family == "llama":
            return ()
        table = self.shape.vocabulary * self.shape.width
        return (
            TiedParameter(
                name="embedding",
                parameters=table,
                parameter_bytes=table * self._weight_bytes,
                gradient_bytes=table * self._element_bytes,
                blocks=(0, blocks - 1),
            ),
        )

    @property
    def _element_bytes(self) -> int:
        return ELEMENT_BYTES[self.dtype]

    @property
    def _weight_bytes(self) -> int:
        """With a float32 master where the weights have 16 bits."""
        return 4 if self.dtype == "float32" else 4 + self._element_bytes

    def _block(  # noqa: PLR0913 - one argument a quantity
        self,
        name: str,
        *,
        weights: int,
        others: int,
        attention_flops: int = 0,
        moved: int,
        saved: int,
        working: int,
        looked_up: bool = False,
        tied: int = 0,
    ) -> BlockCost:
        """A block of `weights` in matrix products and `others` beside; the rest is numbers a token."""
        element = self._element_bytes
        products = 0 if looked_up else weights
        forward = float(self.tokens * (2 * products + attention_flops))
        own = weights + others - tied
        traffic = float(self.tokens * moved * element)
        return BlockCost(
            name=name,
            forward_flops=forward,
            backward_flops=2 * forward,
            forward_bytes=traffic,
            backward_bytes=2 * traffic,
            streamed_bytes=float(products * element),
            parameters=own,
            parameter_bytes=own * self._weight_bytes,
            gradient_bytes=own * element,
            saved_bytes=self.tokens * saved * element,
            working_bytes=(self.tokens * working + weights) * element,
        )

    def _norm(self) -> int:
        return self.shape.width * (1 if self.shape.family == "llama" else 2)

    def _embedding(self) -> BlockCost:
        shape = self.shape
        table = shape.vocabulary * shape.width
        tied = 0 if shape.family == "llama" else table
        others = 0 if shape.family == "llama" else shape.context * shape.width
        if shape.family == "bert":
            others += BERT_TYPES * shape.width + self._norm()
        return self._block(
            "embedding",
            weights=table,
            others=others,
            moved=2 * shape.width,
            saved=shape.width if shape.family == "bert" else 0,
            working=shape.width,
            looked_up=True,
            tied=tied,
        )

    def _attention(self, name: str) -> BlockCost:
        width, keys = self.shape.width, self.shape.kv_width
        biases = 0 if self.shape.family == "llama" else 2 * width + 2 * keys
        return self._block(
            name,
            weights=2 * width * width + 2 * width * keys,
            others=biases + self._norm(),
            attention_flops=4 * self.length * width,
            moved=11 * width + 4 * keys,
            saved=4 * width + 2 * keys,
            working=2 * width + 2 * keys,
        )

    def _feed_forward(self, name: str) -> BlockCost:
        width, ffn = self.shape.width, self.shape.ffn
        if self.shape.family == "llama":
            return self._block(
                name,
                weights=3 * width * ffn,
                others=self._norm(),
                moved=8 * width + 8 * ffn,
                saved=2 * width + 4 * ffn,
                working=width + 3 * ffn,
            )
        return self._block(
            name,
            weights=2 * width * ffn,
            others=ffn + width + self._norm(),
            moved=7 * width + 4 * ffn,
            saved=2 * width + 2 * ffn,
            working=width + 2 * ffn,
        )

    def _head(self) -> BlockCost:
        """The last norm, BERT's transform, the logits and the loss."""
        shape = self.shape
        table = shape.vocabulary * shape.width
        weights, others = table, self._norm()
        if shape.family == "bert":
            # The layers have their norms at the end: this is the transform's.
            weights += shape.width * shape.width
            others += shape.width + shape.vocabulary
        wide = 4 // self._element_bytes  # a float32 number in elements
        return self._block(
            "head",
            weights=weights,
            others=others,
            moved=3 * shape.width + shape.vocabulary * (1 + 2 * wide),
            saved=2 * shape.width + shape.vocabulary * wide,
            working=shape.vocabulary * (1 + wide),
            tied=0 if shape.family == "llama" else table,
        )
